"""Work that survives a kill: each unit of a stage is a file, made by one of any number of workers."""

import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from alma.errors import UserError
from alma.processes import end_with_parent, peak_memory


class Task(NamedTuple):
    """One unit of a stage: it is finished once the file `done` exists, which it writes last."""

    done: Path
    weight: int
    """In the unit that the stage's progress is shown in."""
    arguments: tuple[Any, ...]


@dataclass
class Cost:
    """What tasks took."""

    cpu: float = 0.0
    """Seconds of all processes."""
    peak: int = 0
    """Bytes of the largest process up to their end, the code of its libraries included."""

    def add(self, other: "Cost") -> None:
        """Count those of other tasks too."""
        self.cpu += other.cpu
        self.peak = max(self.peak, other.peak)


class Work:
    """A pool of processes, and what each stage took; `workers` = 1 runs in this process."""

    def __init__(self, workers: int) -> None:
        self.seconds: dict[str, float] = {}
        """That each stage lasted."""
        self.costs: dict[str, Cost] = {}
        self._workers = workers
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> "Work":
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool:
            self._pool.shutdown(cancel_futures=True)

    def run(self, stage: str, function: Callable[..., None], tasks: Sequence[Task], unit: str) -> None:
        """Call `function(*task.arguments)` for every task that is not finished; progress counts `unit`.

        UserError: what a task raised, or a worker that the system killed.
        """
        start = time.monotonic()
        todo = [task for task in tasks if not task.done.exists()]
        total = sum(task.weight for task in tasks)
        finished = total - sum(task.weight for task in todo)
        bar = tqdm(desc=stage, total=total, initial=finished, unit=unit, unit_scale=True, disable=None)
        with bar:
            cost = self.costs.setdefault(stage, Cost())
            for weight, own in self._results(stage, function, todo) if todo else ():
                bar.update(weight)
                cost.add(own)
        self.seconds[stage] = time.monotonic() - start

    def _results(
        self, stage: str, function: Callable[..., None], todo: list[Task]
    ) -> Iterator[tuple[int, Cost]]:
        """Run the tasks; yield the weight of each as it ends, and its cost."""
        if self._workers == 1 or len(todo) < 2:
            for task in todo:
                yield task.weight, _measured(function, task.arguments)
            return
        if self._pool is None:
            spawn = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(self._workers, spawn, initializer=end_with_parent)
        futures = {self._pool.submit(_measured, function, task.arguments): task.weight for task in todo}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BrokenProcessPool as error:
            raise UserError(
                "a worker was killed (out of memory?); run again with fewer --workers, it goes on from here"
            ) from error


def _measured(function: Callable[..., None], arguments: tuple[Any, ...]) -> Cost:
    """Call the function; what it took."""
    start = time.process_time()
    function(*arguments)
    return Cost(time.process_time() - start, peak_memory())
