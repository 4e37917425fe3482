"""Stage shuffle: the spill of each shard, runs of documents sorted by bucket and then by content key.

`bucket_texts` gathers a bucket from the spills of all shards.
"""

import zlib
from collections.abc import Iterator
from typing import IO

import numpy as np

from alma.files import atomic_write
from alma.stream import KEY_BYTES
from data_prep import scan
from data_prep.cut import Wanted
from data_prep.documents import Shard, changed
from data_prep.plan import CorpusPlan, dropped, load_plan
from data_prep.pools import LEFT_OUT
from data_prep.work import Workspace, damaged, mapped, mapped_array

INDEX = np.dtype([("key", f"S{KEY_BYTES}"), ("bytes", "<u4"), ("crc", "<u4"), ("source", "<u4")])
_Document = tuple[int, bytes, bytes, int]  # bucket, content key, text, number of its source
RUN_BYTES = 64 << 20  # text in memory before a sorted run is written


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
        run: list[_Document] = []
        size = 0
        for hashes, source, data, _ in scan.keyed_texts(space, shard):
            key = hashes[:KEY_BYTES]
            scanned, bucket = next(expected, (None, LEFT_OUT))
            if scanned != key:
                raise changed(shard)
            if bucket != LEFT_OUT:
                run.append((bucket, key, data, ids[source]))
                size += len(data)
            if size >= RUN_BYTES:
                tables.append(_write_run(run, texts, index, len(plan.bucket_split)))
                size = 0
        tables.append(_write_run(run, texts, index, len(plan.bucket_split)))
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
        bucket[scan.repeats(records)] = LEFT_OUT
        order = np.argsort(records["place"])
        bucket = bucket[order]
        bucket[own - first] = LEFT_OUT
        keys = scan.content_keys(records[order]).tobytes()
        for place, each in enumerate(bucket.tolist()):
            yield keys[KEY_BYTES * place : KEY_BYTES * (place + 1)], each


def _write_run(run: list[_Document], texts: IO[bytes], index: IO[bytes], buckets: int) -> np.ndarray:
    """Write and empty a run; returns its (buckets + 1, 2) part of spill-NNNNN.npy."""
    written = index.tell() // INDEX.itemsize, texts.tell()
    run.sort()
    rows = [(key, len(data), zlib.crc32(data), source) for _, key, data, source in run]
    index.write(np.array(rows, INDEX).tobytes())
    texts.writelines(data for _, _, data, _ in run)
    documents = np.searchsorted([bucket for bucket, *_ in run], np.arange(buckets + 1))
    positions = np.cumsum([0, *(len(data) for _, _, data, _ in run)])
    run.clear()
    return np.stack([documents, positions[documents]], axis=1) + written


def bucket_texts(space: Workspace, bucket: int, shards: int) -> Iterator[tuple[bytes, bytes, int]]:
    """Content key, text and source number of the documents of a bucket in hash order. Memory: its text.

    UserError: a spill is damaged.
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
    order = np.argsort(rows["key"])
    keys = rows["key"][order].tobytes()
    columns = (column[order].tolist() for column in (chunk, starts, sizes, rows["crc"], rows["source"]))
    for place, (i, start, size, crc, source) in enumerate(zip(*columns, strict=True)):
        text = chunks[i][start : start + size]
        if zlib.crc32(text) != crc:
            raise damaged(space.directory / "spill-*.bin")
        yield keys[KEY_BYTES * place : KEY_BYTES * (place + 1)], text, source
