"""Shuffle: each input unit spills its documents to one file, sorted by bucket; a bucket is then gathered."""

import os
from collections.abc import Iterator
from typing import IO

import numpy as np

from alma.errors import UserError
from alma.files import atomic_write
from data_prep.documents import Unit
from data_prep.plan import LEFT_OUT, Job, Plan, content_key

INDEX = np.dtype([("bucket", "<i4"), ("key", "S16"), ("offset", "<u8"), ("bytes", "<u8")])

RUN_BYTES = 64 << 20
"""Text held in memory before a sorted run is written."""


def shuffle_unit(job: Job, number: int, unit: Unit, first: int) -> None:
    """Write the spill of a unit whose first document is number `first` of the scan, then its index.

    UserError: the input is no longer what was scanned.
    """
    records = np.load(job.file("scan", number, "npy"), mmap_mode="r")
    buckets = np.load(job.work / "bucket.npy", mmap_mode="r")[first : first + len(records)]
    index: list[np.ndarray] = []
    run: list[tuple[int, bytes, bytes]] = []
    size = position = seen = 0
    with atomic_write(job.file("spill", number, "bin"), "wb") as file:
        for _, text, _ in job.reader.read(unit):
            data = text.encode()
            key = content_key(data, job.seed)
            if seen == len(records) or records[seen].tobytes()[:24] != key:
                raise _changed(unit)
            if buckets[seen] != LEFT_OUT:
                run.append((int(buckets[seen]), key[:16], data))
                size += len(data)
            seen += 1
            if size >= RUN_BYTES:
                index.append(_write_run(file, run, position))
                position, size, run = position + size, 0, []
        index.append(_write_run(file, run, position))
    if seen != len(records):
        raise _changed(unit)
    rows = np.concatenate(index)
    with atomic_write(job.file("spill", number, "npy"), "wb") as file:
        np.save(file, rows[np.argsort(rows["bucket"], kind="stable")])


def bucket_texts(job: Job, bucket: int, units: int) -> Iterator[bytes]:
    """The documents of a bucket in hash order. Memory: the text of the bucket."""
    documents: list[tuple[bytes, bytes]] = []
    for number in range(units):
        index = np.load(job.file("spill", number, "npy"), mmap_mode="r")
        start, end = np.searchsorted(index["bucket"], [bucket, bucket + 1])
        if start == end:
            continue
        with open(job.file("spill", number, "bin"), "rb") as file:
            for row in index[start:end]:
                documents.append(
                    (row.tobytes()[4:20], os.pread(file.fileno(), int(row["bytes"]), int(row["offset"])))
                )
    documents.sort()
    for _, text in documents:
        yield text


def check_shuffle(job: Job, plan: Plan, units: int) -> None:
    """Compare documents per bucket with the plan. UserError: a spill is damaged."""
    counts = np.zeros(len(plan.bucket_split), np.int64)
    for number in range(units):
        index = np.load(job.file("spill", number, "npy"), mmap_mode="r")
        counts += np.bincount(index["bucket"], minlength=len(counts))
    if (counts != plan.bucket_documents).any():
        raise UserError(f"{job.work}: damaged (documents lost in the shuffle); remove it and run again")


def _write_run(file: IO[bytes], run: list[tuple[int, bytes, bytes]], position: int) -> np.ndarray:
    run.sort()
    rows = np.zeros(len(run), INDEX)
    lengths = [len(data) for _, _, data in run]
    rows["bucket"] = [bucket for bucket, _, _ in run]
    rows["key"] = [key for _, key, _ in run]
    rows["bytes"] = lengths
    rows["offset"] = position + np.cumsum([0, *lengths])[:-1]
    file.writelines(data for _, _, data in run)
    return rows


def _changed(unit: Unit) -> UserError:
    files = " ".join(sorted({segment.path for segment in unit})[:3])
    return UserError(f"{files}: changed since it was scanned; run again when the input is complete")
