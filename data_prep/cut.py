"""Stage cut: where the splits end, in the hash order of the documents.

Reads the sums of all ranges, and the documents of those few ranges in which a split ends. Writes

    cut.npz   the Cut

A split is a mega-batch, `test` or `valid`; order.py has those of an ordered stream. Splits are cut from
pools. A pool is a list of documents in hash order: in an ordered stream those that a mega-batch can take,
else those of the validation set, or all others.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np

from alma.errors import UserError
from alma.files import atomic_write
from alma.stream import KEY_BYTES
from data_prep.ranges import distinct, load_sums, sorted_records
from data_prep.scan import RECORD, content_keys
from data_prep.work import Workspace, mapped, mapped_array, read_arrays

LEFT_OUT = -1
CUT = "cut.npz"
_VALID = 1  # pool of the validation set

Record = TypeVar("Record")


class Piece(NamedTuple):
    """A split, or a part of it: the documents of a pool from the end of the piece before."""

    pool: int
    split: int
    end: int
    """Documents of the pool up to the end of the piece."""


class Pool:
    """The documents of a pool in hash order, known by their sums in each range; opens the range of a cut."""

    def __init__(self, sums: np.ndarray, opened: Callable[[int], np.ndarray]) -> None:
        """`sums`: (ranges, 2) documents and words. `opened(number)`: the records in a range."""
        self._until = np.concatenate([np.zeros((1, 2), np.int64), np.cumsum(sums, 0, dtype=np.int64)])
        self.before = self._until[:-1, 1]
        """(ranges,) words before each range."""
        self.documents, self.words = self._until[-1].tolist()
        self._opened = functools.lru_cache(maxsize=1)(opened)

    def cuts(self, targets: Sequence[int]) -> list[int]:
        """Number of documents whose words add up to the nearest of each target (the fewer of two)."""
        return [self._cut(target) for target in targets]

    def _cut(self, target: int) -> int:
        if target >= self.words:
            return self.documents
        number = int(np.searchsorted(self._until[1:, 1], target))
        documents, words = self._until[number].tolist()
        return documents + nearest(self._opened(number)["words"], target - words)

    def at(self, documents: int) -> tuple[bytes, int]:
        """Content key of the last of the first `documents`, and the sum of their words."""
        number = int(np.searchsorted(self._until[1:, 0], documents))
        before, words = self._until[number].tolist()
        rows = self._opened(number)[: documents - before]
        return content_keys(rows[-1:]).tobytes(), words + int(rows["words"].sum(dtype=np.int64))

    def longest(self) -> int:
        """Words of the longest document. Opens all ranges."""
        return max(int(self._opened(number)["words"].max(initial=0)) for number in range(len(self.before)))


def nearest(words: np.ndarray, target: int) -> int:
    """Number of documents whose words add up to the nearest of the target (the fewer of two)."""
    running = np.concatenate([[0], np.cumsum(words, dtype=np.int64)])
    above = min(int(np.searchsorted(running, target)), len(words))
    below = max(above - 1, 0)
    return below if target - running[below] <= running[above] - target else above


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

    @property
    def pools(self) -> list[int]:
        """The pool of each split."""
        return [_VALID if name == "valid" else 0 for name in self.names]

    def rank(self, source: str) -> tuple[int, str]:
        """Sorts the sources; a document found in several counts for the first."""
        return 0, source

    def arrivals(self, sources: Sequence[str]) -> np.ndarray:
        """(sources,) the pool of the documents of each source, but for validation."""
        return np.array([self.rank(source)[0] for source in sources])

    def cut(self, corpus: "SortedCorpus") -> tuple[list[Pool], list[Piece]]:
        """Make the pools and cut them.

        Validation takes documents of its source in the order of the second hash. The others are cut in hash
        order, each time at the document nearest to a multiple of `words`, so every cut is within half a
        document of its target. UserError: too few words, or a split is empty because documents are too long.
        """
        _require_words(corpus, self)
        if self.valid_words:
            corpus.select_validation(self.valid_words)
        pool, *validation = pools = [corpus.pool(number) for number in range(1 + max(self.pools))]
        sizes = [self.words] * self.mega_batches + ([self.eval_words] if self.eval_words else [])
        targets = np.cumsum(sizes).tolist()
        missing = targets[-1] - pool.words
        # Validation may exceed its words by half a document.
        if missing > 0 and missing > (pool.words - pool.at(max(pool.documents - 1, 0))[1]) / 2:
            raise UserError(
                f"{pool.words:,} words are left after validation, {targets[-1]:,} are needed: ask for fewer "
                "words, split long documents with --max-document-words, or add text"
            )
        ends = pool.cuts(targets)
        counts = [*np.diff(ends, prepend=0).tolist(), *(each.documents for each in validation)]
        if not all(counts):
            raise UserError(
                f"{self.names[int(np.argmin(counts))]} would be empty: the longest document has "
                f"{corpus.longest:,} words; ask for more words or split long documents with "
                "--max-document-words"
            )
        pieces = [Piece(0, split, end) for split, end in enumerate(ends)]
        return pools, pieces + [Piece(_VALID, len(ends), each.documents) for each in validation]


def _require_words(corpus: "SortedCorpus", wanted: Wanted) -> None:
    documents, total = corpus.first.sum((0, 2)).tolist()
    needed = wanted.mega_batches * wanted.words + wanted.eval_words + wanted.valid_words
    dropped = f"after dropping {int(corpus.read[:, 0].sum()) - documents:,} duplicates"
    if total < needed:
        parts = f"{wanted.mega_batches} x {wanted.words:,}"
        if wanted.eval_words or wanted.valid_words:
            parts += f" + {wanted.eval_words:,} evaluation + {wanted.valid_words:,} validation"
        raise UserError(
            f"the corpus has {total:,} words in {documents:,} documents {dropped}, but {parts} = {needed:,} "
            f"are needed: {needed - total:,} words are missing; add text or ask for fewer"
        )
    if not wanted.valid_words:
        return
    assert wanted.valid_source is not None
    of_source = int(corpus.first[:, 1, corpus.sources.index(wanted.valid_source)].sum())
    if of_source < wanted.valid_words:
        raise UserError(
            f"source {wanted.valid_source} has {of_source:,} words {dropped}, but --valid-words is "
            f"{wanted.valid_words:,}: {wanted.valid_words - of_source:,} words are missing; choose another "
            "--valid-source or ask for fewer"
        )


class SortedCorpus:
    """The sorted ranges of a corpus, and the pools made of them."""

    def __init__(self, space: Workspace, wanted: Wanted, ranges: int) -> None:
        self.sources = space.sources
        sums = load_sums(space, ranges)
        self.read, self.first = sums["read"], sums["first"]
        """(ranges, 2, sources) documents and words, see `sort_range`."""
        self.longest = int(sums["longest"].max())
        """Words of the longest document."""
        self.arrivals = wanted.arrivals(space.sources)
        pools = range(1 + max(wanted.pools))
        self.taken = np.zeros(len(pools), f"S{KEY_BYTES}")
        """(pools,) content key of the last document that each mega-batch of an ordered stream takes."""
        self.valid_last = np.zeros(0, RECORD)
        """The last document of validation in the order of the second hash, or none."""
        self._sums = np.stack([self.first[:, :, self.arrivals == pool].sum(2) for pool in pools])
        self._space, self._wanted, self._ranges = space, wanted, range(ranges)

    def pool(self, pool: int) -> Pool:
        """Make a pool. It has no documents that earlier ones have `taken`."""

        def opened(number: int) -> np.ndarray:
            records = sorted_records(self._space, number)
            return records[self._placed(records) == pool]

        if pool:
            self._sums[pool] += [self._again(number, pool) for number in self._ranges]
        return Pool(self._sums[pool], opened)

    def _again(self, number: int, pool: int) -> list[int]:
        """Documents and words of a range that earlier pools have too and have left to this one."""
        records = mapped(self._space.file("again", number, "bin"), RECORD)
        first, _ = distinct(records, self.arrivals)
        words = records["words"][~first & (self._placed(records) == pool)]
        return [len(words), int(words.sum(dtype=np.int64))]

    def _placed(self, records: np.ndarray) -> np.ndarray:
        return placed(records, self._wanted, self.sources, self.taken, self.valid_last)

    def select_validation(self, target: int) -> None:
        """Take the documents of the validation source with the smallest second hashes for validation."""

        def listed(number: int) -> np.ndarray:
            # mapped anew each time: the pages that a search touches count as memory of this process
            return mapped_array(self._space.file("valid", number, "npy"))

        def until(second: int, side: Literal["left", "right"]) -> np.ndarray:
            """(ranges, 2) documents up to a second hash, and their words."""
            found = []
            for number in self._ranges:
                hashes, words, _ = listed(number)
                end = int(np.searchsorted(hashes, np.uint64(second), side))
                found.append((end, int(words[end - 1]) if end else 0))
            return np.array(found)

        def records(number: int, start: int, end: int) -> np.ndarray:
            return sorted_records(self._space, number)[listed(number)[2, start:end].astype(np.int64)]

        low, high = 0, 2**64 - 1
        while low < high:  # the smallest hash up to which the words reach the target
            middle = (low + high) // 2
            low, high = (low, middle) if until(middle, "right")[:, 1].sum() >= target else (middle + 1, high)
        chosen, stops = until(low, "left"), until(low, "right")[:, 0]
        tied = np.flatnonzero(chosen[:, 0] < stops).tolist()  # nearly always one range
        pieces = [records(number, chosen[number, 0], stops[number]) for number in tied]
        left = nearest(np.concatenate(pieces)["words"], target - int(chosen[:, 1].sum()))
        for number, rows in zip(tied, pieces, strict=True):
            taken = rows["words"][:left]
            chosen[number] += len(taken), int(taken.sum())
            left -= len(taken)
        self._sums[_VALID] = chosen
        self._sums[0] -= chosen
        ends = chosen[:, 0]
        if found := [(int(listed(n)[0, ends[n] - 1]), n) for n in self._ranges if ends[n]]:
            number = max(found)[1]
            self.valid_last = records(number, ends[number] - 1, ends[number])


def pools_of(
    records: np.ndarray, wanted: Wanted, sources: tuple[str, ...], valid_last: np.ndarray
) -> np.ndarray:
    """(records,) the pool that each document would be in if it had no copies."""
    pools = wanted.arrivals(sources)[records["source"]]
    if len(valid_last):
        assert wanted.valid_source is not None
        second, last = records["second"], valid_last["second"][0]
        early = (second < last) | ((second == last) & (content_keys(records) <= content_keys(valid_last)[0]))
        pools[early & (records["source"] == sources.index(wanted.valid_source))] = _VALID
    return pools


def placed(
    records: np.ndarray,
    wanted: Wanted,
    sources: tuple[str, ...],
    taken: np.ndarray,
    valid_last: np.ndarray,
) -> np.ndarray:
    """(records,) the pool of each document, or LEFT_OUT: a copy, or taken by an earlier pool.

    `records`: of a range, in hash order. `taken`, `valid_last`: see `SortedCorpus`.
    """
    first, kept = distinct(records, wanted.arrivals(sources))
    pools = np.where(kept, pools_of(records, wanted, sources, valid_last), LEFT_OUT)
    if (kept & ~first).any():  # documents of several mega-batches
        stops = np.searchsorted(content_keys(records), taken, "right")
        takes = kept & (np.arange(len(records)) < stops[pools])
        before: np.ndarray = np.cumsum(takes) - takes
        pools[before > before[first][np.cumsum(first) - 1]] = LEFT_OUT
    return pools


@dataclass(frozen=True)
class Cut:
    """Where the splits end. P pieces, in the hash order of their pools."""

    pool: np.ndarray
    """(P,)"""
    split: np.ndarray
    """(P,)"""
    last: np.ndarray
    """(P,) content key of the last document."""
    start: np.ndarray
    """(P,) words of the pool before the piece."""
    before: np.ndarray
    """(pools, ranges) words of each pool before each range."""
    taken: np.ndarray
    valid_last: np.ndarray
    """See `SortedCorpus`, as `taken`."""
    read: np.ndarray
    """(2,) documents and words of the corpus, copies included."""
    kept: np.ndarray
    """(2,) documents and words of all pools."""
    longest: int
    """Words of the longest document."""


def cut_corpus(space: Workspace, wanted: Wanted, ranges: int) -> None:
    """Write cut.npz. UserError: see `Wanted.cut`."""
    corpus = SortedCorpus(space, wanted, ranges)
    pools, pieces = wanted.cut(corpus)
    begins = [0] * len(pools)
    start, last = [], []
    for pool, _, end in pieces:
        start.append(pools[pool].at(begins[pool])[1])
        last.append(pools[pool].at(end)[0])
        begins[pool] = end
    cut = Cut(
        pool=np.array([piece.pool for piece in pieces]),
        split=np.array([piece.split for piece in pieces]),
        last=np.array(last, f"S{KEY_BYTES}"),
        start=np.array(start),
        before=np.stack([pool.before for pool in pools]),
        taken=corpus.taken,
        valid_last=corpus.valid_last,
        read=corpus.read.sum((0, 2)),
        kept=np.array([[pool.documents, pool.words] for pool in pools]).sum(0),
        longest=corpus.longest,
    )
    save(space.directory / CUT, cut)


def save(path: Path, record: Any) -> None:
    """Write the fields of a dataclass to an .npz."""
    with atomic_write(path, "wb") as file:
        np.savez(file, **{field.name: getattr(record, field.name) for field in fields(record)})


def load(path: Path, kind: type[Record]) -> Record:
    """The inverse of `save`; numbers are ints."""
    arrays = read_arrays(path)
    return kind(**{name: each if each.ndim else int(each) for name, each in arrays.items()})
