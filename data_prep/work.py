"""The work directory, and restartable stages: a task writes a file, and is finished once that file exists.

`run_all` is for tasks that return a value instead.
"""

import bisect
import json
import mmap
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
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
_LENGTH = 8  # bytes of the length after items
Result = TypeVar("Result")


@dataclass(frozen=True)
class Workspace:
    """What every task of a stage needs: the work directory, and how documents are read and hashed."""

    directory: Path
    seed: int
    reader: Reader
    sources: tuple[str, ...]
    """Names, sorted by `Wanted.rank`; a document found in several sources counts for the first."""

    @property
    def finished(self) -> Path:
        """The folder for finished files."""
        return self.directory / FINISHED

    def by_name(self, values: Iterable[int]) -> dict[str, int]:
        """Values of `sources` by their names, summed over the periods of a dated stream."""
        found: Counter[str] = Counter()
        for source, value in zip(self.sources, values, strict=True):
            found[source.rpartition("/")[2]] += value
        return dict(found)

    def file(self, name: str, number: int, suffix: str) -> Path:
        """An intermediate file of a shard or bucket."""
        return self.directory / f"{name}-{number:05d}.{suffix}"


def damaged(path: Path) -> UserError:
    """The error of a file of the work directory that is not as it was written."""
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
    """Write items for `mapped`, atomically; their number of bytes follows them."""
    with atomic_write(path, "wb") as file:
        yield file
        file.write(file.tell().to_bytes(_LENGTH, "little"))


def mapped(path: Path, dtype: np.dtype) -> np.ndarray:
    """The items of a file, memory-mapped; np.memmap takes three times as long. UserError: it is damaged."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size - _LENGTH
        data: Any = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size > 0 else file.read()
    if size < 0 or size % dtype.itemsize or int.from_bytes(data[size:], "little") != size:
        raise damaged(path)
    return np.frombuffer(data, dtype, size // dtype.itemsize)


def slices(path: Path, dtype: np.dtype, run: int | None, number: int, ranges: int) -> Iterator[np.ndarray]:
    """What a file of items holds in range `number` of `ranges` of equal width: a slice of each sorted run.

    Items are sorted by their first 8 bytes, a big-endian number. `run`: items of a run; None: all.
    """
    items = mapped(path, dtype)
    view = np.dtype({"names": ["key"], "formats": [">u8"], "itemsize": dtype.itemsize})
    borders = [i * 2**64 // ranges for i in (number, number + 1)]
    for start in range(0, len(items), run or max(1, len(items))):
        piece = items[start : start + run] if run else items
        keys = piece.view(view)["key"]
        low, high = (bisect.bisect_left(keys, border, key=int) for border in borders)
        yield piece[low:high]


class Task(NamedTuple):
    """A part of a stage. It writes the file `done` last."""

    done: Path
    weight: int  # its size, in the unit of the stage's progress bar
    arguments: tuple[Any, ...]


class Work(AbstractContextManager["Work"]):
    """Runs stages in worker processes; one worker is this process."""

    def __init__(self, workers: int) -> None:
        self.seconds: dict[str, float] = {}  # wall-clock, of each stage
        self._workers = Workers(workers)

    def __exit__(self, *error: Any) -> None:
        self._workers.__exit__(*error)

    def run(self, stage: str, function: Callable[..., None], tasks: Sequence[Task], unit: str) -> None:
        """Call `function(*task.arguments)` for every unfinished task; the progress bar counts `unit`s.

        Raises the first error of a task. UserError: the system killed a worker.
        """
        start = time.monotonic()
        todo = [task for task in tasks if not task.done.exists()]
        total = sum(task.weight for task in tasks)
        finished = total - sum(task.weight for task in todo)
        with tqdm(desc=stage, total=total, initial=finished, unit=unit, unit_scale=True, disable=None) as bar:
            for weight in self._finished(stage, function, todo) if todo else ():
                bar.update(weight)
        self.seconds[stage] = time.monotonic() - start

    def each(
        self,
        stage: str,
        function: Callable[..., None],
        space: Workspace,
        done: str,
        items: Sequence[tuple[Any, ...]],
        unit: str,
        *arguments: Any,
    ) -> None:
        """`run` of `function(space, number, *own, *arguments)` for each (weight, *own) of `items`.

        `done`: NAME.SUFFIX of the file NAME-NNNNN.SUFFIX that each writes last.
        """
        name, suffix = done.split(".")
        tasks = [
            Task(space.file(name, number, suffix), weight, (space, number, *own, *arguments))
            for number, (weight, *own) in enumerate(items)
        ]
        self.run(stage, function, tasks, unit)

    def _finished(self, stage: str, function: Callable[..., None], todo: list[Task]) -> Iterator[int]:
        """Run the tasks; yield the weight of each when it is done."""
        for number, result in self._workers.run(function, [task.arguments for task in todo]):
            result()
            yield todo[number].weight


def changes(values: np.ndarray) -> np.ndarray:
    """(values,) whether each differs from the one before it; the first does."""
    found = np.ones(len(values), bool)
    found[1:] = values[1:] != values[:-1]
    return found


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
    with tqdm(desc=title, total=sum(weights), unit=unit, unit_scale=True, disable=None) as bar:
        for number, result in workers.run(function, tasks):
            results[number] = result()
            bar.update(weights[number])
    return [results[number] for number in range(len(tasks))]
