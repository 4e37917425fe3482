"""Stage shuffle: the documents of every bucket, in hash order.

Reads the corpus again, scan-NNNNN.bin and bucket.npy. Writes for each shard its spill: sorted runs of
documents, by bucket and then by content key.

    spill-NNNNN.bin     the text of the documents
    spill-NNNNN.index   key and length of each document (INDEX)
    spill-NNNNN.npy     (runs, buckets + 1, 2) int64: where each bucket begins in each run, as the number of
                        the document and as a byte of the .bin; written last

`bucket_texts` gathers a bucket from the spills of all shards.
"""

from collections.abc import Iterator
from typing import IO

import numpy as np

from alma.errors import UserError
from alma.files import atomic_write
from data_prep.documents import Shard
from data_prep.plan import BUCKETS, LEFT_OUT, CorpusPlan
from data_prep.scan import content_key, scanned
from data_prep.work import Workspace

INDEX = np.dtype([("high", "<u8"), ("low", "<u8"), ("bytes", "<u4")])

RUN_BYTES = 64 << 20
"""Text in memory before a sorted run is written."""


def shuffle_shard(space: Workspace, number: int, shard: Shard, first: int, buckets: int) -> None:
    """Write the spill of a shard, whose first document has number `first` in the scan.

    Memory: one run. UserError: the input changed since the scan.
    """
    records = scanned(space, number)
    bucket = np.load(space.directory / BUCKETS, mmap_mode="r")[first : first + len(records)]
    tables = []
    with (
        atomic_write(space.file("spill", number, "bin"), "wb") as texts,
        atomic_write(space.file("spill", number, "index"), "wb") as index,
    ):
        run = _SortedRun(texts, index, buckets)
        seen = 0
        for _, text, _ in space.reader.read(shard):
            data = text.encode()
            key = content_key(data, space.seed)
            if seen == len(records) or records[seen].tobytes()[:24] != key:
                raise _changed(shard)
            if bucket[seen] != LEFT_OUT:
                run.add(int(bucket[seen]), key[:16], data)
            seen += 1
            if run.size >= RUN_BYTES:
                tables.append(run.write())
        tables.append(run.write())
    if seen != len(records):
        raise _changed(shard)
    with atomic_write(space.file("spill", number, "npy"), "wb") as file:
        np.save(file, np.stack(tables))


class _SortedRun:
    """Collects documents in memory and writes them sorted."""

    def __init__(self, texts: IO[bytes], index: IO[bytes], buckets: int) -> None:
        self.size = 0
        self._texts, self._index = texts, index
        self._buckets = buckets
        self._written = np.zeros(2, np.int64)  # documents and bytes of the previous runs
        self._bucket_of: list[int] = []
        self._keys: list[bytes] = []
        self._data: list[bytes] = []

    def add(self, bucket: int, key: bytes, data: bytes) -> None:
        """Collect a document."""
        self._bucket_of.append(bucket)
        self._keys.append(key)
        self._data.append(data)
        self.size += len(data)

    def write(self) -> np.ndarray:
        """Write the run and start the next; returns its (buckets + 1, 2) part of spill-NNNNN.npy."""
        bucket_of = np.array(self._bucket_of, np.int64)
        rows = np.zeros(len(bucket_of), INDEX)
        keys = np.frombuffer(b"".join(self._keys), ">u8").reshape(-1, 2)
        rows["high"], rows["low"] = keys.T
        rows["bytes"] = [len(data) for data in self._data]
        order = np.lexsort((rows["low"], rows["high"], bucket_of))
        rows = rows[order]
        self._index.write(rows.tobytes())
        self._texts.writelines(self._data[i] for i in order.tolist())
        documents = np.searchsorted(bucket_of[order], np.arange(self._buckets + 1))
        positions = np.concatenate([[0], np.cumsum(rows["bytes"], dtype=np.int64)])
        table = self._written + np.stack([documents, positions[documents]], axis=1)
        self._written = table[-1].copy()
        for each in (self._bucket_of, self._keys, self._data):
            each.clear()
        self.size = 0
        return table


def bucket_texts(space: Workspace, bucket: int, shards: int) -> Iterator[bytes]:
    """The documents of a bucket in hash order. Memory: the text of the bucket."""
    chunks: list[bytes] = []  # the bucket's part of each run
    rows: list[np.ndarray] = []
    for number in range(shards):
        table = np.load(space.file("spill", number, "npy"), mmap_mode="r")[:, bucket : bucket + 2]
        if (table[:, 0] == table[:, 1]).all():
            continue
        with (
            open(space.file("spill", number, "bin"), "rb") as texts,
            open(space.file("spill", number, "index"), "rb") as index,
        ):
            for (start, byte), (end, byte_end) in table.tolist():
                index.seek(start * INDEX.itemsize)
                rows.append(np.frombuffer(index.read((end - start) * INDEX.itemsize), INDEX))
                texts.seek(byte)
                chunks.append(texts.read(byte_end - byte))
    if not rows:
        return
    sizes = np.concatenate([each["bytes"] for each in rows]).astype(np.int64)
    chunk = np.repeat(np.arange(len(rows)), [len(each) for each in rows])
    before = np.cumsum([0, *map(len, chunks)])[:-1]  # bytes of the chunks before each
    starts = np.cumsum(sizes) - sizes - before[chunk]
    order = np.lexsort([np.concatenate([each[name] for each in rows]) for name in ("low", "high")])
    for i, start, end in zip(
        chunk[order].tolist(), starts[order].tolist(), (starts + sizes)[order].tolist(), strict=True
    ):
        yield chunks[i][start:end]


def check_shuffle(space: Workspace, plan: CorpusPlan, shards: int) -> None:
    """Compare the documents per bucket with the plan. UserError: they differ."""
    counts = np.zeros(len(plan.bucket_split), np.int64)
    for number in range(shards):
        table = np.load(space.file("spill", number, "npy"), mmap_mode="r")
        counts += np.diff(table[:, :, 0], axis=1).sum(0)
    if (counts != plan.bucket_documents).any():
        raise UserError(
            f"{space.directory}: damaged (documents lost in the shuffle); remove it and run again"
        )


def _changed(shard: Shard) -> UserError:
    files = " ".join(sorted({segment.path for segment in shard})[:3])
    return UserError(f"{files}: changed since it was scanned; run again when the input is complete")
