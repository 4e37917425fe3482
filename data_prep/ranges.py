"""Stage sort: the documents of each range of content keys, in hash order.

The content keys are cut into ranges of equal width, of about RANGE_DOCUMENTS documents.
"""

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from alma.errors import UserError
from alma.files import atomic_write
from data_prep import scan
from data_prep.near_duplicates import always_dropped, matching, near_between
from data_prep.scan import RECORD, content_keys, document_starts, hash_order, repeats, words_of_documents
from data_prep.work import Workspace, changes, mapped, open_items, slices

RANGE_DOCUMENTS = 1 << 20  # documents of a range on average; sorting them takes about 200 MB


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
    near: tuple[int, int] | None = None,
) -> None:
    """Write the files of a range. Memory: its records; of the copies of a text one for each run and source.

    valid-NNNNN.bin: the documents kept of the validation source, in the order of their second hashes.
    `files`: numbers of scan-NNNNN.bin and of keys-NNNNN.bin. `arrivals`: see `distinct`. `valid`: number of
    the validation source. `near`: number of files near-NNNNN.bin, and of the first mega-batch. The sums are
    `read`, (3, sources) documents, words and bytes of the range; `first`, of those kept, each for
    the first mega-batch that has it; `longest`, words of one document; `whole`, of one with all its pieces.
    """
    records, repeated = _gather(space, number, ranges, files, len(arrivals))
    records = records[hash_order(records)]
    first, kept = distinct(records, arrivals)
    undecided = np.zeros(len(records), bool)  # until earlier mega-batches are cut
    if near:
        found = near_between(space, near[0], number, ranges)
        with open_items(space.file("similar", number, "bin")) as file:
            file.write(found.tobytes())
        keys, batches = content_keys(records), near[1] + arrivals[records["source"]]
        kept &= ~matching(keys, batches, found[always_dropped(found, near[1])])
        undecided = matching(keys, batches, found)
    places = np.flatnonzero(kept)
    alone = first[places] & np.append(first[places[1:]], True) & ~undecided[places]
    for name, rows in (("range", records), ("again", records[places[~alone]])):
        with open_items(space.file(name, number, "bin")) as file:
            file.write(rows.data)
    if valid is not None:
        rows = records[kept & (records["source"] == valid)]
        with open_items(space.file("valid", number, "bin")) as file:
            file.write(rows[np.argsort(rows["second"], kind="stable")].data)
    with atomic_write(space.file("sums", number, "npz"), "wb") as file:
        np.savez(
            file,
            read=_by_source(records, records["words"] > 0, len(arrivals)) + repeated,
            first=_by_source(records, kept & first & ~undecided, len(arrivals)),
            longest=records["words"].max(initial=0),
            whole=words_of_documents(records[kept & first]).max(initial=0),
        )


def _gather(
    space: Workspace, number: int, ranges: int, files: tuple[int, int], sources: int
) -> tuple[np.ndarray, np.ndarray]:
    """The records of a range, and documents, words and bytes of those left out: `repeats` of their run."""
    repeated = np.zeros((3, sources), np.int64)
    pieces = []
    for path in itertools.chain.from_iterable(_paths(space, files)):
        for piece in slices(path, RECORD, scan.RUN_DOCUMENTS, number, ranges):
            again = repeats(piece)
            if again.any():
                repeated += _by_source(piece, again & (piece["words"] > 0), sources)
                piece = piece[~again]
            pieces.append(piece.tobytes())
    return np.frombuffer(b"".join(pieces), RECORD), repeated


def _by_source(records: np.ndarray, chosen: np.ndarray, sources: int) -> np.ndarray:
    """(3, sources) documents, words and bytes of the chosen records."""
    source = records["source"][chosen]
    # Sums of doubles are exact below 2**53.
    sums = [np.bincount(source, records[name][chosen], sources) for name in ("words", "bytes")]
    return np.stack([np.bincount(source, minlength=sources), *sums]).astype(np.int64)


def distinct(records: np.ndarray, arrivals: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which records are the first of equal documents, and which are kept, (records,) bool; in hash order.

    A document of which the stream has no piece is kept once for each mega-batch that has it. `arrivals`:
    (sources,) numbers of the mega-batches; all 0 if the stream is not ordered.
    """
    arrival = arrivals[records["source"]]
    first = changes(records["high"]) | changes(records["low"])
    kept = first | changes(arrival)
    starts = document_starts(records)
    had = np.logical_or.reduceat(records["words"] == 0, np.flatnonzero(starts))
    return first, kept & ~had[np.cumsum(starts) - 1]


def sorted_records(space: Workspace, number: int) -> np.ndarray:
    """The records of a range in hash order, memory-mapped."""
    return mapped(space.file("range", number, "bin"), RECORD)
