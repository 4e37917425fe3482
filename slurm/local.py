"""Runs on this machine, several of their trainings and evaluations side by side."""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path

from alma.records import Run
from slurm import child, stage
from slurm.plan import Plan
from slurm.progress import say
from slurm.unit import Unit, needs, units


def run_side_by_side(plans: Sequence[Plan], runs: Sequence[Run], jobs: int) -> None:
    """Do all units of the `plans`, up to `jobs` at a time, each after those that it needs.

    When one fails, those that need it are left out and the others go on; then its error is raised.
    """
    records = {plan.out: run for plan, run in zip(plans, runs, strict=True)}
    waiting = {unit.marker: unit for plan in plans for unit in units(plan)}
    needed = {
        unit.marker: {each.marker for each in needs(unit, units(unit.plan))} for unit in waiting.values()
    }
    errors: list[Exception] = []
    appending = threading.Lock()
    started: dict[Future, Path] = {}
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(jobs))
        stack.callback(child.end_all)  # on Ctrl-C; the pool waits for its threads after that
        while waiting or started:
            ready = [marker for marker in waiting if not needed[marker]]
            for marker in ready[: jobs - len(started)]:
                unit = waiting.pop(marker)
                started[pool.submit(_do, unit, records[unit.plan.out], appending)] = marker
            if not started:
                break  # what is left needs what failed
            done, _ = wait(started, return_when=FIRST_COMPLETED)
            for future in done:
                marker = started.pop(future)
                error = future.exception()
                if isinstance(error, Exception):
                    errors.append(error)
                    say(f"error: {marker.parent}: {error}")
                    continue
                for each in needed.values():
                    each.discard(marker)
    if errors:
        raise errors[0]


def _do(unit: Unit, run: Run, appending: threading.Lock) -> None:
    began, what = time.monotonic(), f"{unit.plan.out} {unit.name}"
    complete = unit.marker.exists()
    if not complete:
        say(f"{what}: started")
        if unit.kind == "untrained":
            stage.evaluate_untrained(unit.plan)
        elif unit.kind == "train":
            stage.train(unit.spec.trainings[unit.member])
        else:
            stage.evaluate(unit.spec)
    with appending:  # also what was complete: a kill may have come before its rows
        stage.collect(unit.plan, run)
    say(f"{what}: was complete" if complete else f"{what}: done in {time.monotonic() - began:.0f} s")
