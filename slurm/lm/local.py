"""Runs on this machine: stage after stage, or several jobs at a time; and the state of such a run."""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue

from alma.files import holder, locked, make_directory
from alma.records import Run
from alma.stages import stages
from slurm.engine import children
from slurm.engine.machine import devices
from slurm.engine.queue import JobStatus, SubmittedJob, tail
from slurm.engine.terminal import say
from slurm.lm.cluster import check_queue
from slurm.lm.plan import Plan
from slurm.lm.progress import ProgressBar
from slurm.lm.record import RESULT, TRAINED, UNTRAINED, collect, open_run, read_measured, summary
from slurm.lm.stage import Environment, RunJob, TrainJob, jobs_of

_MARKERS = {"untrained.log": UNTRAINED, "train.log": TRAINED, "eval.log": RESULT}
"""The marker that each log's job writes."""


def launch_here(plans: Sequence[Plan], jobs: int) -> None:
    """Run all plans on this machine, `jobs` jobs at a time; print the rows."""
    for group in [plans] if jobs > 1 else [[plan] for plan in plans]:
        if len(plans) > 1 and jobs == 1:
            print(f"\n{group[0].out}", flush=True)
        with ExitStack() as stack:
            for plan in group:
                make_directory(plan.out)
                stack.enter_context(locked(plan.out))
                check_queue(plan)
            runs = [open_run(plan) for plan in group]
            if jobs > 1:
                run_side_by_side(plans, runs, jobs)
            else:
                run_in_order(group[0], runs[0])
        for run in runs:
            print(f"\n{run.directory}\n{summary(run)}" if jobs > 1 else summary(run))


def run_in_order(plan: Plan, run: Run) -> None:
    """Do what is missing of a run, one job after the other, with a progress bar."""
    trainings = [training for spec in plan.stages for training in spec.trainings]
    with ProgressBar([training.updates for training in trainings]) as progress:
        for job in jobs_of(plan):
            if isinstance(job, TrainJob):
                training = job.training
                complete = job.done or (job.spec.directory / RESULT).exists()
                if not complete and training.source:
                    job.do()
                    say(f"{training.title}: shared with {training.source}")
                elif not complete:
                    resumed = (job.directory / "checkpoint_last.pt").exists()
                    progress.start(training.title, resumed=resumed, earlier=training.earlier)
                    job.do(watch=progress.read)
                progress.trained(now=not (complete or training.source))
                continue
            is_stage = job.kind == "evaluate"
            title = job.spec.title if is_stage else "untrained model"
            if not job.done:
                progress.start(title, "evaluating")
                job.do()
                if is_stage:
                    progress.done(f"perplexity {read_measured(job.marker)['perplexity']:.2f}")
            elif is_stage:
                say(f"{title}: was complete")
            collect(plan, run)


def run_side_by_side(plans: Sequence[Plan], runs: Sequence[Run], jobs: int) -> None:
    """Do all jobs of the `plans`, up to `jobs` at a time, each with an equal share of the GPUs.

    A failure stops its dependents only; once all others are done, the first error is raised.
    """
    records = {plan.out: run for plan, run in zip(plans, runs, strict=True)}
    waiting = {job.marker: job for plan in plans for job in jobs_of(plan)}
    needs = {job.marker: set(job.needs) for job in waiting.values()}
    errors: list[Exception] = []
    appending = threading.Lock()
    free: SimpleQueue[Environment] = SimpleQueue()
    for names in devices(jobs):
        free.put({} if names is None else {"CUDA_VISIBLE_DEVICES": names})

    def do(job: RunJob) -> None:
        began, complete = time.monotonic(), job.done
        if not complete:
            say(f"{job}: started")
            environment = free.get()
            try:
                job.do(environment)
            finally:
                free.put(environment)
        with appending:  # also after a complete job: a kill may have come before its rows
            collect(job.plan, records[job.run])
        say(f"{job}: was complete" if complete else f"{job}: done in {time.monotonic() - began:.0f} s")

    started: dict[Future, Path] = {}
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(jobs))
        stack.callback(children.end_all)  # on Ctrl-C, before the pool waits for its threads
        while waiting or started:
            ready = [marker for marker in waiting if not needs[marker]]
            for marker in ready[: jobs - len(started)]:
                started[pool.submit(do, waiting.pop(marker))] = marker
            if not started:
                break  # only dependents of failed jobs are left
            done, _ = wait(started, return_when=FIRST_COMPLETED)
            for future in done:
                marker = started.pop(future)
                error = future.exception()
                if isinstance(error, Exception):
                    errors.append(error)
                    say(f"error: {marker.parent}: {error}")
                    continue
                for markers in needs.values():
                    markers.discard(marker)
    if errors:
        raise errors[0]


def state_of(directory: Path) -> JobStatus:
    """State of a local run, as slurm.status documents it. Raises UserError as `Run.read` does."""
    run = Run.read(directory)
    rows, end = run.rows, run.config["megabatches"]
    t = rows[-1]["t"] if rows else 0
    name = f"mega-batch {t} of {end}"
    job = SubmittedJob(run=directory, name=name, kind="run", marker=run.results)
    logs = [path for log in _MARKERS for path in directory.rglob(log)]
    logs.sort(key=lambda log: log.stat().st_mtime, reverse=True)
    latest = logs[0] if logs else None
    if who := holder(directory):
        return JobStatus(job, "running", why=who, log=latest)
    schedule = stages(end, run.config["waiting_time"], run.config["replay"])
    count = min(run.info.get("stages") or len(schedule), len(schedule))
    if rows and t >= schedule[count - 1].last:
        return JobStatus(job, "done", why="" if t == end else f"{count} of {len(schedule)} stages requested")
    for log in logs:
        if log.with_name(_MARKERS[log.name]).exists():
            continue
        # Only the last child's output: earlier errors may be fixed.
        if failed := children.last_problem(tail(log).rpartition("\n$ ")[2]):
            return JobStatus(job, "failed", why=failed[1], log=log)
    return JobStatus(job, "stopped", why="rerun the same command to resume", log=latest)
