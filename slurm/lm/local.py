"""Run plans on this machine, one job after another or several at a time; state of local runs."""

import json
import shlex
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from queue import SimpleQueue

from tqdm import tqdm

from alma.files import holder, locked, make_directory
from alma.records import Run
from alma.stages import stages
from slurm.engine import children
from slurm.engine.children import Environment, Watch
from slurm.engine.machine import devices
from slurm.engine.queue import JobStatus, SubmittedJob, tail
from slurm.engine.terminal import say
from slurm.lm.cluster import check_queue
from slurm.lm.plan import Plan
from slurm.lm.record import (
    LATE_LOG,
    RESULT,
    TRAINED,
    UNTRAINED,
    collect,
    open_run,
    read_late,
    read_measured,
    summary,
)
from slurm.lm.stage import LateJob, RunJob, TrainJob, jobs_of, late_jobs

_MARKERS = {"untrained.log": UNTRAINED, "train.log": TRAINED, "eval.log": RESULT}
"""Name of each log -> name of the marker that the log's job writes."""
LINE_SECONDS = 60  # seconds between two lines about a training, without a terminal


def launch_here(plans: Sequence[Plan], jobs: int) -> None:
    """Run all plans on this machine, `jobs` jobs at a time, each with an equal share of the GPUs.

    With one job at a time, the first failure ends everything. With several, a failure skips only
    the jobs that depend on it, and the first error is raised when all other jobs are done.
    """
    runs, errors = do_here(plans, jobs)
    for run in runs:
        print(f"\n{run.directory}\n{summary(run)}")
    if errors:
        raise errors[0]


def do_here(plans: Sequence[Plan], jobs: int) -> tuple[list[Run], list[Exception]]:
    """As `launch_here`, without its output; returns the errors of several jobs at a time."""
    errors: list[Exception] = []
    with ExitStack() as stack:
        for plan in plans:
            make_directory(plan.out)
            stack.enter_context(locked(plan.out))
            check_queue(plan)
        runs = {plan.out: open_run(plan) for plan in plans}
        for plan in plans:  # what an earlier launch measured but was killed before it recorded
            collect(plan, runs[plan.out])
        all_jobs = _late_first([job for plan in plans for job in _jobs(plan)])
        progress = stack.enter_context(TrainingProgress(all_jobs))
        worker = _Worker(runs, progress, jobs)
        if jobs == 1:  # in the main thread, which Ctrl-C interrupts, so that it ends the child
            for job in all_jobs:
                worker.do(job)
        else:
            errors = _do_concurrently(all_jobs, jobs, worker.do)
    return list(runs.values()), errors


def _jobs(plan: Plan) -> Sequence[RunJob]:
    """The jobs of a plan here, each after those it needs."""
    return late_jobs(plan) if plan.tests_only else jobs_of(plan)


def _late_first(jobs: Sequence[RunJob]) -> list[RunJob]:
    """The jobs of several runs, late evaluations before all others."""
    return sorted(jobs, key=lambda job: not isinstance(job, LateJob))


class _Worker:
    """Does jobs of several runs, possibly in several threads, and appends rows to the runs."""

    def __init__(self, runs: Mapping[Path, Run], progress: "TrainingProgress", jobs: int) -> None:
        self._runs = runs
        self._progress = progress
        self._appending = threading.Lock()
        self._free_devices: SimpleQueue[Environment] = SimpleQueue()
        for names in devices(jobs) if jobs > 1 else [None]:
            self._free_devices.put({} if names is None else {"CUDA_VISIBLE_DEVICES": names})

    def do(self, job: RunJob) -> None:
        """Do a job unless it is complete, append the rows that are now known, and print a line."""
        began = time.monotonic()
        complete = job.done
        if isinstance(job, TrainJob):  # after its evaluation, checkpoints may have been deleted
            complete = complete or (job.spec.directory / RESULT).exists()
        if not complete:
            say(f"{job}: started")
            environment = self._free_devices.get()
            try:
                job.do(environment, self._progress.watch(job))
            finally:
                self._free_devices.put(environment)
        # Also for a job that was complete before: the launcher may have been killed before it
        # appended the rows.
        with self._appending:
            collect(job.plan, self._runs[job.run])
        outcome = "was complete" if complete else f"done in {time.monotonic() - began:.0f} s"
        outcome += self._details(job, complete)
        if not complete and self._progress.bar.disable:
            outcome += self._progress.left
        say(f"{job}: {outcome}")

    def _details(self, job: RunJob, complete: bool) -> str:
        """Perplexity of an evaluation, or source of a shared training, whose updates now count."""
        if isinstance(job, LateJob):
            values = [f"{cell['value']:,.2f}" for cell in read_late(job.marker)]
            return f", perplexity {', '.join(values)}" if values else ""
        if not isinstance(job, TrainJob):
            return f", perplexity {read_measured(job.marker)['perplexity']:,.2f}"
        source = job.training.source
        if job.training.updates:
            skipped = complete or source is not None
            self._progress.count(job, job.training.updates, skipped=skipped)
        return f", shared with {source}" if source else ""


def _do_concurrently(
    jobs: Sequence[RunJob], limit: int, do: Callable[[RunJob], None]
) -> list[Exception]:
    """Do `jobs`, `limit` at a time, each after those that it needs; return the errors."""
    waiting = {job.marker: job for job in jobs}
    needs = {job.marker: set(job.needs) for job in jobs}
    errors: list[Exception] = []
    started: dict[Future, Path] = {}
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(limit))
        stack.callback(children.end_all)  # on Ctrl-C: before the pool waits for its threads
        while waiting or started:
            ready = [marker for marker in waiting if not needs[marker]]
            for marker in ready[: limit - len(started)]:
                started[pool.submit(do, waiting.pop(marker))] = marker
            if not started:
                break  # the remaining jobs depend on failed ones
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
    return errors


class TrainingProgress(AbstractContextManager):
    """Updates of all trainings: a bar on a terminal, else a line for each in LINE_SECONDS."""

    def __init__(self, jobs: Sequence[RunJob]) -> None:
        sizes = [job.training.updates for job in jobs if isinstance(job, TrainJob)]
        self.total = None if None in sizes else sum(size or 0 for size in sizes)
        self.updates: dict[Path, int] = {}  # marker of a training -> its updates so far
        self.skipped = 0  # updates that were done before this launch
        self.began = time.monotonic()
        # smoothing=0: the average speed, with start-ups and evaluations, predicts the end of all
        # trainings; disable=None: off without a terminal
        self.bar = tqdm(
            total=self.total, unit="update", dynamic_ncols=True, smoothing=0, disable=None
        )

    def __exit__(self, *_: object) -> None:
        self.bar.close()

    def count(self, job: TrainJob, updates: int, skipped: bool = False) -> None:
        """Note the updates of a training so far; `skipped`: it had them before this launch."""
        added = updates - self.updates.get(job.marker, 0)
        self.updates[job.marker] = updates
        if skipped:
            self.skipped += added
            self.bar.initial = self.skipped
        self.bar.update(sum(self.updates.values()) - self.bar.n)

    def watch(self, job: RunJob) -> Watch:
        """A function that reads the lines of a training's log; None for another job."""
        if not isinstance(job, TrainJob):
            return None
        last_line = time.monotonic()
        resumed = (job.directory / "checkpoint_last.pt").exists()

        def read(line: str) -> None:
            nonlocal last_line, resumed
            try:
                stats = json.loads(line.partition(" | train_inner | ")[2])
                updates = int(stats["num_updates"]) - job.training.earlier
            except (
                ValueError,
                KeyError,
                TypeError,
            ):  # some other line, or lines of several processes mixed up
                return
            self.count(job, updates, skipped=resumed)
            resumed = False
            shown = ", ".join(
                f"{name} {stats[name]}" for name in ("loss", "ppl", "wps") if name in stats
            )
            self.bar.set_postfix_str(shown, refresh=False)
            if self.bar.disable and time.monotonic() - last_line > LINE_SECONDS:
                last_line = time.monotonic()
                say(
                    f"{job}: {updates} of {job.training.updates or '?'} updates, {shown}{self.left}"
                )

        return read

    @property
    def left(self) -> str:
        """Such as "; about 02:10 left" of all trainings; empty if that is unknown."""
        complete = sum(self.updates.values())
        if not self.total or complete in (self.skipped, self.total):
            return ""
        seconds_per_update = (time.monotonic() - self.began) / (complete - self.skipped)
        seconds_left = seconds_per_update * (self.total - complete)
        return f"; about {tqdm.format_interval(seconds_left)} left"


def state_of(directory: Path) -> JobStatus:
    """State of a local run, as slurm.status documents it. Raises UserError as `Run.read` does."""
    run = Run.read(directory)
    rows = run.rows
    end = run.config["megabatches"]
    t = rows[-1]["t"] if rows else 0
    name = f"mega-batch {t} of {end}"
    job = SubmittedJob(run=directory, name=name, kind="run", marker=run.results)
    logs = [path for log in (*_MARKERS, LATE_LOG) for path in directory.rglob(log)]
    logs.sort(key=lambda log: log.stat().st_mtime, reverse=True)
    latest = logs[0] if logs else None
    schedule = stages(end, run.config["waiting_time"], run.config["replay"])
    count = min(run.info.get("stages") or len(schedule), len(schedule))
    is_complete = bool(rows) and t >= schedule[count - 1].last
    who = holder(directory)
    if who and t == end:  # another run of the launch trains, or this one is tested
        return JobStatus(job, "done", why=f"its launch still works: {who}", log=latest)
    if who:
        return JobStatus(job, "running", why=who, log=latest)
    if run.is_tested_ahead:
        why = f"tested on what has arrived since: alma due {shlex.quote(str(directory))}"
        return JobStatus(job, "done", why=why, log=latest)
    if is_complete:
        return JobStatus(
            job, "done", why="" if t == end else f"{count} of {len(schedule)} stages requested"
        )
    for log in logs:
        marker = _MARKERS.get(log.name)
        if marker and log.with_name(marker).exists():
            continue
        # Look only at the output of the last child, since earlier errors may be fixed.
        failed = children.last_problem(tail(log).rpartition("\n$ ")[2])
        if failed:
            return JobStatus(job, "failed", why=failed[1], log=log)
    return JobStatus(job, "stopped", why="rerun the same command to resume", log=latest)
