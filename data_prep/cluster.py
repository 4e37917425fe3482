"""Stages on SLURM: each is an array of jobs that divide its tasks among them."""

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from alma.errors import UserError
from alma.files import write_json_atomic
from data_prep.work import Task, Usage, Work
from slurm.engine import queue
from slurm.engine import submission as submit
from slurm.engine.jobs import Restartable
from slurm.engine.resources import Resources
from slurm.lm.progress import say

USUAL = Resources(gpus_per_node=0, cpus_per_task=1, mem_gb=4)

POLL_SECONDS = 5.0


@dataclass(frozen=True)
class Share(Restartable):
    """What one element of a stage's array does; what is finished of it is left out when it runs again."""

    stage: str
    number: int
    function: Callable[..., None]
    tasks: tuple[Task, ...]
    workers: int
    """Processes."""

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.stage} {self.number}"

    @property
    def marker(self) -> Path:
        """Exists when all is finished, and says what it took."""
        return self.tasks[0].done.parent / f"share-{self.stage}-{self.number:05d}.json"

    def work(self) -> None:
        """Do what is not finished."""
        with Work(self.workers) as work:
            work.run(self.stage, self.function, self.tasks, "task")
        write_json_atomic(self.marker, asdict(work.usage[self.stage]))


class ClusterWork(Work):
    """Submits each stage as an array of up to `elements` jobs and waits for its end."""

    def __init__(self, elements: int, wanted: Resources) -> None:
        """`wanted` is for each element. UserError: several nodes or tasks."""
        super().__init__(1)
        if wanted.nodes > 1 or wanted.tasks_per_node > 1:
            raise UserError(
                "--nodes and --tasks-per-node: a share of a stage is one task; give more --workers"
            )
        self._elements = elements
        self._wanted = wanted

    def _results(
        self, stage: str, function: Callable[..., None], todo: list[Task]
    ) -> Iterator[tuple[int, Usage]]:
        place = todo[0].done.parent
        _wait_for_earlier(place)
        shares = self._deal(stage, function, todo)
        for share in shares:
            share.marker.unlink(missing_ok=True)
        folder = submit.log_folder_in(place)
        jobs = submit.to_slurm(folder)(f"alma-{stage}", shares, self._wanted, None)
        try:
            _record(place, shares, jobs, folder)
            yield from _follow(place, todo)
        except BaseException:
            _cancel(jobs)
            raise
        for share in shares:
            yield 0, Usage(**json.loads(share.marker.read_bytes()))

    def _deal(self, stage: str, function: Callable[..., None], todo: list[Task]) -> list[Share]:
        """Heavy tasks first, in turn to each."""
        ordered = sorted(todo, key=lambda task: -task.weight)
        count = min(self._elements, len(todo))
        processes = self._wanted.cpus_per_task or 1
        return [
            Share(stage, number, function, tuple(ordered[number::count]), processes)
            for number in range(count)
        ]


def _wait_for_earlier(place: Path) -> None:
    """Wait for jobs whose launch was killed: they do what this one would."""
    told = False
    for seen in queue.watch([place], POLL_SECONDS, patient=True) if queue.on_cluster(place) else ():
        busy = [status.unit for status in seen if status.state in queue.MOVING]
        if busy and not told:
            say(f"{busy[0].name} (job {busy[0].job}) of an earlier launch is in the queue; waiting for it")
            told = True


def _cancel(jobs: list[str]) -> None:
    try:
        queue.scancel(jobs)
    except UserError as error:  # must not hide why they are cancelled
        say(f"warning: {error}; cancel these jobs yourself: scancel {' '.join(jobs)}")


def _record(place: Path, shares: list[Share], jobs: list[str], folder: Path) -> None:
    """Write jobs.json, which slurm.status and slurm.cancel read."""
    entries: list[dict[str, Any]] = [
        {
            "name": share.name,
            "kind": "data_prep",
            "stage": None,
            "directory": ".",
            "marker": share.marker.name,
            "updates": None,
            "job": job,
            "log": submit.job_log(folder, job),
            "needs": [],
        }
        for share, job in zip(shares, jobs, strict=True)
    ]
    queue.write_units(place, entries)


def _follow(place: Path, todo: list[Task]) -> Iterator[tuple[int, Usage]]:
    """Yield the weight of each task as it is finished, until all are. UserError: a job failed.

    A SLURM that does not answer is asked again, from the first time on.
    """
    left = {task.done.name: task.weight for task in todo}
    problems: list[queue.Status] = []
    for seen in queue.watch([place], POLL_SECONDS, patient=True):
        for name in left.keys() & set(os.listdir(place)):
            yield left.pop(name), Usage()
        problems = [status for status in seen if status.state in queue.BAD]
    if problems:
        raise UserError("; ".join(str(problem) for problem in problems))
