"""Stage cut: where the splits end, in the hash order of the documents; opens only ranges in which one ends.

A split is a mega-batch, `test` or `valid`; order.py has those of an ordered stream. Splits are cut from
pools. A pool is a list of documents in hash order: in an ordered stream those that a mega-batch can take,
else those of the validation set, or all others.
"""

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import count, groupby, repeat
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from alma.errors import UserError
from alma.files import atomic_write
from alma.stream import KEY_BYTES
from data_prep.near_duplicates import is_dropped, matching, similar
from data_prep.pools import LEFT_OUT, Pool, Span, cut_document, sizes_of, spans_of, sums_of
from data_prep.ranges import distinct, sorted_records
from data_prep.scan import RECORD, content_keys
from data_prep.work import DOCUMENT_BYTES, Workspace, mapped, read_arrays

CUT = "cut.npz"
_VALID = 1  # pool of the validation set
_REST = 2  # pool of the pieces that the last document of the validation set leaves out

Record = TypeVar("Record")


@dataclass(frozen=True)
class Wanted:
    """Requested sizes in words."""

    mega_batches: int
    words: int  # of each training mega-batch
    eval_words: int
    """Of the evaluation mega-batch; 0 when appending, as the stream has one. So is `valid_words`."""
    valid_words: int
    valid_source: str | None
    first: int = 0  # number of the first mega-batch

    @property
    def names(self) -> list[str]:
        """The splits in the order of their numbers."""
        names = [f"megabatch_{self.first + t:02d}" for t in range(self.mega_batches)]
        return names + ["test"] * bool(self.eval_words) + ["valid"] * bool(self.valid_words)

    @property
    def parts(self) -> dict[str, list[int]]:
        """The parts of the stream in the order of stream.json, with the numbers of their splits."""
        names = self.names
        return {name: [number for number, own in enumerate(names) if own == name] for name in names}

    @property
    def pools(self) -> list[int]:
        """The pool of each split."""
        return [_VALID if name == "valid" else 0 for name in self.names]

    @property
    def pool_count(self) -> int:
        """Number of pools; no split is of the last one of validation."""
        return _REST + 1 if self.valid_words else 1

    def record(self) -> dict[str, Any]:
        """The fields as stream.json keeps them, known before any text is read."""
        return asdict(self)

    def sources(self, names: Iterable[str]) -> tuple[str, ...]:
        """The sources of the corpus in the order of `rank`; `names`: those of its files."""
        return tuple(sorted(set(names), key=self.rank))

    def period(self, part: str) -> str:
        """The period of a part of a dated stream; else empty."""
        return ""

    def rank(self, source: str) -> tuple[int, str]:
        """Sorts the sources; a document found in several counts for the first."""
        return 0, source

    def arrivals(self, sources: Sequence[str]) -> np.ndarray:
        """(sources,) the pool of the documents of each source, but for validation."""
        return np.array([self.rank(source)[0] for source in sources])

    def cut(self, corpus: "SortedCorpus") -> tuple[list[Pool], list[Span]]:
        """Make the pools and cut them.

        Validation takes documents of its source in the order of the second hash. The others are cut in hash
        order, each time near a multiple of `words` (see `Pool.cuts`), so every cut is within half a document
        of its target. UserError: too few words, or a split is empty because documents are too long.
        """
        spare = _spare_words(corpus, self)
        if self.valid_words:
            corpus.select_validation(self.valid_words, spare)
        pools = [corpus.pool(number) for number in range(self.pool_count)]
        pool, validation = pools[0], pools[_VALID:_REST]
        sizes = [self.words] * self.mega_batches + ([self.eval_words] if self.eval_words else [])
        missing = sum(sizes) - pool.words
        # Validation may exceed its words by half a document.
        if missing > 0 and missing > (pool.words - pool.at(max(pool.documents - 1, 0)).words) / 2:
            left = f"{pool.words:,} words are left after validation, {sum(sizes):,} are needed"
            raise UserError(f"{left}: ask for fewer words{corpus.or_split}, or add text")
        spans = spans_of(0, range(len(sizes)), pool.cuts(sizes, -missing))
        counts = [*sizes_of(spans), *(each.documents for each in validation)]
        if min(counts) <= 0:
            raise corpus.empty(self.names[int(np.argmin(counts))])
        return pools, spans + [Span(_VALID, len(sizes), each.documents) for each in validation]


def _spare_words(corpus: "SortedCorpus", wanted: Wanted) -> int:
    """Words that no split needs. UserError: too few words."""
    documents, total, _ = corpus.first.sum((0, 2)).tolist()
    needed = wanted.mega_batches * wanted.words + wanted.eval_words + wanted.valid_words
    dropped = f"after dropping {int(corpus.read[:, 0].sum()) - documents:,} duplicates"
    if total < needed:
        parts = f"{wanted.mega_batches} x {wanted.words:,}"
        if wanted.eval_words or wanted.valid_words:
            parts += f" + {wanted.eval_words:,} evaluation + {wanted.valid_words:,} validation"
        has = f"the corpus has {total:,} words in {documents:,} documents {dropped}"
        missing = f"{parts} = {needed:,} are needed: {needed - total:,} words are missing"
        raise UserError(f"{has}, but {missing}; add text or ask for fewer")
    if wanted.valid_source is not None:
        of_source = int(corpus.first[:, 1, corpus.sources.index(wanted.valid_source)].sum())
        if of_source < wanted.valid_words:
            has = f"source {wanted.valid_source} has {of_source:,} words {dropped}"
            asked = f"--valid-words is {wanted.valid_words:,}"
            missing = f"{wanted.valid_words - of_source:,} words are missing"
            remedy = "choose another --valid-source or ask for fewer"
            raise UserError(f"{has}, but {asked}: {missing}; {remedy}")
    return total - needed


class SortedCorpus:
    """The sorted ranges of a corpus, and the pools made of them."""

    def __init__(self, space: Workspace, wanted: Wanted, ranges: int) -> None:
        self.sources = space.sources
        sums = [read_arrays(space.file("sums", number, "npz")) for number in range(ranges)]
        self.read, self.first = (np.stack([each[name] for each in sums]) for name in ("read", "first"))
        """(ranges, 3, sources) documents, words and bytes, see `sort_range`."""
        self.longest, self.whole = (max(int(each[name]) for each in sums) for name in ("longest", "whole"))
        """Words of the longest document, and with all pieces."""
        split = " or split long documents with --max-document-words"
        self.or_split = "" if space.reader.max_document_words else split
        self.arrivals = wanted.arrivals(space.sources)
        pools = range(wanted.pool_count)
        self.taken = np.zeros(len(pools), f"S{KEY_BYTES}")
        """(pools,) content key of the last document that each mega-batch of an ordered stream takes."""
        self.valid_last = np.zeros(0, RECORD)
        """The last document of validation in the order of the second hash, or none."""
        self._sums = np.stack([self.first[:, :, self.arrivals == pool].sum(2) for pool in pools])
        self._space, self._wanted, self._ranges = space, wanted, range(ranges)

    def empty(self, part: str) -> UserError:
        """The error of a part that no document fits into."""
        why = f"the longest document has {self.whole:,} words"
        return UserError(f"{part} would be empty: {why}; ask for more words{self.or_split}")

    def pool(self, pool: int) -> Pool:
        """Make a pool. It has no documents that earlier ones have `taken`."""

        def opened(number: int) -> np.ndarray:
            records = sorted_records(self._space, number)
            return records[placed(records, self._space, number, self._wanted, self) == pool]

        for number in self._ranges if pool else ():  # earlier pools have left some of theirs to this one
            records = mapped(self._space.file("again", number, "bin"), RECORD)
            first, _ = distinct(records, self.arrivals)
            batches = self._wanted.first + self.arrivals[records["source"]]
            undecided = ~first | matching(content_keys(records), batches, similar(self._space, number))
            pools = placed(records, self._space, number, self._wanted, self)
            self._sums[pool, number] += sums_of(records[undecided & (pools == pool)])
        return Pool(self._sums[pool], opened)

    def select_validation(self, target: int, spare: int) -> None:
        """Take the documents of the validation source with the smallest second hashes for validation.

        The rest of the last document is left out if it has at most `spare` words, see `cut_document`.
        """
        files = [mapped(self._space.file("valid", number, "bin"), RECORD) for number in self._ranges]
        rows = (zip(file["second"], repeat(number), count()) for number, file in enumerate(files))
        left = target
        for _, tied in groupby(heapq.merge(*rows), key=itemgetter(0)):  # a document, nearly always
            found = [(number, files[number][row : row + 1]) for _, number, row in tied]
            records = np.concatenate([record for _, record in found])
            words = int(records["words"].sum())
            end = stop = len(found)
            if words >= left:
                end, stop = cut_document(records, left, spare)
            for place, (number, record) in enumerate(found[:stop]):
                self._sums[_VALID if place < end else _REST, number] += sums_of(record)
            self.valid_last = found[end - 1][1] if end else self.valid_last
            left -= words
            if left <= 0:
                break
        self._sums[0] -= self._sums[_VALID] + self._sums[_REST]


def pools_of(
    records: np.ndarray, wanted: Wanted, sources: tuple[str, ...], valid_last: np.ndarray
) -> np.ndarray:
    """(records,) the pool that each document would be in if it had no copies."""
    pools = wanted.arrivals(sources)[records["source"]]
    if len(valid_last):
        assert wanted.valid_source is not None
        second, last = records["second"], valid_last["second"][0]
        keys, end = content_keys(records), content_keys(valid_last).tobytes()
        early = (second < last) | ((second == last) & (keys <= end))
        rest = (keys > end) & (keys <= end[:DOCUMENT_BYTES].ljust(KEY_BYTES, b"\xff"))
        own = records["source"] == sources.index(wanted.valid_source)
        pools[own & early], pools[own & rest] = _VALID, _REST
    return pools


def placed(
    records: np.ndarray, space: Workspace, number: int, wanted: Wanted, ends: "SortedCorpus | Cut"
) -> np.ndarray:
    """(records,) the pool of each document, or LEFT_OUT: a copy, or taken by an earlier pool.

    `records`: of range `number`, in hash order. `ends`: where the pools end, as far as they are cut.
    """
    first, kept = distinct(records, wanted.arrivals(space.sources))
    kept &= ~near_copies(records, space, number, wanted, ends)
    pools = np.where(kept, pools_of(records, wanted, space.sources, ends.valid_last), LEFT_OUT)
    if (kept & ~first).any():  # documents of several mega-batches
        stops = np.searchsorted(content_keys(records), ends.taken, "right")
        takes = kept & (np.arange(len(records)) < stops[pools])
        before: np.ndarray = np.cumsum(takes) - takes
        pools[before > before[first][np.cumsum(first) - 1]] = LEFT_OUT
    return pools


def near_copies(
    records: np.ndarray, space: Workspace, number: int, wanted: Wanted, ends: "SortedCorpus | Cut"
) -> np.ndarray:
    """(records,) whether each is dropped as a near duplicate; arguments as of `placed`."""
    near = similar(space, number)
    batches = wanted.first + wanted.arrivals(space.sources)[records["source"]]
    return matching(content_keys(records), batches, near[is_dropped(near, wanted.first, ends.taken)])


@dataclass(frozen=True)
class Cut:
    """Where the splits end. P spans, in the hash order of their pools."""

    pool: np.ndarray  # (P,)
    split: np.ndarray  # (P,)
    last: np.ndarray  # (P,) content key of the last document
    start: np.ndarray  # (P,) bytes of the pool before the span
    before: np.ndarray  # (pools, ranges) bytes of each pool before each range
    taken: np.ndarray  # see `SortedCorpus`, as the next
    valid_last: np.ndarray
    read: np.ndarray  # (2,) documents and words of the corpus, copies included
    kept: np.ndarray  # (2,) documents and words of all pools
    longest: int  # words of the longest document


def cut_corpus(space: Workspace, wanted: Wanted, ranges: int) -> None:
    """Write cut.npz. UserError: see `Wanted.cut`."""
    corpus = SortedCorpus(space, wanted, ranges)
    pools, spans = wanted.cut(corpus)
    begins = [0] * len(pools)
    start, last = [], []
    for pool, _, end in spans:
        start.append(pools[pool].at(begins[pool]).bytes)
        last.append(pools[pool].at(end).last)
        begins[pool] = end
    cut = Cut(
        pool=np.array([span.pool for span in spans]),
        split=np.array([span.split for span in spans]),
        last=np.array(last, f"S{KEY_BYTES}"),
        start=np.array(start),
        before=np.stack([pool.before for pool in pools]),
        taken=corpus.taken,
        valid_last=corpus.valid_last,
        read=corpus.read.sum((0, 2))[:2],
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
    return kind(**{name: each if each.ndim else int(each) for name, each in read_arrays(path).items()})
