"""Work that survives a kill: each unit of a stage is a file, made by one of any number of workers."""

import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from alma.errors import UserError


class Task(NamedTuple):
    """One unit of a stage: it is finished once the file `done` exists, which it writes last."""

    done: Path
    weight: int
    """In the unit that the stage's progress is shown in."""
    arguments: tuple[Any, ...]


class Work:
    """A pool of processes and the seconds each stage took; `workers` = 1 runs in this process."""

    def __init__(self, workers: int) -> None:
        self.seconds: dict[str, float] = {}
        self._workers = workers
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> "Work":
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool:
            self._pool.shutdown(cancel_futures=True)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time what runs inside under `name`."""
        start = time.monotonic()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - start

    def run(self, stage: str, function: Callable[..., None], tasks: list[Task], unit: str) -> None:
        """Call `function(*task.arguments)` for every task that is not finished; progress counts `unit`.

        UserError: what a task raised, or a worker that the system killed.
        """
        todo = [task for task in tasks if not task.done.exists()]
        total = sum(task.weight for task in tasks)
        finished = total - sum(task.weight for task in todo)
        bar = tqdm(desc=stage, total=total, initial=finished, unit=unit, unit_scale=True, disable=None)
        with self.stage(stage), bar:
            for weight in self._results(function, todo):
                bar.update(weight)

    def _results(self, function: Callable[..., None], todo: list[Task]) -> Iterator[int]:
        """Run the tasks; yield the weight of each as it ends."""
        if self._workers == 1 or len(todo) < 2:
            for task in todo:
                function(*task.arguments)
                yield task.weight
            return
        if self._pool is None:
            spawn = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(self._workers, spawn, initializer=_end_with_parent)
        futures = {self._pool.submit(function, *task.arguments): task.weight for task in todo}
        try:
            for future in as_completed(futures):
                future.result()
                yield futures[future]
        except BrokenProcessPool as error:
            raise UserError(
                "a worker was killed (out of memory?); run again with fewer --workers, it goes on from here"
            ) from error


def _end_with_parent() -> None:
    """Let a worker end when its parent was killed, and finish its unit when the user interrupts."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()

    def watch() -> None:
        if parent:
            parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def sweep(directory: Path, pattern: str) -> None:
    """Remove what killed runs left below `directory`: files or directories of this name pattern."""
    for path in list(directory.rglob(pattern)):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
