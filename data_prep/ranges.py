"""Stage sort: the documents of each range of content keys, in hash order.

The content keys are cut into ranges of equal width, of about RANGE_DOCUMENTS documents.
"""

import itertools
from pathlib import Path

import numpy as np

from alma.errors import UserError
from alma.files import atomic_write
from data_prep import scan
from data_prep.near_duplicates import always_dropped, matching, near_between
from data_prep.scan import (
    RECORD,
    content_keys,
    document_starts,
    hash_order,
    repeats,
    words_of_documents,
)
from data_prep.work import Workspace, changes, mapped, open_items, slices

RANGE_DOCUMENTS = 1 << 20  # documents of a range on average; sorting them takes about 200 MB


def scan_files(space: Workspace, count: int) -> list[Path]:
    """All scan-NNNNN.bin."""
    return [space.file("scan", number, "bin") for number in range(count)]


def keys_files(space: Workspace, count: int) -> list[Path]:
    """All keys-NNNNN.bin."""
    return [space.file("keys", number, "bin") for number in range(count)]


def count_ranges(space: Workspace, shards: int, past: int) -> int:
    """The number of ranges of content keys, which depends on the number of documents only.

    `past`: the number of .keys files of a stream that grows. UserError: an empty corpus.
    """
    new_documents = sum(len(mapped(path, RECORD)) for path in scan_files(space, shards))
    past_documents = sum(len(mapped(path, RECORD)) for path in keys_files(space, past))
    if not new_documents:
        raise UserError("the corpus has no documents: every file is empty or blank")
    return 1 + (new_documents + past_documents) // RANGE_DOCUMENTS


def sort_range(
    space: Workspace,
    number: int,
    *,
    ranges: int,
    shards: int,
    past: int,
    arrivals: np.ndarray,
    valid: int | None,
    near: int | None,
    first_batch: int,
) -> None:
    """Write the files of a range, see `data_prep`.

    number        the range
    ranges        number of ranges
    shards        number of files scan-NNNNN.bin
    past          number of .keys files of the stream to append to
    arrivals      (sources,) number of the mega-batch of each source
    valid         number of the validation source, whose documents go to valid-NNNNN.bin
    near          number of files near-NNNNN.bin; None: near duplicates are kept
    first_batch   number of the first mega-batch

    sums-NNNNN.npz has `read`, (3, sources): documents, words and bytes of the range; `first`, the
    same without duplicates, where a document counts for its first mega-batch; `longest`, words of
    the longest piece; `whole`, words of the longest document. Memory: the records of the range,
    with at most one copy of a text per run and source.
    """
    sources = len(arrivals)
    records, repeated = _gather(space, number, ranges, shards, past, sources)
    records = records[hash_order(records)]
    first, stays = distinct(records, arrivals)
    # Documents whose mega-batch depends on where earlier mega-batches are cut.
    undecided = np.zeros(len(records), bool)
    if near is not None:
        similar = near_between(space, near, number, ranges)
        with open_items(space.file("similar", number, "bin")) as file:
            file.write(similar.tobytes())
        keys = content_keys(records)
        batches = first_batch + arrivals[records["source"]]
        stays &= ~matching(keys, batches, similar[always_dropped(similar, first_batch)])
        undecided = matching(keys, batches, similar)
    places = np.flatnonzero(stays)
    next_is_first = np.append(first[places[1:]], True)
    is_decided = first[places] & next_is_first & ~undecided[places]
    with open_items(space.file("range", number, "bin")) as file:
        file.write(records.data)
    with open_items(space.file("again", number, "bin")) as file:
        file.write(records[places[~is_decided]].data)
    if valid is not None:
        of_source = records[stays & (records["source"] == valid)]
        with open_items(space.file("valid", number, "bin")) as file:
            file.write(of_source[np.argsort(of_source["second"], kind="stable")].data)
    with atomic_write(space.file("sums", number, "npz"), "wb") as file:
        np.savez(
            file,
            read=_by_source(records, records["words"] > 0, sources) + repeated,
            first=_by_source(records, stays & first & ~undecided, sources),
            longest=records["words"].max(initial=0),
            whole=words_of_documents(records[stays & first]).max(initial=0),
        )


def _gather(
    space: Workspace, number: int, ranges: int, shards: int, past: int, sources: int
) -> tuple[np.ndarray, np.ndarray]:
    """Read the records of a range, without the `repeats` within each sorted run.

    Also returns the documents, words and bytes of these repeats, (3, sources).
    """
    repeated = np.zeros((3, sources), np.int64)
    pieces = []
    for path in itertools.chain(scan_files(space, shards), keys_files(space, past)):
        for piece in slices(path, RECORD, scan.RUN_DOCUMENTS, number, ranges):
            is_repeat = repeats(piece)
            if is_repeat.any():
                repeated += _by_source(piece, is_repeat & (piece["words"] > 0), sources)
                piece = piece[~is_repeat]
            pieces.append(piece.tobytes())
    return np.frombuffer(b"".join(pieces), RECORD), repeated


def _by_source(records: np.ndarray, chosen: np.ndarray, sources: int) -> np.ndarray:
    """(3, sources) documents, words and bytes of the chosen records."""
    source = records["source"][chosen]
    documents = np.bincount(source, minlength=sources)
    # Sums of doubles are exact below 2**53.
    words = np.bincount(source, records["words"][chosen], sources)
    size = np.bincount(source, records["bytes"][chosen], sources)
    return np.stack([documents, words, size]).astype(np.int64)


def distinct(records: np.ndarray, arrivals: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Find exact duplicates; returns two masks (records,).

    The first says whether a record is the first of equal ones, the second whether it stays. A
    document stays once in each mega-batch that has it, unless the stream to append to has a piece
    of it. `records` are in hash order; `arrivals` (sources,) are the numbers of the mega-batches,
    all 0 if the stream is not ordered.
    """
    arrival = arrivals[records["source"]]
    first = changes(records["high"]) | changes(records["low"])
    first_of_batch = first | changes(arrival)
    starts = document_starts(records)
    in_stream = np.logical_or.reduceat(records["words"] == 0, np.flatnonzero(starts))
    document = np.cumsum(starts) - 1
    return first, first_of_batch & ~in_stream[document]


def sorted_records(space: Workspace, number: int) -> np.ndarray:
    """The records of a range in hash order, memory-mapped."""
    return mapped(space.file("range", number, "bin"), RECORD)
