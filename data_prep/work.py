"""The work directory, and restartable tasks: a task is finished once its output file exists.

`run_all` runs tasks that return a value instead of writing a file.
"""

import bisect
import json
import mmap
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar
from zipfile import BadZipFile

import numpy as np
from tqdm import tqdm

from alma.errors import UserError
from alma.files import atomic_write
from alma.workers import Workers
from data_prep.documents import Reader

FINISHED = "stream"  # the folder of a work directory for finished files, laid out as the stream
DOCUMENT_BYTES = 12  # bytes of a content key that the pieces of a document share
_LENGTH = 8  # bytes at the end of a file of items that hold their total size
Result = TypeVar("Result")


@dataclass(frozen=True)
class Workspace:
    """The work directory, and how documents are read and hashed: used by every task of a stage."""

    directory: Path
    seed: int
    reader: Reader
    sources: tuple[str, ...]
    """Names of the sources, sorted by `Splits.rank`. A document in several sources counts for the
    first of them."""

    @property
    def finished(self) -> Path:
        """The folder for finished files."""
        return self.directory / FINISHED

    def by_name(self, values: Iterable[int]) -> dict[str, int]:
        """Values of the `sources`, in order, by name; summed over the periods of a dated stream."""
        totals: Counter[str] = Counter()
        for source, value in zip(self.sources, values, strict=True):
            totals[name_of(source)] += value
        return dict(totals)

    def file(self, name: str, number: int, suffix: str) -> Path:
        """An intermediate file of a shard or bucket."""
        return self.directory / f"{name}-{number:05d}.{suffix}"


def name_of(source: str) -> str:
    """The name of a source without its period; those of a dated stream are PERIOD/NAME."""
    return source.rpartition("/")[2]


def damaged(path: Path) -> UserError:
    """The error for a damaged file of the work directory."""
    return UserError(f"{path}: damaged; remove {path.parent} and run again")


def read_json(path: Path) -> Any:
    """A JSON file. UserError: it is damaged."""
    try:
        return json.loads(path.read_bytes())
    except ValueError:
        raise damaged(path) from None


def read_arrays(path: Path, *names: str) -> dict[str, np.ndarray]:
    """All arrays of an .npz, or those of some names. UserError: it is damaged."""
    try:
        with np.load(path) as arrays:
            return {name: arrays[name] for name in names or arrays}
    except (EOFError, ValueError, KeyError, BadZipFile):
        raise damaged(path) from None


def join_files(path: Path, parts: Iterable[str | Path]) -> None:
    """Write the bytes of files one after another, atomically."""
    with atomic_write(path, "wb") as file:
        for part in parts:
            with open(part, "rb") as data:
                shutil.copyfileobj(data, file, 1 << 20)


def mapped_array(path: Path) -> np.ndarray:
    """The array of an .npy, memory-mapped. UserError: it is damaged."""
    try:
        return np.load(path, mmap_mode="r")
    except (EOFError, ValueError):
        raise damaged(path) from None


@contextmanager
def open_items(path: Path) -> Iterator[IO[bytes]]:
    """Open a file to write items for `mapped`, atomically; appends their size in bytes."""
    with atomic_write(path, "wb") as file:
        yield file
        file.write(file.tell().to_bytes(_LENGTH, "little"))


def mapped(path: Path, dtype: np.dtype) -> np.ndarray:
    """The items of a file that `open_items` wrote, memory-mapped, (items,) of `dtype`.

    Raises UserError if it is damaged. Not by np.memmap, which takes three times as long to open.
    """
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size - _LENGTH
        if size > 0:
            data: Any = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        else:
            data = file.read()
    if size < 0 or size % dtype.itemsize or int.from_bytes(data[size:], "little") != size:
        raise damaged(path)
    return np.frombuffer(data, dtype, size // dtype.itemsize)


def slices(
    path: Path, dtype: np.dtype, run: int | None, number: int, ranges: int
) -> Iterator[np.ndarray]:
    """Yield the items of a file that are in range `number` of `ranges`, a slice of each sorted run.

    Items are sorted by their first 8 bytes, a big-endian number; the ranges divide all such numbers
    into equal intervals. `run` is the number of items in a run; None: the file is one run.
    """
    items = mapped(path, dtype)
    first_bytes = np.dtype({"names": ["key"], "formats": [">u8"], "itemsize": dtype.itemsize})
    low = number * 2**64 // ranges
    high = (number + 1) * 2**64 // ranges
    step = run or max(1, len(items))
    for start in range(0, len(items), step):
        piece = items[start : start + step]
        keys = piece.view(first_bytes)["key"]
        begin = bisect.bisect_left(keys, low, key=int)
        end = bisect.bisect_left(keys, high, key=int)
        yield piece[begin:end]


class Task(NamedTuple):
    """A part of a stage: a call of `function`, which writes the file `done` last."""

    done: Path
    weight: int  # its contribution to the progress bar, in the unit of the stage
    function: Callable[..., None]
    arguments: Mapping[str, Any]

    def work(self) -> None:
        """Do the task."""
        self.function(**self.arguments)


class Work(AbstractContextManager["Work"]):
    """Runs the tasks of stages in worker processes; a single worker is this process."""

    def __init__(self, workers: int) -> None:
        self.seconds: dict[str, float] = {}  # wall-clock time of each stage
        self._workers = Workers(workers)

    def __exit__(self, *error: Any) -> None:
        self._workers.__exit__(*error)

    def run(self, stage: str, tasks: Sequence[Task], unit: str) -> None:
        """Do every unfinished task of a stage; the progress bar counts `unit`s.

        Raises the first error of a task. UserError: the system killed a worker.
        """
        start = time.monotonic()
        unfinished = [task for task in tasks if not task.done.exists()]
        total = sum(task.weight for task in tasks)
        finished = total - sum(task.weight for task in unfinished)
        progress = tqdm(
            desc=stage, total=total, initial=finished, unit=unit, unit_scale=True, disable=None
        )
        with progress:
            if unfinished:
                for weight in self._finished(stage, unfinished):
                    progress.update(weight)
        self.seconds[stage] = time.monotonic() - start

    def _finished(self, stage: str, tasks: list[Task]) -> Iterator[int]:
        """Do the tasks; yield the weight of each when it is done."""
        for number, result in self._workers.run(Task.work, [(task,) for task in tasks]):
            result()
            yield tasks[number].weight


def changes(values: np.ndarray) -> np.ndarray:
    """Whether each value differs from the previous one, (values,); True for the first."""
    differs = np.ones(len(values), bool)
    differs[1:] = values[1:] != values[:-1]
    return differs


def run_all(
    workers: Workers,
    title: str,
    function: Callable[..., Result],
    tasks: Sequence[tuple[Any, ...]],
    weights: Sequence[int],
    unit: str = "B",
) -> list[Result]:
    """`function(*task)` for every task, in their order; the progress bar adds up `weights`.

    Raises the first error of a task. UserError: the system killed a worker.
    """
    results: dict[int, Result] = {}
    total = sum(weights)
    with tqdm(desc=title, total=total, unit=unit, unit_scale=True, disable=None) as progress:
        for number, result in workers.run(function, tasks):
            results[number] = result()
            progress.update(weights[number])
    return [results[number] for number in range(len(tasks))]
