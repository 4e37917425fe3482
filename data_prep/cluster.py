"""Stages on SLURM: each is an array whose jobs divide its tasks among them."""

import os
from collections.abc import Callable, Iterator
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
    function: Callable[..., None]
    tasks: tuple[Task, ...]
    workers: int  # processes

    def work(self) -> None:
        """Do the unfinished tasks."""
        with Work(self.workers) as work:
            work.run(self.stage, self.function, self.tasks, "task")
        self.marker.touch()


class ClusterWork(Work):
    """Submits each stage as an array of up to `elements` jobs and waits for its end."""

    def __init__(self, elements: int, wanted: Resources) -> None:
        """`wanted`: for each element. Raises UserError for several nodes or tasks."""
        super().__init__(1)
        if wanted.nodes > 1 or wanted.tasks_per_node > 1:
            raise UserError("--nodes and --tasks-per-node: a share of a stage is one task; raise --workers")
        self._elements, self._wanted = elements, wanted

    def _finished(self, stage: str, function: Callable[..., None], todo: list[Task]) -> Iterator[int]:
        place = todo[0].done.parent
        waiting = False
        # Queued jobs of an earlier, killed launch do the same tasks.
        for seen in queue.watch([place], POLL_SECONDS, patient=True) if queue.on_cluster(place) else ():
            busy = [status.job for status in seen if status.state in queue.MOVING]
            if busy and not waiting:
                say(f"waiting for {busy[0].name} (job id {busy[0].job_id}) of an earlier launch")
                waiting = True
        ordered = sorted(todo, key=lambda task: -task.weight)  # dealt round-robin, the heaviest first
        count = min(self._elements, len(todo))
        shares = [
            ShareJob(
                run=place,
                name=f"{stage} {number}",
                kind="data_prep",
                array=f"alma-{stage}",
                directory=place,
                marker=place / f"share-{stage}-{number:05d}.json",
                stage=stage,
                function=function,
                tasks=tuple(ordered[number::count]),
                workers=self._wanted.cpus_per_task or 1,
            )
            for number in range(count)
        ]
        for share in shares:
            share.marker.unlink(missing_ok=True)
        folder = submission.log_folder(place)
        ids: dict[Path, str] = {}
        send = submission.to_slurm(folder, "fix this and rerun the command")
        try:
            submission.submit(shares, self._wanted, send, ids)
            submission.record(place, shares, ids, folder)
            left = {task.done.name: task.weight for task in todo}
            problems: list[queue.JobStatus] = []
            for seen in queue.watch([place], POLL_SECONDS, patient=True):  # patient if SLURM does not answer
                for name in left.keys() & set(os.listdir(place)):
                    yield left.pop(name)
                problems = [status for status in seen if status.state in queue.BAD]
            if problems:
                raise UserError("; ".join(map(str, problems)))
        except BaseException:
            try:
                scancel(list(ids.values()))
            except UserError as error:  # must not hide the error that led here
                say(f"warning: {error}; cancel these jobs yourself: scancel {' '.join(ids.values())}")
            raise
