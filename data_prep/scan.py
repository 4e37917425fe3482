"""Stage scan: one small record for every document.

Reads the corpus. Writes for each shard

    scan-NNNNN.bin       a RECORD for each document, in runs of RUN_DOCUMENTS, each in hash order
    skipped-NNNNN.json   the bad input that was skipped, if any

and when appending, as stage `keys`, for each .keys file of the stream

    keys-NNNNN.bin       a RECORD of 0 words for each document of the stream, in such runs

A document is identified by a hash of its content, keyed by the seed: the order of these keys is random, and
independent of the names, splitting and order of the input files; equal documents are neighbours in it.
"""

import hashlib
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import numpy as np

from alma.files import write_json_atomic
from alma.stream import KEY_BYTES
from data_prep.documents import Shard, Skipped
from data_prep.work import Workspace, damaged, mapped, open_items

RECORD = np.dtype(
    [
        ("high", ">u8"),
        ("low", ">u8"),
        ("second", ">u8"),
        ("words", "<u4"),
        ("source", "<u2"),
        ("shard", "<u4"),
        ("place", "<u4"),
    ]
)
"""A document: content key (128 bits in two halves), second hash (order of the validation set), number of
words, number of its source in `Workspace.sources`, number of its shard, its place in the shard."""
_REST = struct.Struct("<IHII")  # words to place of a RECORD
_KEY = np.dtype({"names": ["key"], "formats": [f"S{KEY_BYTES}"], "itemsize": RECORD.itemsize})

RUN_DOCUMENTS = 1 << 18
"""Documents of a sorted run: 10 MB of records."""


def content_key(text: bytes, seed: int) -> bytes:
    """The hashes of a RECORD, 24 bytes: content key (16) and second hash (8)."""
    return hashlib.blake2b(text, digest_size=24, key=(seed % 2**64).to_bytes(8)).digest()


def content_keys(records: np.ndarray) -> np.ndarray:
    """(records,) content keys of 16 bytes; bytes compare as the big-endian numbers that they are."""
    return np.ascontiguousarray(records).view(_KEY)["key"]


def scan_shard(space: Workspace, number: int, shard: Shard) -> None:
    """Write the files of a shard. Memory: one run."""
    ids = {name: index for index, name in enumerate(space.sources)}
    skipped: list[Skipped] = []
    run = bytearray()
    with open_items(space.file("scan", number, "bin")) as file:
        for place, (source, text, words) in enumerate(space.reader.read(shard, skipped.append)):
            run += content_key(text.encode(), space.seed) + _REST.pack(words, ids[source], number, place)
            if len(run) == RUN_DOCUMENTS * RECORD.itemsize:
                write_run(file, np.frombuffer(run, RECORD))
                run = bytearray()
        write_run(file, np.frombuffer(run, RECORD))
        if skipped:  # first, because scan-NNNNN.bin marks the shard as finished
            write_json_atomic(space.file("skipped", number, "json"), skipped)


def scan_keys(space: Workspace, number: int, path: Path) -> None:
    """Write the file of a .keys file. Memory: one run."""
    with open(path, "rb") as keys, open_items(space.file("keys", number, "bin")) as file:
        while data := keys.read(RUN_DOCUMENTS * KEY_BYTES):
            run = np.zeros(len(data) // KEY_BYTES, RECORD)
            run["high"], run["low"] = np.frombuffer(data, ">u8").reshape(-1, 2).T
            write_run(file, run)


def write_run(file: IO[bytes], records: np.ndarray) -> None:
    """Write the records in hash order; all runs of a file but the last have RUN_DOCUMENTS."""
    file.write(records[hash_order(records)].tobytes())


def hash_order(records: np.ndarray) -> np.ndarray:
    """Indices of the documents in hash order; equal ones: those of the stream, then by source and place.

    Only documents with equal upper halves of the key are compared further: they are few.
    """
    high = records["high"].astype(np.uint64)
    order = np.argsort(high)
    high = high[order]
    equal = np.flatnonzero(high[1:] == high[:-1])
    places = np.union1d(equal, equal + 1)
    rows = records[order[places]]
    low, new = rows["low"].astype(np.uint64), rows["words"] > 0
    ranks = np.lexsort((rows["place"], rows["shard"], rows["source"], new, low, high[places]))
    order[places] = order[places][ranks]
    return order


def repeats(records: np.ndarray) -> np.ndarray:
    """(records,) whether each, in hash order, is the same text of the same source as the one before it.

    Left out of a run, because one range has all copies of a text, however many there are.
    """
    found = np.zeros(len(records), bool)
    one, other = records[1:], records[:-1]
    found[1:] = (one["high"] == other["high"]) & (one["low"] == other["low"])
    found[1:] &= one["source"] == other["source"]
    return found


def runs(path: Path) -> Iterator[np.ndarray]:
    """The runs of a scan-NNNNN.bin or keys-NNNNN.bin, memory-mapped."""
    records = mapped(path, RECORD)
    for start in range(0, len(records), RUN_DOCUMENTS):
        yield records[start : start + RUN_DOCUMENTS]


def skips(space: Workspace, shards: int) -> Iterator[Skipped]:
    """What was skipped in shards 0 to `shards` - 1."""
    for number in range(shards):
        path = space.file("skipped", number, "json")
        if path.exists():
            try:
                found = json.loads(path.read_bytes())
            except ValueError:
                raise damaged(path) from None
            yield from (Skipped(*each) for each in found)
