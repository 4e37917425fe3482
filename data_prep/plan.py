"""Scan and plan: one small record for each document, then which split and bucket each goes to.

Documents are ordered by a hash of their content keyed by the seed, so the order is random, and the same for
any naming, splitting or order of the input files; equal documents are neighbours in it.
"""

import hashlib
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from alma.errors import UserError
from alma.files import atomic_write
from data_prep.documents import Reader, Unit

RECORD = np.dtype([("high", ">u8"), ("low", ">u8"), ("second", ">u8"), ("words", "<u4"), ("source", "<u2")])
"""A document: content key (128 bits), the second hash (order of validation), words, number of the source."""

BUCKET_WORDS = 10_000_000
"""Words a bucket of documents aims at (some 60 MB of text, which one worker holds in memory)."""

LEFT_OUT = -1


@dataclass(frozen=True)
class Job:
    """What every unit of work must know."""

    work: Path
    seed: int
    reader: Reader
    sources: tuple[str, ...]
    """Names in alphabetical order; a document found in several sources counts for the first."""

    def file(self, name: str, number: int, suffix: str) -> Path:
        """The file of a unit of work."""
        return self.work / f"{name}-{number:05d}.{suffix}"


@dataclass(frozen=True)
class Wanted:
    """Sizes asked for, in words."""

    mega_batches: int
    words: int
    eval_words: int
    valid_words: int
    valid_source: str

    @property
    def names(self) -> list[str]:
        """The splits in the order of their numbers."""
        return [f"megabatch_{t:02d}" for t in range(self.mega_batches)] + ["test", "valid"]


@dataclass(frozen=True)
class Plan:
    """Where each scanned document goes."""

    bucket: np.ndarray
    """(documents,) int32: number of the bucket, or LEFT_OUT; aligned with the scan's records."""
    bucket_split: np.ndarray
    """(buckets,) number of the split of each bucket; buckets of a split follow the hash order."""
    bucket_words: np.ndarray
    bucket_documents: np.ndarray
    bucket_keys: np.ndarray
    """(buckets,) uint64: sum of the low halves of the content keys."""
    source_words: np.ndarray
    """(splits, sources)"""
    duplicate_documents: int
    duplicate_words: int


def content_key(text: bytes, seed: int) -> bytes:
    """24 bytes: the content key (16) and the second hash (8) of a document."""
    return hashlib.blake2b(text, digest_size=24, key=(seed % 2**64).to_bytes(8)).digest()


def scan_unit(job: Job, number: int, unit: Unit) -> None:
    """Write the records of a unit's documents, in reading order."""
    ids = {name: index for index, name in enumerate(job.sources)}
    keys, words, sources = bytearray(), array("I"), array("H")
    for source, text, count in job.reader.read(unit):
        keys += content_key(text.encode(), job.seed)
        words.append(count)
        sources.append(ids[source])
    records = np.zeros(len(words), RECORD)
    hashes = np.frombuffer(bytes(keys), ">u8").reshape(-1, 3)
    for column, name in enumerate(("high", "low", "second")):
        records[name] = hashes[:, column]
    records["words"] = np.frombuffer(words, np.uint32) if words else 0
    records["source"] = np.frombuffer(sources, np.uint16) if sources else 0
    with atomic_write(job.file("scan", number, "npy"), "wb") as file:
        np.save(file, records)


def assign_splits(
    records: np.ndarray, wanted: Wanted, sources: tuple[str, ...]
) -> tuple[np.ndarray, np.ndarray]:
    """The split of each document (LEFT_OUT for duplicates and surplus), and which are not duplicates.

    The running word count of the hash order is cut at the document nearest to each multiple of
    `wanted.words`, so every cut is within half a document of its target. UserError: too few words, or a
    split that would be empty because documents are too long.
    """
    high, low = records["high"].astype(np.uint64), records["low"].astype(np.uint64)
    order = np.lexsort((records["source"], low, high))
    high, low = high[order], low[order]
    first = np.ones(len(order), bool)
    first[1:] = (high[1:] != high[:-1]) | (low[1:] != low[:-1])
    kept = order[first]
    of_valid_source = kept[records["source"][kept] == sources.index(wanted.valid_source)]
    _require_words(records, kept, of_valid_source, wanted)

    split = np.full(len(records), LEFT_OUT, np.int32)
    candidates = of_valid_source[np.argsort(records["second"][of_valid_source], kind="stable")]
    (end,) = _cuts(records["words"][candidates], np.array([wanted.valid_words]))
    split[candidates[:end]] = wanted.mega_batches + 1

    pool = kept[split[kept] == LEFT_OUT]
    targets = np.arange(1, wanted.mega_batches + 2, dtype=np.int64) * wanted.words
    targets[-1] += wanted.eval_words - wanted.words
    left = int(records["words"][pool].sum(dtype=np.int64))
    if targets[-1] - left > (records["words"][pool[-1]] / 2 if len(pool) else 0):
        raise UserError(  # validation took more than its words, by up to half a document
            f"{left:,} words are left after validation, {int(targets[-1]):,} are needed: ask for fewer "
            "words, split long documents with --max-document-words, or add text"
        )
    ends = _cuts(records["words"][pool], targets)
    split[pool[: ends[-1]]] = np.repeat(np.arange(len(ends)), np.diff(ends, prepend=0))
    counts = np.bincount(split[split >= 0], minlength=wanted.mega_batches + 2)
    if not counts.all():
        raise UserError(
            f"{wanted.names[int(np.argmin(counts))]} would be empty: the longest document has "
            f"{int(records['words'].max()):,} words; ask for more words or split long documents with "
            "--max-document-words"
        )
    return split, kept


def make_plan(records: np.ndarray, wanted: Wanted, sources: tuple[str, ...]) -> Plan:
    """Assign splits and cut each into buckets of about BUCKET_WORDS, monotone in the hash order."""
    split, kept = assign_splits(records, wanted, sources)
    low = records["low"].astype(np.uint64)
    order = np.lexsort((low, records["high"].astype(np.uint64), split))
    order = order[split[order] >= 0]
    ordered = split[order].astype(np.int64)
    words = records["words"][order].astype(np.int64)
    before = np.cumsum(words) - words
    starts = before[np.searchsorted(ordered, ordered)]
    label = ordered << 32 | (before - starts) // BUCKET_WORDS
    labels, number = np.unique(label, return_inverse=True)

    bucket = np.full(len(records), LEFT_OUT, np.int32)
    bucket[order] = number
    keys = np.zeros(len(labels), np.uint64)
    np.add.at(keys, number, low[order])
    source_words = np.zeros((wanted.mega_batches + 2, len(sources)), np.int64)
    np.add.at(source_words, (ordered, records["source"][order]), words)
    return Plan(
        bucket=bucket,
        bucket_split=(labels >> 32).astype(np.int32),
        bucket_words=np.bincount(number, words, len(labels)).astype(np.int64),
        bucket_documents=np.bincount(number, minlength=len(labels)),
        bucket_keys=keys,
        source_words=source_words,
        duplicate_documents=len(records) - len(kept),
        duplicate_words=int(
            records["words"].sum(dtype=np.int64) - records["words"][kept].sum(dtype=np.int64)
        ),
    )


def _cuts(words: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """How many documents to take so that the running word count is nearest to each target (ties: fewer)."""
    running = np.concatenate([[0], np.cumsum(words, dtype=np.int64)])
    above = np.minimum(np.searchsorted(running, targets), len(words))
    below = np.maximum(above - 1, 0)
    return np.where(targets - running[below] <= running[above] - targets, below, above)


def _require_words(
    records: np.ndarray, kept: np.ndarray, of_valid_source: np.ndarray, wanted: Wanted
) -> None:
    total = int(records["words"][kept].sum(dtype=np.int64))
    of_source = int(records["words"][of_valid_source].sum(dtype=np.int64))
    asked = wanted.mega_batches * wanted.words + wanted.eval_words + wanted.valid_words
    dropped = f"after dropping {len(records) - len(kept):,} duplicates"
    parts = f"{wanted.mega_batches} x {wanted.words:,} + {wanted.eval_words:,} evaluation"
    if total < asked:
        raise UserError(
            f"the corpus has {total:,} words in {len(kept):,} documents {dropped}, but {parts} + "
            f"{wanted.valid_words:,} validation = {asked:,} are asked for: {asked - total:,} words are "
            "missing; add text or ask for fewer"
        )
    if of_source < wanted.valid_words:
        raise UserError(
            f"source {wanted.valid_source} has {of_source:,} words {dropped}, but --valid-words is "
            f"{wanted.valid_words:,}: {wanted.valid_words - of_source:,} words are missing; choose another "
            "--valid-source or ask for fewer"
        )


def corpus_summary(records: np.ndarray, plan: Plan, wanted: Wanted) -> dict[str, Any]:
    """Totals of the corpus and the spread (max - min, over `wanted.words`) of the mega-batches' words."""
    split_words = plan.source_words.sum(1)[: wanted.mega_batches]
    read = int(records["words"].sum(dtype=np.int64))
    return {
        "documents": len(records),
        "words": read,
        "duplicate_documents": plan.duplicate_documents,
        "duplicate_words": plan.duplicate_words,
        "surplus_words": read - plan.duplicate_words - int(plan.source_words.sum()),
        "spread": float((split_words.max() - split_words.min()) / wanted.words),
    }
