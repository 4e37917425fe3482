"""A stream that gains mega-batches, as by `alma data --append`, and the records of runs on it."""

import dataclasses
import math
import shutil
from pathlib import Path

import numpy as np

from alma.evaluations import HELD_OUT
from alma.records import MACHINE_FIELDS, Run
from alma.stream import Stream


class GrowingStream:
    """A copy of a stream in `folder`, of which `has` shows the first mega-batches."""

    def __init__(self, whole: Path, folder: Path):
        shutil.copytree(whole, folder)
        self.whole = Stream.load(folder)
        self.megabatches = len(self.whole.megabatches)

    def has(self, megabatches: int) -> None:
        """Let the stream have so many mega-batches."""
        parts = {}
        for name in ("megabatches", "held_out", "held_out_valid"):
            parts[name] = getattr(self.whole, name)[:megabatches]
        dataclasses.replace(self.whole, **parts).write()


def record_of(run: str) -> tuple[list[dict], dict[str, np.ndarray]]:
    """The rows without what measures the machine, and the losses of single documents."""
    rows = []
    for row in Run.read(run).rows:
        rows.append({key: row[key] for key in row if key not in MACHINE_FIELDS})
    files = sorted(Path(run, HELD_OUT).glob("*.npy"))
    return rows, {file.name: np.load(file) for file in files}


def assert_same(run: str, other: str) -> None:
    """The records of two runs are the same, cell by cell and document by document."""
    rows, documents = record_of(run)
    other_rows, other_documents = record_of(other)
    for row, other_row in zip(rows, other_rows, strict=True):
        assert row == other_row
        assert not any(map(math.isnan, row["extra"]["matrix"]))
        assert len(row["extra"]["matrix"]) == Run.read(run).config["megabatches"]
    assert documents.keys() == other_documents.keys()
    for name, losses in documents.items():
        assert np.array_equal(losses, other_documents[name])
