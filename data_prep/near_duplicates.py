"""Near duplicates: documents whose sets of word 5-grams have a Jaccard similarity of about THRESHOLD or more.

MinHash estimates the similarity: two documents agree in as many of HASHES hashes as their sets have in
common. Documents that agree in a whole band of hashes are compared.

Order: a document precedes another if its mega-batch does, or if it is of the same one and has the smaller
content key. A document is dropped if an earlier one is similar, even if that is dropped itself because of a
third: then no decision depends on another, and all are functions of the text alone.
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
BANDS, ROWS = 21, 6
"""Documents of similarity .8 share a band with probability .998, of .7 with .92, of .3 with .015."""
HASHES = BANDS * ROWS
KEY = f"S{DOCUMENT_BYTES}"  # the beginning of a document's content key, which all its pieces share
ENTRY = np.dtype([("key", KEY), ("arrival", "<u2"), ("hashes", "u1", HASHES)])
"""A document: key, number of its mega-batch, the lowest bytes of its hashes."""
BAND = np.dtype([("band", ">u8"), ("row", "<u4")])
"""Hashes and number of a band, row of its document among the entries."""
NEAR = np.dtype([("key", KEY), ("arrival", "<u2"), ("other_arrival", "<u2"), ("other", KEY), ("equal", "u1")])
"""A document, the first similar one of a mega-batch that is not later, and how many hashes are equal."""

RANGE_BANDS = 1 << 22  # bands of a range on average; a task takes about 300 MB
_CHUNK = 1 << 18  # bytes of text whose hashes are computed at once; more leave the cache
_RUN = 1 << 16  # documents of a sorted run of bands
_FIRST = 16  # documents of a mega-batch in one band that others are compared with
_BLOCK = 1 << 18  # entries in memory: 40 MB
_PAIRS = 1 << 17  # compared at once: 50 MB
_SEED = 0
_EQUAL = np.ceil(HASHES * (THRESHOLD + (1 - THRESHOLD) / 256))  # bytes; 1 in 256 agrees by chance


def hash_documents(texts: list[bytes]) -> np.ndarray:
    """(documents, HASHES) uint8 MinHashes of normalised texts."""
    grams, owners = n_grams_of(texts)
    offsets = np.searchsorted(owners, np.arange(len(texts) + 1)).astype(np.uint64)
    found = library().digest_matrix_from_flat_token_hashes(grams, offsets, HASHES, _SEED)
    return np.array(found.to_rows(), np.uint32).reshape(-1, HASHES).astype(np.uint8)


def n_grams_of(texts: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """Hashes of the N-grams of texts, and the numbers of their texts, ascending."""
    hashes, owners = words.hash_texts(texts)
    grams, of = words.n_grams(hashes, owners, N)
    counts = np.bincount(owners, minlength=len(texts))
    short = np.flatnonzero(counts < N)
    if not len(short):
        return grams, of
    starts = (np.cumsum(counts) - counts)[short]
    whole = hashes[starts].copy()
    for k in range(1, N - 1):
        more = counts[short] > k
        whole[more] = whole[more] * words.NEXT + hashes[starts[more] + k]
    order = np.argsort(np.concatenate([of, short]), kind="stable")
    return np.concatenate([grams, whole])[order], np.concatenate([of, short])[order]


def library():  # type: ignore[no-untyped-def]
    """rensa's RMinHash, whose hashes change with its version. UserError: it is not installed."""
    os.environ["RAYON_NUM_THREADS"] = "1"  # --workers is the parallelism, whatever was exported
    require_package("rensa", "--near-duplicates drop")
    from rensa import RMinHash

    return RMinHash


class EntryWriter:
    """Writes the entries of a shard, in sorted runs. Memory: one run, and a chunk of text."""

    def __init__(self, file: IO[bytes], arrivals: dict[str, int]) -> None:
        """`arrivals`: the mega-batch of each source."""
        self._file, self._arrivals = file, arrivals
        self._run = np.zeros(_RUN, ENTRY)
        self._count = 0  # of its documents; the last ones wait in `_texts` to be hashed
        self._texts: list[bytes] = []
        self._size = 0

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
        """Write the documents that are left."""
        self._hash()
        run = self._run[: self._count]
        self._file.write(run[np.argsort(run["key"], kind="stable")].tobytes())
        self._count = 0

    def _hash(self) -> None:
        if self._texts:
            self._run["hashes"][self._count - len(self._texts) : self._count] = hash_documents(self._texts)
        self._texts, self._size = [], 0


def write_bands(space: Workspace, number: int, entries: Path) -> None:
    """Write the sorted runs of bands of a file of entries. Memory: one run, about 150 MB."""
    documents = mapped(entries, ENTRY)
    with open_items(space.file("bands", number, "bin")) as file:
        for start in range(0, len(documents), _RUN):
            hashes = documents["hashes"][start : start + _RUN]
            keys = np.zeros((len(hashes), BANDS, 8), np.uint8)
            keys[:, :, :ROWS] = hashes.reshape(len(hashes), BANDS, ROWS)
            keys[:, :, ROWS] = np.arange(BANDS)
            values = keys.reshape(-1, 8).view(">u8").ravel().astype(np.uint64)
            order = np.argsort(values)
            run = np.zeros(len(values), BAND)
            run["band"], run["row"] = values[order], order // BANDS + start
            file.write(run.tobytes())


def entry_files(space: Workspace, shards: int, past: Sequence[Path]) -> list[Path]:
    """The files of entries: of the shards, and the .near files of a stream that grows."""
    return [*(space.file("entries", number, "bin") for number in range(shards)), *past]


def count_ranges(entries: Sequence[Path]) -> int:
    """The number of ranges of bands, a function of the number of documents alone."""
    return 1 + BANDS * sum(len(mapped(path, ENTRY)) for path in entries) // RANGE_BANDS


def find_range(
    space: Workspace, number: int, ranges: int, shards: int, past: Sequence[Path], first: int
) -> None:
    """Write the near duplicates in a range of bands, of documents of mega-batches from `first` on."""
    entries = entry_files(space, shards, past)
    bands = [space.file("bands", file, "bin") for file in range(len(entries))]
    values, files, rows = _shared(number, ranges, bands)
    starts = np.flatnonzero(changes(values))
    found = [np.zeros(0, NEAR)]
    start = 0
    while start < len(values):  # a block of whole bands
        at = int(np.searchsorted(starts, start + _BLOCK))
        stop = int(starts[at]) if at < len(starts) else len(values)
        block = _read(entries, files[start:stop], rows[start:stop])
        found.append(_compare(block, values[start:stop], first))
        start = stop
    with open_items(space.file("near", number, "bin")) as file:
        file.write(_first_of_each(np.concatenate(found)).tobytes())


def _shared(number: int, ranges: int, paths: Sequence[Path]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Bands that several documents have, in a range: hashes, ascending, number of the file, row."""
    pieces = []
    for file, path in enumerate(paths):
        for found in slices(path, BAND, _RUN * BANDS, number, ranges):
            values = found["band"].astype(np.uint64)
            pieces.append((values, np.full(len(values), file, np.uint32), found["row"]))
    values, files, rows = map(np.concatenate, zip(*pieces, strict=True))
    order = np.argsort(values, kind="stable")
    new = changes(values[order])
    order = order[~(new & np.append(new[1:], True))]
    return values[order], files[order], rows[order]


def _read(paths: Sequence[Path], files: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """The entries at `rows` of files, given by their numbers."""
    entries = np.zeros(len(rows), ENTRY)
    order = np.argsort(files, kind="stable")
    for places in np.split(order, np.flatnonzero(changes(files[order]))[1:]):
        entries[places] = mapped(paths[files[places[0]]], ENTRY)[rows[places]]
    return entries


def _compare(entries: np.ndarray, bands: np.ndarray, first: int) -> np.ndarray:
    """The near duplicates among documents that share a band; `bands` (entries,) ascend."""
    order = np.lexsort((entries["key"], entries["arrival"], bands))
    bands, entries = bands[order], entries[order]
    new_band = changes(bands)
    new_batch = new_band | changes(entries["arrival"])
    new = new_batch | changes(entries["key"])
    bands, entries, new_band, new_batch = bands[new], entries[new], new_band[new], new_batch[new]
    places = np.arange(len(bands))
    leads = places - np.maximum.accumulate(np.where(new_batch, places, 0)) < _FIRST
    lead = np.flatnonzero(leads)
    before: np.ndarray = np.cumsum(leads) - leads
    base: np.ndarray = before[np.maximum.accumulate(np.where(new_band, places, 0))]
    found = []
    for one, count in _slices(np.where(entries["arrival"] >= first, before - base, 0)):
        ends = np.cumsum(count)
        i = np.repeat(one, count)
        j = lead[np.arange(len(i)) + np.repeat(base[one] - ends + count, count)]
        equal = (entries["hashes"][i] == entries["hashes"][j]).sum(1)
        near = (equal >= _EQUAL) & (entries["key"][i] != entries["key"][j])
        made = np.zeros(int(near.sum()), NEAR)
        i, j, made["equal"] = i[near], j[near], equal[near]
        made["key"], made["arrival"] = entries["key"][i], entries["arrival"][i]
        made["other"], made["other_arrival"] = entries["key"][j], entries["arrival"][j]
        found.append(_first_of_each(made))
    return np.concatenate([np.zeros(0, NEAR), *found])


def _slices(counts: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Slices of documents with at most about _PAIRS comparisons: numbers and `counts` of each."""
    numbers = np.flatnonzero(counts)
    until = np.cumsum(counts[numbers])
    start = 0
    while start < len(numbers):
        done = int(until[start - 1]) if start else 0
        stop = max(start + 1, int(np.searchsorted(until, done + _PAIRS, "right")))
        yield numbers[start:stop], counts[numbers[start:stop]]
        start = stop


def _first_of_each(near: np.ndarray) -> np.ndarray:
    """In the order of content keys, of each document the first similar one of each mega-batch."""
    near = near[np.lexsort((near["other"], near["other_arrival"], near["arrival"], near["key"]))]
    return near[changes(near["key"]) | changes(near["arrival"]) | changes(near["other_arrival"])]


def near_between(space: Workspace, files: int, number: int, ranges: int) -> np.ndarray:
    """The near duplicates in a range of content keys, as `_first_of_each`; `files`: of near-NNNNN.bin."""
    paths = [space.file("near", file, "bin") for file in range(files)]
    found = (piece for path in paths for piece in slices(path, NEAR, None, number, ranges))
    return _first_of_each(np.concatenate([np.zeros(0, NEAR), *found]))


def entries_between(space: Workspace, shards: int, number: int, ranges: int) -> np.ndarray:
    """The entries in a range of content keys, in their order, each document once for a mega-batch."""
    paths = entry_files(space, shards, ())
    found = (piece for path in paths for piece in slices(path, ENTRY, _RUN, number, ranges))
    entries = np.concatenate([np.zeros(0, ENTRY), *found])
    entries = entries[np.lexsort((entries["arrival"], entries["key"]))]
    return entries[changes(entries["key"]) | changes(entries["arrival"])]


def similar(space: Workspace, number: int) -> np.ndarray:
    """The NEAR of a range of content keys; none unless near duplicates are dropped."""
    path = space.file("similar", number, "bin")
    return mapped(path, NEAR) if path.exists() else np.zeros(0, NEAR)


def always_dropped(near: np.ndarray, first: int) -> np.ndarray:
    """(near,) whether a document is dropped in any case: the other is of its own mega-batch or the stream."""
    return (near["other_arrival"] == near["arrival"]) | (near["other_arrival"] < first)


def is_dropped(near: np.ndarray, first: int, taken: np.ndarray) -> np.ndarray:
    """(near,) whether a document is dropped; not if the other is surplus of another mega-batch.

    `taken`: (mega-batches,) content key of the last document that each takes, from mega-batch `first` on.
    """
    batch = np.maximum(near["other_arrival"].astype(np.int64) - first, 0)
    return always_dropped(near, first) | (near["other"].astype(taken.dtype) <= taken[batch])


def matching(keys: np.ndarray, arrivals: np.ndarray, near: np.ndarray) -> np.ndarray:
    """(records,) whether the document of each record is among `near`; `keys`: content keys, ascending."""
    found = np.zeros(len(keys), bool)
    size = keys.dtype.itemsize
    ends = np.array(
        [key.ljust(DOCUMENT_BYTES, b"\0").ljust(size, b"\xff") for key in near["key"].tolist()], keys.dtype
    )
    starts = np.searchsorted(keys, near["key"].astype(keys.dtype))
    counts = np.searchsorted(keys, ends, "right") - starts
    places = np.repeat(starts - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())
    found[places[arrivals[places] == np.repeat(near["arrival"], counts)]] = True
    return found
