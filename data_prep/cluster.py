"""Stages on SLURM: the tasks of each are divided among the jobs of an array."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from alma.errors import UserError
from data_prep.work import Task, Work
from slurm.engine import queue, submission
from slurm.engine.jobs import Job
from slurm.engine.resources import Resources
from slurm.engine.squeue import scancel
from slurm.engine.terminal import say

POLL_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True)
class ShareJob(Job):
    """One element of a stage's array. A restart skips finished tasks."""

    stage: str
    tasks: tuple[Task, ...]
    workers: int  # processes

    def work(self) -> None:
        """Do the unfinished tasks."""
        with Work(self.workers) as work:
            work.run(self.stage, self.tasks, "task")
        self.marker.touch()


class ClusterWork(Work):
    """Submits each stage as an array of up to `elements` jobs and waits for its end."""

    def __init__(self, elements: int, resources: Resources) -> None:
        """`resources` of each element. UserError: several nodes, or several tasks per node."""
        super().__init__(1)
        if resources.nodes > 1 or resources.tasks_per_node > 1:
            share = "a share of a stage is one task"
            raise UserError(f"--nodes and --tasks-per-node: {share}; raise --workers")
        self._elements = elements
        self._resources = resources

    def _finished(self, stage: str, tasks: list[Task]) -> Iterator[int]:
        directory = tasks[0].done.parent
        _wait_for_earlier(directory)
        shares = self._shares(stage, tasks, directory)
        for share in shares:
            share.marker.unlink(missing_ok=True)
        folder = submission.log_folder(directory)
        weights = {task.done.name: task.weight for task in tasks}
        waiting = shares
        while waiting:
            ids: dict[Path, str] = {}
            try:
                self._submit(waiting, folder, ids)
                submitted = [share for share in waiting if share.marker in ids]
                submission.record(directory, submitted, ids, folder)
                yield from _watch(directory, weights)
            except BaseException:
                try:
                    scancel(list(ids.values()))
                except UserError as error:  # a failed cancel must not hide the error that led here
                    jobs = " ".join(ids.values())
                    say(f"warning: {error}; cancel these jobs yourself: scancel {jobs}")
                raise
            waiting = [share for share in waiting if share.marker not in ids]

    def _submit(self, shares: list[ShareJob], folder: Path, ids: dict[Path, str]) -> None:
        """Submit shares, or as many as the queue takes, at least one; add their `ids`.

        Waits for room: jobs of the stage before, whose work is done, may still be ending.
        UserError: SLURM refuses, or its limit allows no job.
        """
        send = submission.to_slurm(folder, "fix this and rerun the command")
        full_queue = submission.FullQueue()
        while not ids:
            try:
                submission.submit(shares, self._resources, send, ids)
            except submission.QueueIsFull as error:
                if not ids:
                    full_queue.check(error)
                    full_queue.wait()

    def _shares(self, stage: str, tasks: list[Task], directory: Path) -> list[ShareJob]:
        """The tasks dealt to jobs in turn, the heaviest first."""
        heaviest_first = sorted(tasks, key=lambda task: -task.weight)
        count = min(self._elements, len(tasks))
        return [
            ShareJob(
                run=directory,
                name=f"{stage} {number}",
                kind="data_prep",
                array=f"alma-{stage}",
                directory=directory,
                marker=directory / f"share-{stage}-{number:05d}.json",
                stage=stage,
                tasks=tuple(heaviest_first[number::count]),
                workers=self._resources.cpus_per_task or 1,
            )
            for number in range(count)
        ]


def _wait_for_earlier(directory: Path) -> None:
    """Wait for queued jobs of an earlier, killed launch, because they do the same tasks."""
    if not queue.on_cluster(directory):
        return
    waiting = False
    for statuses in queue.watch([directory], POLL_SECONDS, patient=True):
        busy = [status.job for status in statuses if status.state in queue.MOVING]
        if busy and not waiting:
            say(f"waiting for {busy[0].name} (job id {busy[0].job_id}) of an earlier launch")
            waiting = True


def _watch(directory: Path, weights: dict[str, int]) -> Iterator[int]:
    """Yield the weight of each task when its file appears, until all jobs have ended.

    weights: of the tasks, by the names of their files; those of finished tasks are removed.
    UserError: jobs have failed.
    """
    problems: list[queue.JobStatus] = []
    # Patient, because SLURM's controller may not answer for a while.
    for statuses in queue.watch([directory], POLL_SECONDS, patient=True):
        for name in weights.keys() & set(os.listdir(directory)):
            yield weights.pop(name)
        problems = [status for status in statuses if status.state in queue.BAD]
    if problems:
        raise UserError("; ".join(map(str, problems)))
