"""Repeated measurements, and tables of them."""

import contextlib
import csv
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from alma.tables import as_text

if TYPE_CHECKING:
    import torch

Rows = list[dict[str, Any]]
Turn = dict[Any, float]
"""Seconds of each kind of work."""


class Table(NamedTuple):
    """Measurements; `name` is that of the CSV file."""

    name: str
    title: str
    rows: Rows


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Let torch use one thread."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def device() -> "torch.device":
    """The GPU, if there is one."""
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def finished(work: Callable[[], Any], times: int) -> None:
    """Do `work` some times and wait for the GPU, if there is one."""
    import torch

    for _ in range(times):
        work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds(work: Callable[[], Any]) -> float:
    """Wall-clock time of one call."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def turns(kinds: Mapping[Any, Callable[[], Any]], repeats: int) -> list[Turn]:
    """Time all kinds of work `repeats` times, in turn, after a warm-up."""
    measured = []
    for _ in range(repeats + 1):
        measured.append({name: seconds(work) for name, work in kinds.items()})
    return measured[1:]


def ratios(measured: Sequence[Turn], name: Any, peer: Any) -> str:
    """The spread of the times of `name` relative to those of `peer`."""
    return spread([turn[name] / turn[peer] for turn in measured])


def spread(values: Sequence[float]) -> str:
    """`median [first quartile-third quartile]`."""
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.2f} [{low:.2f}-{high:.2f}]"


def show(folder: Path, table: Table) -> None:
    """Print a table and write it as CSV."""
    header = list(table.rows[0])
    with open(folder / f"{table.name}.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=header)
        writer.writeheader()
        writer.writerows(table.rows)
    print(f"\n{table.title}")
    lines = [header]
    for row in table.rows:
        lines.append([str(value) for value in row.values()])
    print(as_text(lines))
