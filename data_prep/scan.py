"""Stage scan writes a RECORD for each document or piece; stage keys for each entry of .keys files.

A document is identified by its content key, a hash of its text keyed by the seed. The order of
these keys is random, and independent of the names, splitting and order of the input files; equal
documents are neighbours.

With --max-document-words the keys of the pieces of a document share the first DOCUMENT_BYTES of its
hash, and end in the number of the piece. So pieces are neighbours in the order of the text, all in
one range of keys. All later stages call a piece a document, except `document_starts`.
"""

import hashlib
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO

import numpy as np

from alma.files import write_json_atomic
from alma.stream import KEY_BYTES
from data_prep.documents import Shard, Skipped, changed, normalise
from data_prep.near_duplicates import EntryWriter
from data_prep.work import DOCUMENT_BYTES, Workspace, changes, open_items

_NUMBERS = [(name, "<u4") for name in ("words", "bytes", "source", "shard", "place")]
RECORD = np.dtype([("high", ">u8"), ("low", ">u8"), ("second", ">u8"), *_NUMBERS])
"""Dtype of a document: content key (128 bits in two halves), second hash (the order in which
validation takes documents), words, bytes of text, number of its source in `Workspace.sources`,
number of its shard, its place in the shard."""
_NUMBERS_FORMAT = struct.Struct("<IIIII")  # words to place of a RECORD

_PIECE_BITS = 8 * (KEY_BYTES - DOCUMENT_BYTES)
RUN_DOCUMENTS = 1 << 18  # documents of a sorted run: 11 MB of records


def content_key(text: bytes, seed: int) -> bytes:
    """The hashes of a RECORD, 24 bytes: content key (16) and second hash (8)."""
    key = (seed % 2**64).to_bytes(8)
    return hashlib.blake2b(text, digest_size=24, key=key).digest()


def content_keys(records: np.ndarray) -> np.ndarray:
    """The content keys, (records,), as byte strings: the first 16 bytes of each record.

    The halves are big-endian, so that byte strings compare as the numbers do.
    """
    key = np.dtype(
        {
            "names": ["key"],
            "formats": [f"S{KEY_BYTES}"],
            "itemsize": records.dtype.itemsize,
        }
    )
    return np.ascontiguousarray(records).view(key)["key"]


def document_starts(records: np.ndarray) -> np.ndarray:
    """Whether each record starts a document, (records,): false for later pieces, and for copies.

    `records` are in hash order. Pieces are recognised by the shared first bytes of their keys. The
    probability that any two of 10^9 other documents share these bytes is 10^-11.
    """
    return changes(records["high"]) | changes(records["low"] >> _PIECE_BITS)


def words_of_documents(records: np.ndarray) -> np.ndarray:
    """(documents,) words of each document with all its pieces.

    `records`: in hash order, without copies.
    """
    starts = np.flatnonzero(document_starts(records))
    return np.add.reduceat(records["words"], starts, dtype=np.int64)


def keyed_texts(
    space: Workspace,
    shard: Shard,
    skipped: Callable[[Skipped], None] | None = None,
    on_document: Callable[[bytes, str, bytes], None] | None = None,
) -> Iterator[tuple[bytes, str, bytes, int]]:
    """Yield hashes (see `content_key`), source, text and words of each document, or piece of one.

    `on_document` is called with hashes, source and text of each document before its pieces.
    UserError: the input has other periods than before.
    """
    sources = set(space.sources)
    for source, text, words in space.reader.read(shard, skipped):
        if source not in sources:  # the input has a period that the stage dates did not see
            raise changed(shard)
        data = text.encode()
        hashes = content_key(data, space.seed)
        if on_document:
            compared = normalise(text).encode() if space.reader.chat else data
            on_document(hashes, source, compared)
        if not space.reader.max_document_words:
            yield hashes, source, data, words
            continue
        for number, (piece, piece_words) in enumerate(space.reader.split(text, words)):
            key = hashes[:DOCUMENT_BYTES] + number.to_bytes(KEY_BYTES - DOCUMENT_BYTES)
            yield key + hashes[KEY_BYTES:], source, piece.encode(), piece_words


def scan_shard(
    space: Workspace, number: int, shard: Shard, arrivals: np.ndarray | None = None
) -> None:
    """Write the files of a shard. Memory: one run.

    `arrivals`: (sources,) numbers of the mega-batches, if near duplicates are dropped.
    """
    source_numbers = {name: index for index, name in enumerate(space.sources)}
    skipped: list[Skipped] = []
    run = bytearray()
    entries = None
    with ExitStack() as files:
        # Opened first, so closed last: scan-NNNNN.bin marks the shard as finished.
        file = files.enter_context(open_items(space.file("scan", number, "bin")))
        if arrivals is not None:
            entries_file = files.enter_context(open_items(space.file("entries", number, "bin")))
            batches = dict(zip(space.sources, arrivals.tolist(), strict=True))
            entries = EntryWriter(entries_file, batches)
        texts = keyed_texts(space, shard, skipped.append, entries.add if entries else None)
        for place, (hashes, source, data, words) in enumerate(texts):
            source_number = source_numbers[source]
            run += hashes
            run += _NUMBERS_FORMAT.pack(words, len(data), source_number, number, place)
            if len(run) == RUN_DOCUMENTS * RECORD.itemsize:
                write_run(file, np.frombuffer(run, RECORD))
                run = bytearray()
        write_run(file, np.frombuffer(run, RECORD))
        if entries:
            entries.finish()
        if skipped:
            write_json_atomic(space.file("skipped", number, "json"), skipped)


def scan_keys(space: Workspace, number: int, path: Path) -> None:
    """Write records of the keys in a .keys file, with 0 words. Memory: one run."""
    with open(path, "rb") as keys, open_items(space.file("keys", number, "bin")) as file:
        while data := keys.read(RUN_DOCUMENTS * KEY_BYTES):
            run = np.zeros(len(data) // KEY_BYTES, RECORD)
            halves = np.frombuffer(data, ">u8").reshape(-1, 2)
            run["high"] = halves[:, 0]
            run["low"] = halves[:, 1]
            write_run(file, run)


def write_run(file: IO[bytes], records: np.ndarray) -> None:
    """Write the records in hash order; all runs of a file but the last have RUN_DOCUMENTS."""
    file.write(records[hash_order(records)].tobytes())


def hash_order(records: np.ndarray) -> np.ndarray:
    """Indices that sort records by content key.

    Among equal documents, those of the stream to append to (0 words) come first, then the order is
    by source, shard and place.
    """
    high = records["high"].astype(np.uint64)
    low = records["low"].astype(np.uint64)
    new = records["words"] > 0
    return np.lexsort((records["place"], records["shard"], records["source"], new, low, high))


def repeats(records: np.ndarray) -> np.ndarray:
    """Whether each record has the text and the source of the previous one, (records,).

    `records` are in hash order. Such repeats are removed from every sorted run: all copies of a
    text are in one range, whose records must fit in memory however many copies there are.
    """
    return ~(changes(records["high"]) | changes(records["low"]) | changes(records["source"]))
