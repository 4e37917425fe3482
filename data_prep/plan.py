"""Scan and plan: one small record for each document, then which split and bucket each goes to.

Documents are ordered by a hash of their content keyed by the seed, so the order is random, and the same for
any naming, splitting or order of the input files; equal documents are neighbours in it.
"""

import hashlib
import itertools
import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from alma.errors import UserError
from alma.files import atomic_write, write_json_atomic
from alma.stream import KEY_BYTES
from data_prep.documents import Reader, Skipped, Unit

RECORD = np.dtype([("high", ">u8"), ("low", ">u8"), ("second", ">u8"), ("words", "<u4"), ("source", "<u2")])
_REST = struct.Struct("<IH")
"""A document: content key (128 bits), the second hash (order of validation), words, number of the source."""

BUCKET_WORDS = 10_000_000
"""Words a bucket of documents aims at (some 60 MB of text, which one worker holds in memory)."""

LEFT_OUT = -1
PLAN = "plan.npz"
FINISHED = "stream"
"""The folder of a work directory for finished files, laid out as the stream."""

_BLOCK = 1 << 16  # documents whose records are written at once


@dataclass(frozen=True)
class Job:
    """What every unit of work must know."""

    work: Path
    seed: int
    reader: Reader
    sources: tuple[str, ...]
    """Names in alphabetical order; a document found in several sources counts for the first."""

    @property
    def finished(self) -> Path:
        """The folder for finished files."""
        return self.work / FINISHED

    def file(self, name: str, number: int, suffix: str) -> Path:
        """The file of a unit of work."""
        return self.work / f"{name}-{number:05d}.{suffix}"


@dataclass(frozen=True)
class Wanted:
    """Sizes asked for, in words."""

    mega_batches: int
    words: int
    eval_words: int
    """0: there is no evaluation mega-batch to make, the stream has one; so with `valid_words`."""
    valid_words: int
    valid_source: str | None
    first: int = 0
    """Number of the first mega-batch."""

    @property
    def names(self) -> list[str]:
        """The splits in the order of their numbers."""
        names = [f"megabatch_{self.first + t:02d}" for t in range(self.mega_batches)]
        return names + ["test"] * bool(self.eval_words) + ["valid"] * bool(self.valid_words)


@dataclass(frozen=True)
class Plan:
    """Where each scanned document goes."""

    bucket_split: np.ndarray
    """(buckets,) number of the split of each bucket; buckets of a split follow the hash order."""
    bucket_words: np.ndarray
    bucket_documents: np.ndarray
    bucket_keys: np.ndarray
    """(buckets,) uint64: sum of the low halves of the content keys."""
    source_words: np.ndarray
    """(splits, sources)"""
    duplicate_documents: int
    """Of an earlier document of the corpus, or of one that the stream has."""
    duplicate_words: int
    documents: int
    """Of the corpus."""
    words: int
    longest: int
    """Words of the longest document."""

    def buckets(self, split: int) -> list[int]:
        """The buckets of a split, in the order of the hash."""
        return np.flatnonzero(self.bucket_split == split).tolist()


def content_key(text: bytes, seed: int) -> bytes:
    """24 bytes: the content key (16) and the second hash (8) of a document."""
    return hashlib.blake2b(text, digest_size=24, key=(seed % 2**64).to_bytes(8)).digest()


def scan_unit(job: Job, number: int, unit: Unit) -> None:
    """Write the records of a unit's documents, in reading order, and what was skipped."""
    ids = {name: index for index, name in enumerate(job.sources)}
    skipped: list[Skipped] = []
    block: list[bytes] = []
    with atomic_write(job.file("scan", number, "bin"), "wb") as file:
        for source, text, words in job.reader.read(unit, skipped.append):
            block.append(content_key(text.encode(), job.seed) + _REST.pack(words, ids[source]))
            if len(block) == _BLOCK:
                file.write(b"".join(block))
                block.clear()
        file.write(b"".join(block))
        if skipped:  # before the records, which say that the unit is done
            write_json_atomic(job.file("skipped", number, "json"), skipped)


def scanned(job: Job, number: int) -> np.ndarray:
    """The records of a unit, memory-mapped."""
    path = job.file("scan", number, "bin")
    return np.memmap(path, RECORD, "r") if path.stat().st_size else np.zeros(0, RECORD)


def skips(job: Job, units: int) -> Iterator[Skipped]:
    """What was skipped in all units."""
    for number in range(units):
        path = job.file("skipped", number, "json")
        if path.exists():
            yield from (Skipped(*each) for each in json.loads(path.read_bytes()))


def plan_corpus(job: Job, wanted: Wanted, units: int, known: list[Path]) -> None:
    """Write the bucket of each document of the scan, then the plan; `known`: .keys files of the stream.

    UserError: no documents, or what `assign_splits` raises.
    """
    old = sum(path.stat().st_size for path in known) // KEY_BYTES
    records = np.zeros(old + first_documents(job, units)[-1], RECORD)
    position = 0
    for path in known:
        keys = np.fromfile(path, ">u8").reshape(-1, 2)
        rows = records[position : position + len(keys)]
        rows["high"], rows["low"] = keys.T
        position += len(keys)
    for number in range(units):
        rows = scanned(job, number)
        records[position : position + len(rows)] = rows
        position += len(rows)
    if position == old:
        raise UserError("the corpus has no documents: every file is empty or blank")
    bucket, plan = make_plan(records, wanted, job.sources, old)
    with atomic_write(job.work / "bucket.npy", "wb") as file:
        np.save(file, bucket)
    with atomic_write(job.work / PLAN, "wb") as file:
        np.savez(file, **{field.name: getattr(plan, field.name) for field in fields(plan)})


def first_documents(job: Job, units: int) -> list[int]:
    """The number of the first document of each unit, and how many there are in all (units + 1,)."""
    sizes = (job.file("scan", number, "bin").stat().st_size for number in range(units))
    return list(itertools.accumulate((size // RECORD.itemsize for size in sizes), initial=0))


def source_totals(job: Job, units: int) -> np.ndarray:
    """Documents and words of each source in the scan (sources, 2)."""
    totals = np.zeros((2, len(job.sources)), np.int64)
    for number in range(units):
        rows = scanned(job, number)
        totals[0] += np.bincount(rows["source"], minlength=len(job.sources))
        totals[1] += np.bincount(rows["source"], rows["words"], len(job.sources)).astype(np.int64)
    return totals.T


def load_plan(job: Job) -> Plan:
    """What `plan_corpus` wrote."""
    with np.load(job.work / PLAN) as arrays:
        values: dict[str, Any] = {
            name: arrays[name] if arrays[name].ndim else int(arrays[name]) for name in arrays
        }
    return Plan(**values)


def assign_splits(
    records: np.ndarray, wanted: Wanted, sources: tuple[str, ...], known: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """The split of each document (LEFT_OUT for duplicates and surplus), and which are new, in hash order.

    The first `known` records are of documents that the stream has; theirs is LEFT_OUT. The running word
    count of the hash order is cut at the document nearest to each multiple of `wanted.words`, so every cut
    is within half a document of its target. UserError: too few words, or a split that would be empty because
    documents are too long.
    """
    kept = _without_duplicates(records)
    kept = kept[kept >= known]
    _require_words(records[known:], kept - known, wanted, sources)
    split = np.full(len(records), LEFT_OUT, np.int16)
    if wanted.valid_words:
        candidates = _of_source(records, kept, wanted, sources)
        candidates = candidates[np.argsort(records["second"][candidates], kind="stable")]
        (end,) = _cuts(records["words"][candidates], np.array([wanted.valid_words]))
        split[candidates[:end]] = len(wanted.names) - 1

    pool = kept[split[kept] == LEFT_OUT]
    sizes = [wanted.words] * wanted.mega_batches + [wanted.eval_words] * bool(wanted.eval_words)
    targets = np.cumsum(sizes)
    left = int(records["words"][pool].sum(dtype=np.int64))
    if targets[-1] - left > (records["words"][pool[-1]] / 2 if len(pool) else 0):
        raise UserError(  # validation took more than its words, by up to half a document
            f"{left:,} words are left after validation, {int(targets[-1]):,} are needed: ask for fewer "
            "words, split long documents with --max-document-words, or add text"
        )
    ends = _cuts(records["words"][pool], targets)
    split[pool[: ends[-1]]] = np.repeat(np.arange(len(ends)), np.diff(ends, prepend=0))
    counts = np.bincount(split[split >= 0], minlength=len(wanted.names))
    if not counts.all():
        raise UserError(
            f"{wanted.names[int(np.argmin(counts))]} would be empty: the longest document has "
            f"{int(records['words'].max()):,} words; ask for more words or split long documents with "
            "--max-document-words"
        )
    return split, kept


def _without_duplicates(records: np.ndarray) -> np.ndarray:
    """The documents in hash order; of equal ones the first of the first source."""
    high = records["high"].astype(np.uint64)
    order = np.argsort(high)
    high = high[order]
    equal = np.flatnonzero(high[1:] == high[:-1])
    places = np.union1d(equal, equal + 1)
    members = order[places]
    high, low = high[places], records["low"][members].astype(np.uint64)
    ranks = np.lexsort((members, records["source"][members], low, high))
    order[places] = members[ranks]
    high, low = high[ranks], low[ranks]
    first = np.ones(len(order), bool)
    first[places[1:]] = (high[1:] != high[:-1]) | (low[1:] != low[:-1])
    return order[first]


def make_plan(
    records: np.ndarray, wanted: Wanted, sources: tuple[str, ...], known: int = 0
) -> tuple[np.ndarray, Plan]:
    """Assign splits and cut each into buckets of about BUCKET_WORDS, monotone in the hash order.

    Returns the number of each document's bucket (documents,) int32, or LEFT_OUT, and the plan. Memory: less
    than 80 bytes a record, the record's 30 counted.
    """
    split, kept = assign_splits(records, wanted, sources, known)
    bucket = np.full(len(records), LEFT_OUT, np.int32)
    of_split: list[np.ndarray] = []  # each of its buckets, and so on
    words_of, documents_of, keys_of, source_words = [], [], [], []
    buckets = 0
    for number in range(len(wanted.names)):
        own = kept[split[kept] == number]
        words = records["words"][own].astype(np.int64)
        place = (np.cumsum(words) - words) // BUCKET_WORDS
        starts = np.flatnonzero(np.diff(place, prepend=-1))
        documents = np.diff(starts, append=len(own))
        bucket[own] = np.repeat(np.arange(buckets, buckets + len(starts)), documents)
        buckets += len(starts)
        of_split.append(np.full(len(starts), number))
        words_of.append(np.add.reduceat(words, starts))
        documents_of.append(documents)
        keys_of.append(np.add.reduceat(records["low"][own].astype(np.uint64), starts))
        source_words.append([int(words[records["source"][own] == k].sum()) for k in range(len(sources))])
    read = int(records["words"].sum(dtype=np.int64))
    return bucket[known:], Plan(
        bucket_split=np.concatenate(of_split),
        bucket_words=np.concatenate(words_of),
        bucket_documents=np.concatenate(documents_of),
        bucket_keys=np.concatenate(keys_of),
        source_words=np.array(source_words),
        duplicate_documents=len(records) - known - len(kept),
        duplicate_words=read - int(records["words"][kept].sum(dtype=np.int64)),
        documents=len(records) - known,
        words=read,
        longest=int(records["words"][known:].max()),
    )


def _cuts(words: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """How many documents to take so that the running word count is nearest to each target (ties: fewer)."""
    running = np.concatenate([[0], np.cumsum(words, dtype=np.int64)])
    above = np.minimum(np.searchsorted(running, targets), len(words))
    below = np.maximum(above - 1, 0)
    return np.where(targets - running[below] <= running[above] - targets, below, above)


def _of_source(records: np.ndarray, kept: np.ndarray, wanted: Wanted, sources: tuple[str, ...]) -> np.ndarray:
    assert wanted.valid_source is not None
    return kept[records["source"][kept] == sources.index(wanted.valid_source)]


def _require_words(records: np.ndarray, kept: np.ndarray, wanted: Wanted, sources: tuple[str, ...]) -> None:
    total = int(records["words"][kept].sum(dtype=np.int64))
    asked = wanted.mega_batches * wanted.words + wanted.eval_words + wanted.valid_words
    dropped = f"after dropping {len(records) - len(kept):,} duplicates"
    if total < asked:
        parts = f"{wanted.mega_batches} x {wanted.words:,}"
        if wanted.eval_words or wanted.valid_words:
            parts += f" + {wanted.eval_words:,} evaluation + {wanted.valid_words:,} validation"
        raise UserError(
            f"the corpus has {total:,} words in {len(kept):,} documents {dropped}, but {parts} = {asked:,} "
            f"are asked for: {asked - total:,} words are missing; add text or ask for fewer"
        )
    if not wanted.valid_words:
        return
    of_source = int(records["words"][_of_source(records, kept, wanted, sources)].sum(dtype=np.int64))
    if of_source < wanted.valid_words:
        raise UserError(
            f"source {wanted.valid_source} has {of_source:,} words {dropped}, but --valid-words is "
            f"{wanted.valid_words:,}: {wanted.valid_words - of_source:,} words are missing; choose another "
            "--valid-source or ask for fewer"
        )


def corpus_summary(plan: Plan, wanted: Wanted) -> dict[str, Any]:
    """Totals of the corpus and the spread (max - min, over `wanted.words`) of the mega-batches' words."""
    split_words = plan.source_words.sum(1)[: wanted.mega_batches]
    return {
        "documents": plan.documents,
        "words": plan.words,
        "duplicate_documents": plan.duplicate_documents,
        "duplicate_words": plan.duplicate_words,
        "surplus_words": plan.words - plan.duplicate_words - int(plan.source_words.sum()),
        "spread": float((split_words.max() - split_words.min()) / wanted.words),
        "longest_document": plan.longest,
    }
