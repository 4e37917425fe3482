"""Stage scan: one small record for every document.

Reads the corpus. Writes for each shard

    scan-NNNNN.bin       a RECORD for each document, in reading order
    skipped-NNNNN.json   the bad input that was skipped, if any

A document is identified by a hash of its content, keyed by the seed: the order of these keys is random, and
independent of the names, splitting and order of the input files; equal documents are neighbours in it.
"""

import hashlib
import itertools
import json
import struct
from collections.abc import Iterator

import numpy as np

from alma.files import atomic_write, write_json_atomic
from data_prep.documents import Shard, Skipped
from data_prep.work import Workspace

RECORD = np.dtype([("high", ">u8"), ("low", ">u8"), ("second", ">u8"), ("words", "<u4"), ("source", "<u2")])
"""A document: content key (128 bits in two halves), second hash (order of the validation set), number of
words, number of its source in `Workspace.sources`."""
_REST = struct.Struct("<IH")  # words and source of a RECORD


def content_key(text: bytes, seed: int) -> bytes:
    """The hashes of a RECORD, 24 bytes: content key (16) and second hash (8)."""
    return hashlib.blake2b(text, digest_size=24, key=(seed % 2**64).to_bytes(8)).digest()


def scan_shard(space: Workspace, number: int, shard: Shard) -> None:
    """Write the files of a shard."""
    ids = {name: index for index, name in enumerate(space.sources)}
    skipped: list[Skipped] = []
    with atomic_write(space.file("scan", number, "bin"), "wb") as file:
        for source, text, words in space.reader.read(shard, skipped.append):
            file.write(content_key(text.encode(), space.seed) + _REST.pack(words, ids[source]))
        if skipped:  # first, because scan-NNNNN.bin marks the shard as finished
            write_json_atomic(space.file("skipped", number, "json"), skipped)


def scanned(space: Workspace, number: int) -> np.ndarray:
    """The records of a shard, memory-mapped."""
    path = space.file("scan", number, "bin")
    return np.memmap(path, RECORD, "r") if path.stat().st_size else np.zeros(0, RECORD)


def skips(space: Workspace, shards: int) -> Iterator[Skipped]:
    """What was skipped in shards 0 to `shards` - 1."""
    for number in range(shards):
        path = space.file("skipped", number, "json")
        if path.exists():
            yield from (Skipped(*each) for each in json.loads(path.read_bytes()))


def first_documents(space: Workspace, shards: int) -> list[int]:
    """(shards + 1,) number of the first document of each shard, then of all documents."""
    sizes = (space.file("scan", number, "bin").stat().st_size for number in range(shards))
    return list(itertools.accumulate((size // RECORD.itemsize for size in sizes), initial=0))


def source_totals(space: Workspace, shards: int) -> np.ndarray:
    """(sources, 2) documents and words of each source, duplicates included."""
    count = len(space.sources)
    totals = np.zeros((2, count), np.int64)
    for number in range(shards):
        rows = scanned(space, number)
        totals[0] += np.bincount(rows["source"], minlength=count)
        totals[1] += np.bincount(rows["source"], rows["words"], count).astype(np.int64)
    return totals.T
