"""Near duplicates: documents whose word 5-grams have a Jaccard similarity of about THRESHOLD.

MinHash estimates the similarity: the fraction of HASHES hashes in which two documents agree is, on
average, the Jaccard similarity of their sets of 5-grams. Only documents that agree in a whole band
of ROWS hashes are compared.

Documents are ordered by mega-batch, then by content key. A document is dropped if an earlier one is
similar, even if that one is itself dropped because of a third. So no decision depends on another
decision, and all depend on the texts only.
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import numpy as np

from alma.errors import require_package
from data_prep import words
from data_prep.work import DOCUMENT_BYTES, Workspace, changes, mapped, open_items, slices

N = 5  # words of an n-gram. A shorter document is one n-gram of all its words.
THRESHOLD = 0.8
BANDS = 21
ROWS = 6  # hashes of a band
"""Two documents share a band with probability .998 if their similarity is .8; .92 for .7; .015 for
.3."""
HASHES = BANDS * ROWS
KEY = f"S{DOCUMENT_BYTES}"  # first bytes of a document's content key, shared by all its pieces
ENTRY = np.dtype([("key", KEY), ("arrival", "<u2"), ("hashes", "u1", HASHES)])
"""Dtype of a document: its key, the number of its mega-batch, the lowest byte of each hash."""
BAND = np.dtype([("band", ">u8"), ("row", "<u4")])
"""Dtype of a band: a hash of its hashes and number, and the row of its document in the entries."""
NEAR = np.dtype(
    [("key", KEY), ("arrival", "<u2"), ("other_arrival", "<u2"), ("other", KEY), ("equal", "u1")]
)
"""Dtype of a near duplicate: a document, the first similar document of one mega-batch (its own or
an earlier one), and the number of hashes in which the two agree."""

RANGE_BANDS = 1 << 22  # average number of bands in a range; a task takes about 300 MB
_CHUNK = 1 << 18  # bytes of text hashed at once; more would not fit the processor's cache
_RUN = 1 << 16  # documents in a sorted run of bands
_FIRST = 16  # a document is compared with the first 16 of each mega-batch in its band
_BLOCK = 1 << 18  # entries in memory: 40 MB
_PAIRS = 1 << 17  # pairs compared at once: 50 MB
_SEED = 0
_EQUAL = np.ceil(HASHES * (THRESHOLD + (1 - THRESHOLD) / 256))
"""Least number of equal hashes of near duplicates. Only the lowest byte of each hash is kept, so 1
in 256 pairs of different hashes count as equal too."""


def hash_documents(texts: list[bytes]) -> np.ndarray:
    """(documents, HASHES) uint8 MinHashes of normalised texts."""
    grams, owners = n_grams_of(texts)
    offsets = np.searchsorted(owners, np.arange(len(texts) + 1)).astype(np.uint64)
    digests = library().digest_matrix_from_flat_token_hashes(grams, offsets, HASHES, _SEED)
    return np.array(digests.to_rows(), np.uint32).reshape(-1, HASHES).astype(np.uint8)


def n_grams_of(texts: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """Hashes of the N-grams of texts, and the numbers of their texts, ascending."""
    hashes, owners = words.hash_texts(texts)
    grams, gram_owners = words.n_grams(hashes, owners, N)
    counts = np.bincount(owners, minlength=len(texts))
    short = np.flatnonzero(counts < N)
    if not len(short):
        return grams, gram_owners
    # A text of fewer than N words is one n-gram of all its words.
    starts = (np.cumsum(counts) - counts)[short]
    short_grams = hashes[starts].copy()
    for k in range(1, N - 1):
        has_word = counts[short] > k
        next_hashes = hashes[starts[has_word] + k]
        short_grams[has_word] = short_grams[has_word] * words.NEXT + next_hashes
    all_grams = np.concatenate([grams, short_grams])
    all_owners = np.concatenate([gram_owners, short])
    order = np.argsort(all_owners, kind="stable")
    return all_grams[order], all_owners[order]


def library():  # type: ignore[no-untyped-def]
    """The class RMinHash of rensa; its hashes change with its version.

    Raises UserError if rensa is not installed.
    """
    os.environ["RAYON_NUM_THREADS"] = "1"  # the worker processes are the parallelism
    require_package("rensa", "--near-duplicates drop")
    from rensa import RMinHash

    return RMinHash


class EntryWriter:
    """Writes the entries of a shard in sorted runs. Memory: one run, and a chunk of text."""

    def __init__(self, file: IO[bytes], arrivals: dict[str, int]) -> None:
        """`arrivals`: the mega-batch of each source."""
        self._file = file
        self._arrivals = arrivals
        self._run = np.zeros(_RUN, ENTRY)
        self._count = 0  # documents of the run
        self._texts: list[bytes] = []  # texts that are not hashed yet
        self._size = 0  # bytes of `_texts`

    def add(self, hashes: bytes, source: str, text: bytes) -> None:
        """Add a document; `hashes`: see `scan.content_key`."""
        self._run["key"][self._count] = hashes[:DOCUMENT_BYTES]
        self._run["arrival"][self._count] = self._arrivals[source]
        self._count += 1
        self._texts.append(text)
        self._size += len(text)
        if self._count == _RUN:
            self.finish()
        elif self._size >= _CHUNK:
            self._hash()

    def finish(self) -> None:
        """Write the documents of the run."""
        self._hash()
        run = self._run[: self._count]
        self._file.write(run[np.argsort(run["key"], kind="stable")].tobytes())
        self._count = 0

    def _hash(self) -> None:
        if self._texts:
            start = self._count - len(self._texts)
            self._run["hashes"][start : self._count] = hash_documents(self._texts)
        self._texts = []
        self._size = 0


def write_bands(space: Workspace, number: int, path: Path) -> None:
    """Write the sorted runs of bands of a file of entries. Memory: one run, about 150 MB."""
    documents = mapped(path, ENTRY)
    with open_items(space.file("bands", number, "bin")) as file:
        for start in range(0, len(documents), _RUN):
            hashes = documents["hashes"][start : start + _RUN]
            keys = np.zeros((len(hashes), BANDS, 8), np.uint8)
            keys[:, :, :ROWS] = hashes.reshape(len(hashes), BANDS, ROWS)
            keys[:, :, ROWS] = np.arange(BANDS)
            values = keys.reshape(-1, 8).view(">u8").ravel().astype(np.uint64)
            order = np.argsort(values)
            run = np.zeros(len(values), BAND)
            run["band"] = values[order]
            run["row"] = order // BANDS + start
            file.write(run.tobytes())


def entry_files(space: Workspace, shards: int, past: Sequence[Path]) -> list[Path]:
    """The files of entries: those of the shards, then .near files of the stream to append to."""
    return [*(space.file("entries", number, "bin") for number in range(shards)), *past]


def count_ranges(entries: Sequence[Path]) -> int:
    """The number of ranges of bands, which depends on the number of documents only."""
    documents = sum(len(mapped(path, ENTRY)) for path in entries)
    return 1 + BANDS * documents // RANGE_BANDS


def find_range(
    space: Workspace, number: int, ranges: int, shards: int, past: Sequence[Path], first: int
) -> None:
    """Write the near duplicates in a range of bands, among mega-batches from `first` on."""
    entries = entry_files(space, shards, past)
    bands = [space.file("bands", file, "bin") for file in range(len(entries))]
    values, files, rows = _shared(number, ranges, bands)
    starts = np.flatnonzero(changes(values))
    near = [np.zeros(0, NEAR)]
    start = 0
    while start < len(values):  # a block of whole bands
        at = int(np.searchsorted(starts, start + _BLOCK))
        stop = int(starts[at]) if at < len(starts) else len(values)
        block = _read(entries, files[start:stop], rows[start:stop])
        near.append(_compare(block, values[start:stop], first))
        start = stop
    with open_items(space.file("near", number, "bin")) as file:
        file.write(_first_of_batches(np.concatenate(near)).tobytes())


def _shared(
    number: int, ranges: int, paths: Sequence[Path]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The bands of a range that several documents share, as three arrays (bands,).

    They are the bands' hashes, ascending, the number of the file of entries, and the row in it.
    """
    value_pieces = [np.zeros(0, np.uint64)]
    file_pieces = [np.zeros(0, np.uint32)]
    row_pieces = [np.zeros(0, np.uint32)]
    for file, path in enumerate(paths):
        for piece in slices(path, BAND, _RUN * BANDS, number, ranges):
            value_pieces.append(piece["band"].astype(np.uint64))
            file_pieces.append(np.full(len(piece), file, np.uint32))
            row_pieces.append(piece["row"])
    values = np.concatenate(value_pieces)
    order = np.argsort(values, kind="stable")
    is_new = changes(values[order])
    next_is_new = np.append(is_new[1:], True)
    order = order[~(is_new & next_is_new)]
    return values[order], np.concatenate(file_pieces)[order], np.concatenate(row_pieces)[order]


def _read(paths: Sequence[Path], files: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """The entries at `rows` of files, given by their numbers."""
    entries = np.zeros(len(rows), ENTRY)
    order = np.argsort(files, kind="stable")
    for places in np.split(order, np.flatnonzero(changes(files[order]))[1:]):
        path = paths[files[places[0]]]
        entries[places] = mapped(path, ENTRY)[rows[places]]
    return entries


def _compare(entries: np.ndarray, bands: np.ndarray, first: int) -> np.ndarray:
    """The near duplicates among documents that share a band.

    Each document is compared with those before it in its band, but only with the first _FIRST of
    each mega-batch. `bands`: (entries,) ascending. `first`: number of the first mega-batch whose
    documents may be dropped.
    """
    order = np.lexsort((entries["key"], entries["arrival"], bands))
    bands = bands[order]
    entries = entries[order]
    is_new_band = changes(bands)
    is_new_batch = is_new_band | changes(entries["arrival"])
    is_new = is_new_batch | changes(entries["key"])
    entries = entries[is_new]
    is_new_band = is_new_band[is_new]
    is_new_batch = is_new_batch[is_new]
    places = np.arange(len(entries))
    batch_starts = np.maximum.accumulate(np.where(is_new_batch, places, 0))
    band_starts = np.maximum.accumulate(np.where(is_new_band, places, 0))
    is_lead = places - batch_starts < _FIRST
    leads = np.flatnonzero(is_lead)  # documents with which later ones are compared
    leads_before: np.ndarray = np.cumsum(is_lead) - is_lead
    first_lead: np.ndarray = leads_before[band_starts]  # first lead of each document's band
    comparisons = np.where(entries["arrival"] >= first, leads_before - first_lead, 0)
    pairs = [np.zeros(0, NEAR)]
    for documents, counts in _slices(comparisons):
        ends = np.cumsum(counts)
        i = np.repeat(documents, counts)
        lead_offset = np.repeat(first_lead[documents] - ends + counts, counts)
        j = leads[np.arange(len(i)) + lead_offset]
        equal = (entries["hashes"][i] == entries["hashes"][j]).sum(1)
        is_near = (equal >= _EQUAL) & (entries["key"][i] != entries["key"][j])
        near = np.zeros(int(is_near.sum()), NEAR)
        i = i[is_near]
        j = j[is_near]
        near["equal"] = equal[is_near]
        near["key"] = entries["key"][i]
        near["arrival"] = entries["arrival"][i]
        near["other"] = entries["key"][j]
        near["other_arrival"] = entries["arrival"][j]
        pairs.append(_first_of_batches(near))
    return np.concatenate(pairs)


def _slices(counts: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Divide documents into slices of about _PAIRS comparisons.

    `counts` is the number of comparisons of each document. Yields the documents' numbers and counts
    of each slice.
    """
    numbers = np.flatnonzero(counts)
    until = np.cumsum(counts[numbers])
    start = 0
    while start < len(numbers):
        done = int(until[start - 1]) if start else 0
        stop = max(start + 1, int(np.searchsorted(until, done + _PAIRS, "right")))
        yield numbers[start:stop], counts[numbers[start:stop]]
        start = stop


def _first_of_batches(near: np.ndarray) -> np.ndarray:
    """For each document the first similar one of each mega-batch, in the order of content keys."""
    order = np.lexsort((near["other"], near["other_arrival"], near["arrival"], near["key"]))
    near = near[order]
    return near[changes(near["key"]) | changes(near["arrival"]) | changes(near["other_arrival"])]


def near_between(space: Workspace, files: int, number: int, ranges: int) -> np.ndarray:
    """The near duplicates in range `number` of content keys, as `_first_of_batches`.

    `files`: number of files near-NNNNN.bin.
    """
    pieces = [np.zeros(0, NEAR)]
    for file in range(files):
        pieces += slices(space.file("near", file, "bin"), NEAR, None, number, ranges)
    return _first_of_batches(np.concatenate(pieces))


def entries_between(space: Workspace, shards: int, number: int, ranges: int) -> np.ndarray:
    """The entries in a range of content keys, in their order, each document once per mega-batch."""
    pieces = [np.zeros(0, ENTRY)]
    for path in entry_files(space, shards, ()):
        pieces += slices(path, ENTRY, _RUN, number, ranges)
    entries = np.concatenate(pieces)
    entries = entries[np.lexsort((entries["arrival"], entries["key"]))]
    return entries[changes(entries["key"]) | changes(entries["arrival"])]


def similar(space: Workspace, number: int) -> np.ndarray:
    """The NEARs of a range of content keys; empty if near duplicates are kept."""
    path = space.file("similar", number, "bin")
    return mapped(path, NEAR) if path.exists() else np.zeros(0, NEAR)


def always_dropped(near: np.ndarray, first: int) -> np.ndarray:
    """Whether each document of `near` is dropped however the splits are cut, (near,).

    That is so if the similar document is in the same mega-batch, or in the stream to append to.
    """
    return (near["other_arrival"] == near["arrival"]) | (near["other_arrival"] < first)


def is_dropped(near: np.ndarray, first: int, taken: np.ndarray) -> np.ndarray:
    """Whether each document of `near` is dropped, (near,), given where earlier mega-batches end.

    It is not dropped if the similar document is surplus, which its mega-batch does not take.
    `taken` (mega-batches,) are the content keys of the last document that each mega-batch from
    `first` on takes.
    """
    batch = np.maximum(near["other_arrival"].astype(np.int64) - first, 0)
    is_taken = near["other"].astype(taken.dtype) <= taken[batch]
    return always_dropped(near, first) | is_taken


def matching(keys: np.ndarray, arrivals: np.ndarray, near: np.ndarray) -> np.ndarray:
    """Whether the document of each record is in `near`, (records,).

    `keys` (records,) are the content keys, ascending; `arrivals` (records,) the mega-batches.
    """
    matches = np.zeros(len(keys), bool)
    width = keys.dtype.itemsize
    last_keys = [
        key.ljust(DOCUMENT_BYTES, b"\0").ljust(width, b"\xff") for key in near["key"].tolist()
    ]
    starts = np.searchsorted(keys, near["key"].astype(keys.dtype))
    stops = np.searchsorted(keys, np.array(last_keys, keys.dtype), "right")
    counts = stops - starts
    offsets = np.repeat(starts - np.cumsum(counts) + counts, counts)
    places = offsets + np.arange(counts.sum())  # positions of the records of all matching documents
    of_batch = arrivals[places] == np.repeat(near["arrival"], counts)
    matches[places[of_batch]] = True
    return matches
