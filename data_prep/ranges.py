"""Stage sort: the documents of each range of content keys, in hash order.

The content keys are cut into ranges of equal width, of about RANGE_DOCUMENTS documents. Reads the runs of the
scan. Writes for each range

    range-NNNNN.bin   its RECORDs in hash order, equal documents by source
    again-NNNNN.bin   those of them that are kept for several mega-batches of an ordered stream
    valid-NNNNN.npy   (3, documents) uint64: second hash, running sum of words and place in the range of the
                      documents of the validation source, in the order of the second hash
    sums-NNNNN.npz    documents and words, see `sort_range`; written last
"""

import bisect
import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from alma.errors import UserError
from alma.files import atomic_write
from data_prep.scan import RECORD, hash_order, repeats, runs
from data_prep.work import Workspace, mapped, open_items, read_arrays

RANGE_DOCUMENTS = 1 << 20
"""Documents of a range on average; sorting them takes about 200 MB."""


def count_ranges(space: Workspace, files: tuple[int, int]) -> int:
    """The number of ranges, a function of the number of documents alone; `files`: see `sort_range`.

    UserError: an empty corpus.
    """
    read, had = (sum(len(mapped(path, RECORD)) for path in paths) for paths in _paths(space, files))
    if not read:
        raise UserError("the corpus has no documents: every file is empty or blank")
    return 1 + (read + had) // RANGE_DOCUMENTS


def _paths(space: Workspace, files: tuple[int, int]) -> Iterator[list[Path]]:
    """All scan-NNNNN.bin, then all keys-NNNNN.bin."""
    for name, count in zip(("scan", "keys"), files, strict=True):
        yield [space.file(name, number, "bin") for number in range(count)]


def sort_range(
    space: Workspace,
    number: int,
    ranges: int,
    files: tuple[int, int],
    arrivals: np.ndarray,
    valid: int | None,
) -> None:
    """Write the files of a range. Memory: its records; of the copies of a text one for each run and source.

    `files`: numbers of scan-NNNNN.bin and of keys-NNNNN.bin. `arrivals`: see `distinct`. `valid`: number of
    the validation source. The sums are `read`, (2, sources) documents and words of the range; `first`, of
    documents that are kept, each for the first mega-batch that has it; `longest`, words of one document.
    """
    records, repeated = _gather(space, number, ranges, files, len(arrivals))
    records = records[hash_order(records)]
    first, kept = distinct(records, arrivals)
    places = np.flatnonzero(kept)
    alone = first[places] & np.append(first[places[1:]], True)
    for name, rows in (("range", records), ("again", records[places[~alone]])):
        with open_items(space.file(name, number, "bin")) as file:
            file.write(rows.data)
    if valid is not None:
        places = np.flatnonzero(kept & (records["source"] == valid))
        places = places[np.argsort(records["second"][places], kind="stable")]
        columns = records["second"][places], np.cumsum(records["words"][places], dtype=np.int64), places
        with atomic_write(space.file("valid", number, "npy"), "wb") as file:
            np.save(file, np.stack([column.astype(np.uint64) for column in columns]))
    new = records["words"] > 0
    with atomic_write(space.file("sums", number, "npz"), "wb") as file:
        np.savez(
            file,
            read=_by_source(records, new, len(arrivals)) + repeated,
            first=_by_source(records, kept & first, len(arrivals)),
            longest=records["words"].max(initial=0),
        )


def _gather(
    space: Workspace, number: int, ranges: int, files: tuple[int, int], sources: int
) -> tuple[np.ndarray, np.ndarray]:
    """The records of a range, and documents and words of those left out: `repeats` of their run."""
    repeated = np.zeros((2, sources), np.int64)
    borders = [i * 2**64 // ranges for i in (number, number + 1)]
    pieces = []
    for path in itertools.chain.from_iterable(_paths(space, files)):
        for run in runs(path):
            start, stop = (bisect.bisect_left(run["high"], border, key=int) for border in borders)
            piece = run[start:stop]
            again = repeats(piece)
            if again.any():
                repeated += _by_source(piece, again & (piece["words"] > 0), sources)
                piece = piece[~again]
            pieces.append(piece.tobytes())
    return np.frombuffer(b"".join(pieces), RECORD), repeated


def _by_source(records: np.ndarray, chosen: np.ndarray, sources: int) -> np.ndarray:
    """(2, sources) documents and words of the chosen records."""
    source = records["source"][chosen]
    words = np.bincount(source, records["words"][chosen], sources)  # exact below 2**53
    return np.stack([np.bincount(source, minlength=sources), words.astype(np.int64)])


def distinct(records: np.ndarray, arrivals: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which records are the first of equal documents, and which are kept, (records,) bool; in hash order.

    A document that the stream does not have is kept once for each mega-batch that has it. `arrivals`:
    (sources,) numbers of the mega-batches; all 0 if the stream is not ordered.
    """
    arrival = arrivals[records["source"]]
    first = np.ones(len(records), bool)
    first[1:] = (records["high"][1:] != records["high"][:-1]) | (records["low"][1:] != records["low"][:-1])
    kept = first.copy()
    kept[1:] |= arrival[1:] != arrival[:-1]
    had = (records["words"] == 0)[first]
    return first, kept & ~had[np.cumsum(first) - 1]


def sorted_records(space: Workspace, number: int) -> np.ndarray:
    """The records of a range in hash order, memory-mapped."""
    return mapped(space.file("range", number, "bin"), RECORD)


def load_sums(space: Workspace, ranges: int) -> dict[str, np.ndarray]:
    """The sums of all ranges: `read` and `first` (ranges, 2, sources), `longest` (ranges,)."""
    found: dict[str, list[np.ndarray]] = {}
    for number in range(ranges):
        for name, array in read_arrays(space.file("sums", number, "npz")).items():
            found.setdefault(name, []).append(array)
    return {name: np.stack(each) for name, each in found.items()}


def source_totals(space: Workspace, ranges: int) -> np.ndarray:
    """(sources, 2) documents and words of each source, duplicates included."""
    return load_sums(space, ranges)["read"].sum(0).T
