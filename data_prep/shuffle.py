"""Shuffle: each input unit spills its documents in runs sorted by bucket; a bucket is then gathered of them.

spill-NNNNN.bin    the documents
spill-NNNNN.index  key and bytes of each (INDEX)
spill-NNNNN.npy    where each bucket begins in each run: (runs, buckets + 1, 2) int64, number of the
                   document and byte, written last
"""

from collections.abc import Iterator
from typing import IO

import numpy as np

from alma.errors import UserError
from alma.files import atomic_write
from data_prep.documents import Unit
from data_prep.plan import LEFT_OUT, Job, Plan, content_key, scanned

INDEX = np.dtype([("high", "<u8"), ("low", "<u8"), ("bytes", "<u4")])

RUN_BYTES = 64 << 20
"""Text held in memory before a sorted run is written."""


def shuffle_unit(job: Job, number: int, unit: Unit, first: int, buckets: int) -> None:
    """Write the spill of a unit whose first document is number `first` of the scan, then where buckets begin.

    Memory: a run. UserError: the input is no longer what was scanned.
    """
    records = scanned(job, number)
    bucket = np.load(job.work / "bucket.npy", mmap_mode="r")[first : first + len(records)]
    tables = []
    with (
        atomic_write(job.file("spill", number, "bin"), "wb") as texts,
        atomic_write(job.file("spill", number, "index"), "wb") as index,
    ):
        run = _Run(texts, index, buckets)
        seen = 0
        for _, text, _ in job.reader.read(unit):
            data = text.encode()
            key = content_key(data, job.seed)
            if seen == len(records) or records[seen].tobytes()[:24] != key:
                raise _changed(unit)
            if bucket[seen] != LEFT_OUT:
                run.add(int(bucket[seen]), key[:16], data)
            seen += 1
            if run.size >= RUN_BYTES:
                tables.append(run.write())
        tables.append(run.write())
    if seen != len(records):
        raise _changed(unit)
    with atomic_write(job.file("spill", number, "npy"), "wb") as file:
        np.save(file, np.stack(tables))


class _Run:
    """Documents in memory, up to a sorted run on disk."""

    def __init__(self, texts: IO[bytes], index: IO[bytes], buckets: int) -> None:
        self.size = 0
        self._texts, self._index = texts, index
        self._buckets = buckets
        self._written = np.zeros(2, np.int64)  # documents and bytes of the runs before
        self._of: list[int] = []
        self._keys: list[bytes] = []
        self._data: list[bytes] = []

    def add(self, bucket: int, key: bytes, data: bytes) -> None:
        """Take a document."""
        self._of.append(bucket)
        self._keys.append(key)
        self._data.append(data)
        self.size += len(data)

    def write(self) -> np.ndarray:
        """Write the run; where each bucket begins in it, (buckets + 1, 2): number of the document, byte."""
        of = np.array(self._of, np.int64)
        rows = np.zeros(len(of), INDEX)
        keys = np.frombuffer(b"".join(self._keys), ">u8").reshape(-1, 2)
        rows["high"], rows["low"] = keys.T
        rows["bytes"] = [len(data) for data in self._data]
        order = np.lexsort((rows["low"], rows["high"], of))
        rows = rows[order]
        self._index.write(rows.tobytes())
        self._texts.writelines(self._data[i] for i in order.tolist())
        documents = np.searchsorted(of[order], np.arange(self._buckets + 1))
        positions = np.concatenate([[0], np.cumsum(rows["bytes"], dtype=np.int64)])
        table = self._written + np.stack([documents, positions[documents]], axis=1)
        self._written = table[-1].copy()
        for each in (self._of, self._keys, self._data):
            each.clear()
        self.size = 0
        return table


def bucket_texts(job: Job, bucket: int, units: int) -> Iterator[bytes]:
    """The documents of a bucket in hash order. Memory: the text of the bucket."""
    pieces: list[bytes] = []
    rows: list[np.ndarray] = []
    for number in range(units):
        table = np.load(job.file("spill", number, "npy"), mmap_mode="r")[:, bucket : bucket + 2]
        if (table[:, 0] == table[:, 1]).all():
            continue
        with (
            open(job.file("spill", number, "bin"), "rb") as texts,
            open(job.file("spill", number, "index"), "rb") as index,
        ):
            for (start, byte), (end, byte_end) in table.tolist():
                index.seek(start * INDEX.itemsize)
                rows.append(np.frombuffer(index.read((end - start) * INDEX.itemsize), INDEX))
                texts.seek(byte)
                pieces.append(texts.read(byte_end - byte))
    if not rows:
        return
    sizes = np.concatenate([each["bytes"] for each in rows]).astype(np.int64)
    piece = np.repeat(np.arange(len(rows)), [len(each) for each in rows])
    before = np.cumsum([0, *map(len, pieces)])[:-1]
    starts = np.cumsum(sizes) - sizes - before[piece]
    order = np.lexsort([np.concatenate([each[name] for each in rows]) for name in ("low", "high")])
    for i, start, end in zip(
        piece[order].tolist(), starts[order].tolist(), (starts + sizes)[order].tolist(), strict=True
    ):
        yield pieces[i][start:end]


def check_shuffle(job: Job, plan: Plan, units: int) -> None:
    """Compare documents per bucket with the plan. UserError: a spill is damaged."""
    counts = np.zeros(len(plan.bucket_split), np.int64)
    for number in range(units):
        table = np.load(job.file("spill", number, "npy"), mmap_mode="r")
        counts += np.diff(table[:, :, 0], axis=1).sum(0)
    if (counts != plan.bucket_documents).any():
        raise UserError(f"{job.work}: damaged (documents lost in the shuffle); remove it and run again")


def _changed(unit: Unit) -> UserError:
    files = " ".join(sorted({segment.path for segment in unit})[:3])
    return UserError(f"{files}: changed since it was scanned; run again when the input is complete")
