"""Runs on this machine: stage after stage, or several jobs at a time; and the state of such a
run."""

import json
import threading
import time
from collections.abc import Sequence
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
from slurm.lm.record import RESULT, TRAINED, UNTRAINED, collect, open_run, read_measured, summary
from slurm.lm.stage import RunJob, TrainJob, jobs_of

_MARKERS = {"untrained.log": UNTRAINED, "train.log": TRAINED, "eval.log": RESULT}
"""The marker that each log's job writes."""
LINE_SECONDS = 60  # between lines about one training


def launch_here(plans: Sequence[Plan], jobs: int) -> None:
    """Run all plans on this machine, `jobs` jobs at a time, each with an equal share of the GPUs.

    A failure ends everything if jobs are done one after the other. Of several at a time it stops
    its dependents only, and the first error is raised once all others are done.
    """
    with ExitStack() as stack:
        for plan in plans:
            make_directory(plan.out)
            stack.enter_context(locked(plan.out))
            check_queue(plan)
        runs = {plan.out: open_run(plan) for plan in plans}
        todo = [job for plan in plans for job in jobs_of(plan)]  # each after those that it needs
        progress = stack.enter_context(TrainingProgress(todo))
        appending = threading.Lock()
        free: SimpleQueue[Environment] = SimpleQueue()
        for names in devices(jobs) if jobs > 1 else [None]:
            free.put({} if names is None else {"CUDA_VISIBLE_DEVICES": names})

        def do(job: RunJob) -> None:
            began, complete = time.monotonic(), job.done
            if isinstance(
                job, TrainJob
            ):  # the checkpoints of an evaluated stage may have been deleted
                complete = complete or (job.spec.directory / RESULT).exists()
            if not complete:
                say(f"{job}: started")
                environment = free.get()
                try:
                    job.do(environment, progress.watch(job))
                finally:
                    free.put(environment)
            with appending:  # also after a complete job: a kill may have come before its rows
                collect(job.plan, runs[job.run])
            how = "was complete" if complete else f"done in {time.monotonic() - began:.0f} s"
            if isinstance(job, TrainJob):
                source = job.training.source
                if job.training.updates:
                    progress.count(
                        job, job.training.updates, skipped=complete or source is not None
                    )
                how += f", shared with {source}" if source else ""
            else:
                how += f", perplexity {read_measured(job.marker)['perplexity']:,.2f}"
            say(f"{job}: {how}{'' if complete or not progress.bar.disable else progress.left}")

        while jobs == 1 and todo:  # in this thread, in which Ctrl-C ends the child
            do(todo.pop(0))
        waiting = {job.marker: job for job in todo}
        needs = {job.marker: set(job.needs) for job in todo}
        errors: list[Exception] = []
        started: dict[Future, Path] = {}
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
    for run in runs.values():
        print(f"\n{run.directory}\n{summary(run)}")
    if errors:
        raise errors[0]


class TrainingProgress(AbstractContextManager):
    """Updates of all trainings: a bar on a terminal, else a line about each training once in
    LINE_SECONDS."""

    def __init__(self, jobs: Sequence[RunJob]) -> None:
        sizes = [job.training.updates for job in jobs if isinstance(job, TrainJob)]
        self.total = None if None in sizes else sum(size or 0 for size in sizes)
        self.updates: dict[Path, int] = {}  # of each training
        self.skipped = 0  # updates of an earlier launch, which took no time in this one
        self.began = time.monotonic()
        # smoothing=0: the average speed, with start-ups and evaluations, predicts the end of all
        # trainings; disable=None: off without a terminal
        self.bar = tqdm(
            total=self.total, unit="update", dynamic_ncols=True, smoothing=0, disable=None
        )

    def __exit__(self, *_: object) -> None:
        self.bar.close()

    def count(self, job: TrainJob, updates: int, skipped: bool = False) -> None:
        """A training has so many updates; `skipped`: it had them before this launch."""
        added = updates - self.updates.get(job.marker, 0)
        self.updates[job.marker] = updates
        if skipped:
            self.skipped += added
            self.bar.initial = self.skipped
        self.bar.update(sum(self.updates.values()) - self.bar.n)

    def watch(self, job: RunJob) -> Watch:
        """Takes the lines of fairseq's log of a training."""
        if not isinstance(job, TrainJob):
            return None
        spoke, first = time.monotonic(), (job.directory / "checkpoint_last.pt").exists()

        def read(line: str) -> None:
            nonlocal spoke, first
            try:
                stats = json.loads(line.partition(" | train_inner | ")[2])
                updates = int(stats["num_updates"]) - job.training.earlier
            except (
                ValueError,
                KeyError,
                TypeError,
            ):  # another line, or mixed lines of several processes
                return
            self.count(job, updates, skipped=first)
            first = False
            shown = ", ".join(
                f"{name} {stats[name]}" for name in ("loss", "ppl", "wps") if name in stats
            )
            self.bar.set_postfix_str(shown, refresh=False)
            if self.bar.disable and time.monotonic() - spoke > LINE_SECONDS:
                spoke = time.monotonic()
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
        each = (time.monotonic() - self.began) / (complete - self.skipped)
        return f"; about {tqdm.format_interval(each * (self.total - complete))} left"


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
        return JobStatus(
            job, "done", why="" if t == end else f"{count} of {len(schedule)} stages requested"
        )
    for log in logs:
        if log.with_name(_MARKERS[log.name]).exists():
            continue
        # Only the last child's output: earlier errors may be fixed.
        if failed := children.last_problem(tail(log).rpartition("\n$ ")[2]):
            return JobStatus(job, "failed", why=failed[1], log=log)
    return JobStatus(job, "stopped", why="rerun the same command to resume", log=latest)
