"""Stage shuffle: distribute the texts of each shard to the buckets (an external sort).

Each shard is written as a spill: runs of documents sorted by bucket, then by content key.
`bucket_texts` collects the texts of a bucket from the spills of all shards.
"""

import zlib
from collections.abc import Iterator
from typing import IO, NamedTuple

import numpy as np

from alma.files import atomic_write
from alma.stream import KEY_BYTES
from data_prep import scan
from data_prep.cut import Splits
from data_prep.documents import Shard, changed
from data_prep.plan import CorpusPlan, dropped, load_plan
from data_prep.pools import LEFT_OUT
from data_prep.work import Workspace, damaged, mapped, mapped_array

INDEX = np.dtype([("key", f"S{KEY_BYTES}"), ("bytes", "<u4"), ("crc", "<u4"), ("source", "<u4")])
RUN_BYTES = 64 << 20  # text in memory before a sorted run is written


class _Document(NamedTuple):
    """A document of a run; documents sort by bucket, then by content key."""

    bucket: int
    key: bytes
    text: bytes
    source: int


def shuffle_shard(space: Workspace, number: int, shard: Shard, splits: Splits, ranges: int) -> None:
    """Write the spill of a shard.

    Memory: a run of text, and one of the scan. UserError: the input changed since the scan.
    """
    plan = load_plan(space)
    bucket_count = len(plan.bucket_split)
    expected = planned_documents(space, number, plan, splits, ranges)
    source_numbers = {name: number for number, name in enumerate(space.sources)}
    tables = []
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
                run.append(_Document(bucket, key, data, source_numbers[source]))
                size += len(data)
            if size >= RUN_BYTES:
                tables.append(_write_run(run, texts, index, bucket_count))
                size = 0
        tables.append(_write_run(run, texts, index, bucket_count))
    if next(expected, None):
        raise changed(shard)
    with atomic_write(space.file("spill", number, "npy"), "wb") as file:
        np.save(file, np.stack(tables))


def planned_documents(
    space: Workspace, number: int, plan: CorpusPlan, splits: Splits, ranges: int
) -> Iterator[tuple[bytes, int]]:
    """Yield content key and bucket of each document of a shard, in reading order."""
    left_out = dropped(space, number, ranges)
    scanned = mapped(space.file("scan", number, "bin"), scan.RECORD)
    for start in range(0, len(scanned), scan.RUN_DOCUMENTS):  # one sorted run at a time
        records = scanned[start : start + scan.RUN_DOCUMENTS]
        first = int(records["place"].min())
        in_run = (left_out >= first) & (left_out < first + len(records))
        buckets = plan.buckets_of(records, splits, space.sources)
        buckets[scan.repeats(records)] = LEFT_OUT
        order = np.argsort(records["place"])
        buckets = buckets[order]
        buckets[left_out[in_run] - first] = LEFT_OUT
        keys = scan.content_keys(records[order]).tobytes()
        for place, bucket in enumerate(buckets.tolist()):
            yield keys[KEY_BYTES * place : KEY_BYTES * (place + 1)], bucket


def _write_run(
    run: list[_Document], texts: IO[bytes], index: IO[bytes], bucket_count: int
) -> np.ndarray:
    """Write a run and empty it; returns the borders of its buckets, (buckets + 1, 2).

    Row b is the position in the run at which bucket b begins: its first document in the index, and
    its first byte in the texts.
    """
    begin = (index.tell() // INDEX.itemsize, texts.tell())
    run.sort()
    rows = [
        (document.key, len(document.text), zlib.crc32(document.text), document.source)
        for document in run
    ]
    index.write(np.array(rows, INDEX).tobytes())
    texts.writelines(document.text for document in run)
    buckets = [document.bucket for document in run]
    documents = np.searchsorted(buckets, np.arange(bucket_count + 1))
    positions = np.cumsum([0, *(len(document.text) for document in run)])
    run.clear()
    return np.stack([documents, positions[documents]], axis=1) + begin


def bucket_texts(space: Workspace, bucket: int, shards: int) -> Iterator[tuple[bytes, bytes, int]]:
    """Yield content key, text and source number of the documents of a bucket in hash order.

    Memory: the text of the bucket. UserError: a spill is damaged.
    """
    chunks: list[bytes] = []  # the bucket's texts in each run
    parts: list[bytes] = []  # the bucket's part of each run's index
    for number in range(shards):
        for chunk, part in _bucket_runs(space, bucket, number):
            chunks.append(chunk)
            parts.append(part)
    rows = np.frombuffer(b"".join(parts), INDEX)
    sizes = rows["bytes"].astype(np.int64)
    documents = [len(part) // INDEX.itemsize for part in parts]
    chunk_numbers = np.repeat(np.arange(len(parts)), documents)
    bytes_before = np.cumsum([0, *map(len, chunks)])  # offset of each chunk in their concatenation
    starts = np.cumsum(sizes) - sizes - bytes_before[chunk_numbers]
    order = np.argsort(rows["key"])
    keys = rows["key"][order].tobytes()
    columns = (chunk_numbers, starts, sizes, rows["crc"], rows["source"])
    sorted_columns = [column[order].tolist() for column in columns]
    for place, row in enumerate(zip(*sorted_columns, strict=True)):
        chunk_number, start, size, crc, source = row
        text = chunks[chunk_number][start : start + size]
        if zlib.crc32(text) != crc:
            raise damaged(space.directory / "spill-*.bin")
        yield keys[KEY_BYTES * place : KEY_BYTES * (place + 1)], text, source


def _bucket_runs(space: Workspace, bucket: int, number: int) -> Iterator[tuple[bytes, bytes]]:
    """Yield texts and index of a bucket in each run of a shard that has it.

    UserError: the spill is damaged.
    """
    table = mapped_array(space.file("spill", number, "npy"))[:, bucket : bucket + 2]
    if (table[:, 0] == table[:, 1]).all():
        return
    path = space.file("spill", number, "bin")
    with open(path, "rb") as texts, open(space.file("spill", number, "index"), "rb") as index:
        for (start, first_byte), (end, end_byte) in table.tolist():
            index_bytes = (end - start) * INDEX.itemsize
            index.seek(start * INDEX.itemsize)
            part = index.read(index_bytes)
            texts.seek(first_byte)
            chunk = texts.read(end_byte - first_byte)
            if len(part) < index_bytes or len(chunk) < end_byte - first_byte:
                raise damaged(path)
            yield chunk, part
