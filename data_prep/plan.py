"""Stage plan: the split and the bucket of every document.

Reads the records of all shards (scan-NNNNN.bin) and, when appending, the .keys of the stream. Writes

    bucket.npy   (documents,) int32: number of the bucket of each document, or LEFT_OUT
    plan.npz     the CorpusPlan, which says what every bucket holds

A split is a mega-batch, `test` or `valid`; order.py has those of an ordered stream. Its buckets follow the
order of content keys, so their concatenation is in random order.
"""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from alma.errors import UserError
from alma.files import atomic_write
from alma.stream import KEY_BYTES
from data_prep.scan import RECORD, first_documents, scanned
from data_prep.work import Workspace

BUCKET_WORDS = 10_000_000
"""Target size of a bucket in words: about 60 MB of text, which one worker holds in memory."""

LEFT_OUT = -1
PLAN = "plan.npz"
BUCKETS = "bucket.npy"


@dataclass(frozen=True)
class Wanted:
    """Requested sizes in words."""

    mega_batches: int
    words: int
    """Of each training mega-batch."""
    eval_words: int
    """Of the evaluation mega-batch; 0 when appending, as the stream has one. So is `valid_words`."""
    valid_words: int
    valid_source: str | None
    first: int = 0
    """Number of the first mega-batch."""

    @property
    def names(self) -> list[str]:
        """The splits in the order of their numbers."""
        names = [f"megabatch_{self.first + t:02d}" for t in range(self.mega_batches)]
        if self.eval_words:
            names.append("test")
        if self.valid_words:
            names.append("valid")
        return names

    @property
    def parts(self) -> dict[str, list[int]]:
        """The parts of the stream in the order of stream.json, with the numbers of their splits."""
        return {name: [number] for number, name in enumerate(self.names)}

    def rank(self, source: str) -> tuple[int, str]:
        """Sorts the sources; a document found in several counts for the first."""
        return 0, source

    def assign(
        self, records: np.ndarray, sources: tuple[str, ...], known: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """See `assign_splits`."""
        return assign_splits(records, self, sources, known)


@dataclass(frozen=True)
class CorpusPlan:
    """Where each scanned document goes."""

    bucket_split: np.ndarray
    """(buckets,) number of the split of each bucket; buckets of a split follow the hash order."""
    bucket_words: np.ndarray
    bucket_documents: np.ndarray
    bucket_keys: np.ndarray
    """(buckets,) uint64: sum of the low halves of the content keys, modulo 2**64."""
    source_words: np.ndarray
    """(splits, sources)"""
    duplicate_documents: int
    """Copies of another document of the corpus or of the stream."""
    duplicate_words: int
    documents: int
    """In the corpus, duplicates included."""
    words: int
    longest: int
    """Words of the longest document."""

    def buckets(self, split: int) -> list[int]:
        """The buckets of a split, in hash order."""
        return np.flatnonzero(self.bucket_split == split).tolist()


def plan_corpus(space: Workspace, wanted: Wanted, shards: int, known: list[Path]) -> None:
    """Write the plan; `known`: .keys files of the documents that the stream has.

    UserError: an empty corpus, or an error of `assign_splits`.
    """
    old = sum(path.stat().st_size for path in known) // KEY_BYTES
    records = np.zeros(old + first_documents(space, shards)[-1], RECORD)
    position = 0
    for path in known:
        keys = np.fromfile(path, ">u8").reshape(-1, 2)
        rows = records[position : position + len(keys)]
        rows["high"], rows["low"] = keys.T
        position += len(keys)
    for number in range(shards):
        rows = scanned(space, number)
        records[position : position + len(rows)] = rows
        position += len(rows)
    if position == old:
        raise UserError("the corpus has no documents: every file is empty or blank")
    bucket, plan = make_plan(records, wanted, space.sources, old)
    with atomic_write(space.directory / BUCKETS, "wb") as file:
        np.save(file, bucket)
    with atomic_write(space.directory / PLAN, "wb") as file:
        np.savez(file, **{field.name: getattr(plan, field.name) for field in fields(plan)})


def load_plan(space: Workspace) -> CorpusPlan:
    """Read plan.npz."""
    with np.load(space.directory / PLAN) as arrays:
        values: dict[str, Any] = {
            name: arrays[name] if arrays[name].ndim else int(arrays[name]) for name in arrays
        }
    return CorpusPlan(**values)


def assign_splits(
    records: np.ndarray, wanted: Wanted, sources: tuple[str, ...], known: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """The split of each document, and the new documents in hash order.

    Duplicates, surplus documents and the first `known` records, which the stream has, are LEFT_OUT.
    Validation takes documents of its source in the order of the second hash. The others are cut in hash
    order, each time at the document nearest to a multiple of `wanted.words`, so every cut is within half a
    document of its target.

    Returns (documents,) int16 numbers of splits and (new,) indices of records. UserError: too few words, or
    a split is empty because documents are too long.
    """
    order, first = hash_order(records)
    kept = order[first]
    kept = kept[kept >= known]
    _require_words(records[known:], kept - known, wanted, sources)
    split = np.full(len(records), LEFT_OUT, np.int16)
    if wanted.valid_words:
        candidates = _of_source(records, kept, wanted, sources)
        candidates = candidates[np.argsort(records["second"][candidates], kind="stable")]
        (end,) = cuts(records["words"][candidates], np.array([wanted.valid_words]))
        split[candidates[:end]] = len(wanted.names) - 1

    pool = kept[split[kept] == LEFT_OUT]
    sizes = [wanted.words] * wanted.mega_batches
    if wanted.eval_words:
        sizes.append(wanted.eval_words)
    targets = np.cumsum(sizes)
    left = int(records["words"][pool].sum(dtype=np.int64))
    # Validation may exceed its words by half a document.
    if targets[-1] - left > (records["words"][pool[-1]] / 2 if len(pool) else 0):
        raise UserError(
            f"{left:,} words are left after validation, {int(targets[-1]):,} are needed: ask for fewer "
            "words, split long documents with --max-document-words, or add text"
        )
    ends = cuts(records["words"][pool], targets)
    split[pool[: ends[-1]]] = np.repeat(np.arange(len(ends)), np.diff(ends, prepend=0))
    counts = np.bincount(split[split >= 0], minlength=len(wanted.names))
    if not counts.all():
        raise UserError(
            f"{wanted.names[int(np.argmin(counts))]} would be empty: the longest document has "
            f"{int(records['words'].max()):,} words; ask for more words or split long documents with "
            "--max-document-words"
        )
    return split, kept


def hash_order(records: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Indices of the documents in hash order, equal ones by source; which are the first of equal ones (bool).

    Only documents with equal upper halves of the key are compared further: they are few.
    """
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
    return order, first


def make_plan(
    records: np.ndarray, wanted: Wanted, sources: tuple[str, ...], known: int = 0
) -> tuple[np.ndarray, CorpusPlan]:
    """Assign splits and cut each into buckets of about BUCKET_WORDS words, in hash order.

    Returns the bucket of each document of the corpus, (documents,) int32, or LEFT_OUT, and the plan. Peak
    memory: less than 80 bytes per record, the 30 of the record included.
    """
    split, kept = wanted.assign(records, sources, known)
    bucket = np.full(len(records), LEFT_OUT, np.int32)
    split_of, words_of, documents_of, keys_of, source_words = [], [], [], [], []
    buckets = 0
    for number in range(len(wanted.names)):
        own = kept[split[kept] == number]
        words = records["words"][own].astype(np.int64)
        place = (np.cumsum(words) - words) // BUCKET_WORDS
        starts = np.flatnonzero(np.diff(place, prepend=-1))
        documents = np.diff(starts, append=len(own))
        bucket[own] = np.repeat(np.arange(buckets, buckets + len(starts)), documents)
        buckets += len(starts)
        split_of.append(np.full(len(starts), number))
        words_of.append(np.add.reduceat(words, starts))
        documents_of.append(documents)
        keys_of.append(np.add.reduceat(records["low"][own].astype(np.uint64), starts))
        source_words.append([int(words[records["source"][own] == k].sum()) for k in range(len(sources))])
    read = int(records["words"].sum(dtype=np.int64))
    return bucket[known:], CorpusPlan(
        bucket_split=np.concatenate(split_of),
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


def cuts(words: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Number of documents whose words add up to the nearest of each target (the fewer of two)."""
    running = np.concatenate([[0], np.cumsum(words, dtype=np.int64)])
    above = np.minimum(np.searchsorted(running, targets), len(words))
    below = np.maximum(above - 1, 0)
    return np.where(targets - running[below] <= running[above] - targets, below, above)


def _of_source(records: np.ndarray, kept: np.ndarray, wanted: Wanted, sources: tuple[str, ...]) -> np.ndarray:
    assert wanted.valid_source is not None
    return kept[records["source"][kept] == sources.index(wanted.valid_source)]


def _require_words(records: np.ndarray, kept: np.ndarray, wanted: Wanted, sources: tuple[str, ...]) -> None:
    total = int(records["words"][kept].sum(dtype=np.int64))
    needed = wanted.mega_batches * wanted.words + wanted.eval_words + wanted.valid_words
    dropped = f"after dropping {len(records) - len(kept):,} duplicates"
    if total < needed:
        parts = f"{wanted.mega_batches} x {wanted.words:,}"
        if wanted.eval_words or wanted.valid_words:
            parts += f" + {wanted.eval_words:,} evaluation + {wanted.valid_words:,} validation"
        raise UserError(
            f"the corpus has {total:,} words in {len(kept):,} documents {dropped}, but {parts} = {needed:,} "
            f"are needed: {needed - total:,} words are missing; add text or ask for fewer"
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
