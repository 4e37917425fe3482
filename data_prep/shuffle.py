"""Stage shuffle: the spill of each shard, runs of documents sorted by bucket and then by content key.

`bucket_texts` gathers a bucket from the spills of all shards.
"""

import zlib
from collections.abc import Iterator
from typing import IO

import numpy as np

from alma.errors import UserError
from alma.files import atomic_write
from alma.stream import KEY_BYTES
from data_prep import scan
from data_prep.cut import Wanted
from data_prep.documents import Shard, changed
from data_prep.plan import CorpusPlan, dropped, load_plan
from data_prep.pools import LEFT_OUT
from data_prep.scan import content_keys, keyed_texts, repeats
from data_prep.work import Workspace, damaged, mapped, mapped_array

INDEX = np.dtype([("high", ">u8"), ("low", ">u8"), ("bytes", "<u4"), ("crc", "<u4"), ("source", "<u4")])

RUN_BYTES = 64 << 20
"""Text in memory before a sorted run is written."""


def shuffle_shard(space: Workspace, number: int, shard: Shard, wanted: Wanted, ranges: int) -> None:
    """Write the spill of a shard.

    Memory: a run of text, and one of the scan. UserError: the input changed since the scan.
    """
    plan = load_plan(space)
    expected = planned_documents(space, number, plan, wanted, ranges)
    tables = []
    ids = {name: number for number, name in enumerate(space.sources)}
    with (
        atomic_write(space.file("spill", number, "bin"), "wb") as texts,
        atomic_write(space.file("spill", number, "index"), "wb") as index,
    ):
        run = _SortedRun(texts, index, len(plan.bucket_split))
        for hashes, source, data, _ in keyed_texts(space, shard):
            key = hashes[:KEY_BYTES]
            scanned, bucket = next(expected, (None, LEFT_OUT))
            if scanned != key:
                raise changed(shard)
            if bucket != LEFT_OUT:
                run.add(bucket, key, data, ids[source])
            if run.size >= RUN_BYTES:
                tables.append(run.write())
        tables.append(run.write())
    if next(expected, None):
        raise changed(shard)
    with atomic_write(space.file("spill", number, "npy"), "wb") as file:
        np.save(file, np.stack(tables))


def planned_documents(
    space: Workspace, number: int, plan: CorpusPlan, wanted: Wanted, ranges: int
) -> Iterator[tuple[bytes, int]]:
    """Content key and bucket of each document of a shard, in reading order."""
    copies = dropped(space, number, ranges)
    scanned = mapped(space.file("scan", number, "bin"), scan.RECORD)
    for start in range(0, len(scanned), scan.RUN_DOCUMENTS):  # a sorted run each
        records = scanned[start : start + scan.RUN_DOCUMENTS]
        first = int(records["place"].min())
        own = copies[(copies >= first) & (copies < first + len(records))]
        bucket = plan.buckets_of(records, wanted, space.sources)
        bucket[repeats(records)] = LEFT_OUT
        order = np.argsort(records["place"])
        bucket = bucket[order]
        bucket[own - first] = LEFT_OUT
        keys = content_keys(records[order]).tobytes()
        for place, each in enumerate(bucket.tolist()):
            yield keys[KEY_BYTES * place : KEY_BYTES * (place + 1)], each


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
        self._sources: list[int] = []

    def add(self, bucket: int, key: bytes, data: bytes, source: int) -> None:
        """Collect a document."""
        self._bucket_of.append(bucket)
        self._keys.append(key)
        self._data.append(data)
        self._sources.append(source)
        self.size += len(data)

    def write(self) -> np.ndarray:
        """Write the run and start the next; returns its (buckets + 1, 2) part of spill-NNNNN.npy."""
        bucket_of = np.array(self._bucket_of, np.int64)
        rows = np.zeros(len(bucket_of), INDEX)
        rows["high"], rows["low"] = np.frombuffer(b"".join(self._keys), ">u8").reshape(-1, 2).T
        rows["bytes"] = [len(data) for data in self._data]
        rows["crc"] = [zlib.crc32(data) for data in self._data]
        rows["source"] = self._sources
        order = np.lexsort((rows["low"], rows["high"], bucket_of))
        rows = rows[order]
        self._index.write(rows.tobytes())
        self._texts.writelines(self._data[i] for i in order.tolist())
        documents = np.searchsorted(bucket_of[order], np.arange(self._buckets + 1))
        positions = np.concatenate([[0], np.cumsum(rows["bytes"], dtype=np.int64)])
        table = self._written + np.stack([documents, positions[documents]], axis=1)
        self._written = table[-1].copy()
        for each in (self._bucket_of, self._keys, self._data, self._sources):
            each.clear()
        self.size = 0
        return table


def bucket_texts(space: Workspace, bucket: int, shards: int) -> Iterator[tuple[bytes, bytes, int]]:
    """Content key, text and source number of the documents of a bucket in hash order. Memory: its text.

    UserError: a text is not as it was written.
    """
    chunks: list[bytes] = []  # the bucket's part of each run
    parts: list[bytes] = []  # and of its index
    for number in range(shards):
        table = mapped_array(space.file("spill", number, "npy"))[:, bucket : bucket + 2]
        if (table[:, 0] == table[:, 1]).all():
            continue
        with (
            open(space.file("spill", number, "bin"), "rb") as texts,
            open(space.file("spill", number, "index"), "rb") as index,
        ):
            for (start, byte), (end, byte_end) in table.tolist():
                index.seek(start * INDEX.itemsize)
                parts.append(index.read((end - start) * INDEX.itemsize))
                texts.seek(byte)
                chunks.append(texts.read(byte_end - byte))
                if len(parts[-1]) < (end - start) * INDEX.itemsize or len(chunks[-1]) < byte_end - byte:
                    raise damaged(space.file("spill", number, "bin"))
    rows = np.frombuffer(b"".join(parts), INDEX)
    sizes = rows["bytes"].astype(np.int64)
    chunk = np.repeat(np.arange(len(parts)), [len(part) // INDEX.itemsize for part in parts])
    before = np.cumsum([0, *map(len, chunks)])  # bytes of the chunks before each
    starts = np.cumsum(sizes) - sizes - before[chunk]
    order = np.lexsort((rows["low"], rows["high"]))
    keys = content_keys(rows[order]).tobytes()
    columns = (chunk, starts, starts + sizes, rows["crc"], rows["source"])
    for place, (i, start, end, crc, source) in enumerate(
        zip(*(column[order].tolist() for column in columns), strict=True)
    ):
        text = chunks[i][start:end]
        if zlib.crc32(text) != crc:
            raise UserError(
                f"{space.directory}: damaged (a document of bucket {bucket}); remove it and run again"
            )
        yield keys[KEY_BYTES * place : KEY_BYTES * (place + 1)], text, source
