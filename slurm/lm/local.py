"""Runs on this machine, several of their trainings and evaluations side by side."""

import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue

from alma.errors import UserError
from alma.records import Run
from slurm.engine import children as child
from slurm.engine.jobs import Unit, needs, units
from slurm.engine.machine import Machine, devices
from slurm.lm import stage
from slurm.lm.plan import Plan
from slurm.lm.progress import say

Environment = Mapping[str, str]


def run_side_by_side(plans: Sequence[Plan], runs: Sequence[Run], jobs: int) -> None:
    """Do all units of the `plans`, up to `jobs` at a time, each after those that it needs.

    Each has its share of the GPUs to itself. When one fails, those that need it are left out and the others
    go on; then its error is raised.
    """
    records = {plan.out: run for plan, run in zip(plans, runs, strict=True)}
    waiting = {unit.marker: unit for plan in plans for unit in units(plan)}
    needed = {
        unit.marker: {each.marker for each in needs(unit, units(unit.plan))} for unit in waiting.values()
    }
    errors: list[Exception] = []
    appending = threading.Lock()
    free: SimpleQueue[Environment] = SimpleQueue()
    for names in devices(jobs):
        free.put({} if names is None else {"CUDA_VISIBLE_DEVICES": names})
    started: dict[Future, Path] = {}
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(jobs))
        stack.callback(child.end_all)  # on Ctrl-C; the pool waits for its threads after that
        while waiting or started:
            ready = [marker for marker in waiting if not needed[marker]]
            for marker in ready[: jobs - len(started)]:
                unit = waiting.pop(marker)
                started[pool.submit(_do, unit, records[unit.plan.out], appending, free)] = marker
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


def slot(plans: Sequence[Plan], jobs: int) -> Machine:
    """What each of `jobs` trainings side by side has of this machine. UserError: no GPU of its own."""
    machine = Machine.here()
    gpus = len(machine.gpus)
    commands = [training.command for plan in plans for spec in plan.stages for training in spec.trainings]
    if 0 < gpus < jobs and not all("--cpu" in command for command in commands):
        raise UserError(
            f"--jobs {jobs}: this machine has {gpus} GPU{'s' * (gpus > 1)}, and each training takes at least "
            f"one to itself: give --jobs {gpus} or fewer, or --cpu after the `--`"
        )
    return machine.slot(jobs)


def _do(unit: Unit, run: Run, appending: threading.Lock, free: "SimpleQueue[Environment]") -> None:
    began, what = time.monotonic(), f"{unit.plan.out} {unit.name}"
    complete = unit.marker.exists()
    if not complete:
        say(f"{what}: started")
        environment = free.get()
        try:
            if unit.kind == "untrained":
                stage.evaluate_untrained(unit.plan, environment)
            elif unit.kind == "train":
                stage.train(unit.spec.trainings[unit.member], environment=environment)
            else:
                stage.evaluate(unit.spec, environment)
        finally:
            free.put(environment)
    with appending:  # also what was complete: a kill may have come before its rows
        stage.collect(unit.plan, run)
    say(f"{what}: was complete" if complete else f"{what}: done in {time.monotonic() - began:.0f} s")
