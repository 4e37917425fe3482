"""Stage cut: where the splits of a stream end in the hash order of the documents.

A split is a mega-batch, `test` or `valid` (order.py has those of an ordered stream). Splits are cut
from pools. A pool is a list of documents in hash order. An i.i.d. stream has a pool of the
documents for validation and one of all others; an ordered stream has a pool for each mega-batch, of
the documents that it can take. The sums of each range of keys tell in which range a split ends, so
the stage opens only these ranges.
"""

import heapq
from collections.abc import Iterable, Iterator, Sequence
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
_VALIDATION = 1  # pool of the validation set
_VALIDATION_REST = 2  # pool of the pieces of the last validation document that are left out

Record = TypeVar("Record")


@dataclass(frozen=True)
class Splits:
    """Requested splits, and their sizes in words."""

    mega_batches: int
    words: int  # of each training mega-batch
    eval_words: int
    """Words of the evaluation mega-batch. 0 in an addition, because the stream has one already."""
    valid_words: int
    """Words of the validation set. 0 in an addition, too."""
    valid_source: str | None
    first: int = 0  # number of the first mega-batch

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
        parts: dict[str, list[int]] = {}
        for number, name in enumerate(self.names):
            parts.setdefault(name, []).append(number)
        return parts

    @property
    def pools(self) -> list[int]:
        """The pool of each split."""
        return [_VALIDATION if name == "valid" else 0 for name in self.names]

    @property
    def pool_count(self) -> int:
        """Number of pools. No split is cut from the pool _VALIDATION_REST."""
        return _VALIDATION_REST + 1 if self.valid_words else 1

    def record(self) -> dict[str, Any]:
        """The fields that stream.json records; known before any text is read."""
        return asdict(self)

    def sources(self, names: Iterable[str]) -> tuple[str, ...]:
        """The sources of the corpus in the order of `rank`; `names`: the sources of its files."""
        return tuple(sorted(set(names), key=self.rank))

    def period(self, part: str) -> str:
        """The period of a part of a dated stream; else empty."""
        return ""

    def rank(self, source: str) -> tuple[int, str]:
        """Sort key of a source; a document in several sources counts for the first of them."""
        return 0, source

    def arrivals(self, sources: Sequence[str]) -> np.ndarray:
        """The pool of each source's documents, (sources,), if they are not taken for validation."""
        return np.array([self.rank(source)[0] for source in sources])

    def cut(self, corpus: "SortedCorpus") -> tuple[list[Pool], list[Span]]:
        """Make the pools and cut them.

        Validation takes documents of its source in the order of the second hash. The others are cut
        in hash order, each time near a multiple of `words` (see `Pool.cuts`), so every cut is
        within half a document of its target. UserError: too few words, or a split is empty because
        documents are too long.
        """
        spare = self._spare_words(corpus)
        if self.valid_words:
            corpus.select_validation(self.valid_words, spare)
        pools = [corpus.pool(number) for number in range(self.pool_count)]
        pool = pools[0]
        sizes = [self.words] * self.mega_batches
        if self.eval_words:
            sizes.append(self.eval_words)
        missing = sum(sizes) - pool.words
        if missing > 0:
            last_document = pool.words - pool.at(max(pool.documents - 1, 0)).words
            # Validation may exceed its words by up to half a document; that is no lack of words.
            if missing > last_document / 2:
                has = f"{pool.words:,} words are left after validation"
                remedy = f"ask for fewer words{corpus.or_split}, or add text"
                raise UserError(f"{has}, {sum(sizes):,} are needed: {remedy}")
        spans = spans_of(0, range(len(sizes)), pool.cuts(sizes, -missing))
        counts = sizes_of(spans)
        if self.valid_words:
            valid_documents = pools[_VALIDATION].documents
            counts.append(valid_documents)
            spans.append(Span(_VALIDATION, len(sizes), valid_documents))
        if min(counts) <= 0:
            raise corpus.empty(self.names[int(np.argmin(counts))])
        return pools, spans

    def _spare_words(self, corpus: "SortedCorpus") -> int:
        """Number of words that no split needs. Raises UserError if the corpus has too few."""
        documents, total, _ = corpus.first.sum((0, 2)).tolist()
        needed = self.mega_batches * self.words + self.eval_words + self.valid_words
        duplicates = int(corpus.read[:, 0].sum()) - documents
        dropped = f"after dropping {duplicates:,} duplicates"
        if total < needed:
            parts = f"{self.mega_batches} x {self.words:,}"
            if self.eval_words or self.valid_words:
                parts += f" + {self.eval_words:,} evaluation + {self.valid_words:,} validation"
            has = f"the corpus has {total:,} words in {documents:,} documents {dropped}"
            missing = f"{needed - total:,} words are missing"
            remedy = "add text or ask for fewer"
            raise UserError(f"{has}, but {parts} = {needed:,} are needed: {missing}; {remedy}")
        if self.valid_source is not None:
            number = corpus.sources.index(self.valid_source)
            of_source = int(corpus.first[:, 1, number].sum())
            if of_source < self.valid_words:
                has = f"source {self.valid_source} has {of_source:,} words {dropped}"
                request = f"--valid-words is {self.valid_words:,}"
                missing = f"{self.valid_words - of_source:,} words are missing"
                remedy = "choose another --valid-source or ask for fewer"
                raise UserError(f"{has}, but {request}: {missing}; {remedy}")
        return total - needed


class SortedCorpus:
    """The sorted ranges of a corpus, and the pools made of them."""

    read: np.ndarray
    """(ranges, 3, sources): numbers of documents, words and bytes read, with copies."""
    first: np.ndarray
    """(ranges, 3, sources): the same without copies; a document counts for its first mega-batch."""
    longest: int  # words of the longest document, or piece of one
    whole: int  # words of the longest document with all its pieces
    taken: np.ndarray
    """(pools,): key of the last document that each mega-batch of an ordered stream takes."""
    valid_last: np.ndarray
    """(1,): record of the last validation document in the order of the second hash; (0,): none."""

    def __init__(self, space: Workspace, splits: Splits, ranges: int) -> None:
        self.sources = space.sources
        sums = [read_arrays(space.file("sums", number, "npz")) for number in range(ranges)]
        self.read = np.stack([arrays["read"] for arrays in sums])
        self.first = np.stack([arrays["first"] for arrays in sums])
        self.longest = max(int(arrays["longest"]) for arrays in sums)
        self.whole = max(int(arrays["whole"]) for arrays in sums)
        self.or_split = " or split long documents with --max-document-words"
        if space.reader.max_document_words:
            self.or_split = ""
        self.arrivals = splits.arrivals(space.sources)
        self.taken = np.zeros(splits.pool_count, f"S{KEY_BYTES}")
        self.valid_last = np.zeros(0, RECORD)
        pools = range(splits.pool_count)
        self._sums = np.stack([self.first[:, :, self.arrivals == pool].sum(2) for pool in pools])
        self._space = space
        self._splits = splits
        self._ranges = range(ranges)

    def empty(self, part: str) -> UserError:
        """The error for a part that no document fits into."""
        why = f"the longest document has {self.whole:,} words"
        return UserError(f"{part} would be empty: {why}; ask for more words{self.or_split}")

    def pool(self, pool: int) -> Pool:
        """Make a pool, without documents that earlier pools have `taken`."""

        def opened(number: int) -> np.ndarray:
            records = sorted_records(self._space, number)
            pools = placed(records, self._space, number, self._splits, self)
            return records[pools == pool]

        if pool > 0:  # documents that earlier pools could have taken but did not
            for number in self._ranges:
                self._add_undecided(pool, number)
        return Pool(self._sums[pool], opened)

    def _add_undecided(self, pool: int, number: int) -> None:
        """Add documents of a range whose pool is known only now to the sums of the pool.

        They are in several mega-batches, so `first` counts them for an earlier one, which has not
        taken them.
        """
        records = mapped(self._space.file("again", number, "bin"), RECORD)
        first, _ = distinct(records, self.arrivals)
        batches = self._splits.first + self.arrivals[records["source"]]
        is_near = matching(content_keys(records), batches, similar(self._space, number))
        pools = placed(records, self._space, number, self._splits, self)
        self._sums[pool, number] += sums_of(records[(~first | is_near) & (pools == pool)])

    def select_validation(self, target: int, spare: int) -> None:
        """Take documents of the validation source, in ascending order of their second hashes.

        `target` is the number of words to take. The last document is cut, and its rest left out, if
        the rest has at most `spare` words; see `cut_document`.
        """
        missing = target
        for pieces in self._by_second_hash():  # one document, unless two second hashes are equal
            records = np.concatenate([record for _, record in pieces])
            words = int(records["words"].sum())
            end = len(pieces)
            stop = len(pieces)
            if words >= missing:
                end, stop = cut_document(records, missing, spare)
            for place, (number, record) in enumerate(pieces[:stop]):
                pool = _VALIDATION if place < end else _VALIDATION_REST
                self._sums[pool, number] += sums_of(record)
            if end:
                self.valid_last = pieces[end - 1][1]
            missing -= words
            if missing <= 0:
                break
        self._sums[0] -= self._sums[_VALIDATION] + self._sums[_VALIDATION_REST]

    def _by_second_hash(self) -> Iterator[list[tuple[int, np.ndarray]]]:
        """Yield the documents of the validation source in the order of their second hashes.

        Each comes as its pieces: number of the range and (1,) record. Documents of equal second
        hashes come together.
        """
        files = [
            mapped(self._space.file("valid", number, "bin"), RECORD) for number in self._ranges
        ]

        def rows(number: int) -> Iterator[tuple[int, int, int]]:
            return zip(files[number]["second"], repeat(number), count(), strict=False)

        merged = heapq.merge(*map(rows, self._ranges))
        for _, tied in groupby(merged, key=itemgetter(0)):
            yield [(number, files[number][row : row + 1]) for _, number, row in tied]


def pools_of(
    records: np.ndarray, splits: Splits, sources: tuple[str, ...], valid_last: np.ndarray
) -> np.ndarray:
    """The pool of each document, (records,), not considering copies and earlier pools."""
    pools = splits.arrivals(sources)[records["source"]]
    if len(valid_last):
        assert splits.valid_source is not None
        second = records["second"]
        last = valid_last["second"][0]
        keys = content_keys(records)
        end = content_keys(valid_last).tobytes()
        document_end = end[:DOCUMENT_BYTES].ljust(KEY_BYTES, b"\xff")
        is_taken = (second < last) | ((second == last) & (keys <= end))
        is_rest = (keys > end) & (keys <= document_end)
        of_source = records["source"] == sources.index(splits.valid_source)
        pools[of_source & is_taken] = _VALIDATION
        pools[of_source & is_rest] = _VALIDATION_REST
    return pools


def placed(
    records: np.ndarray,
    space: Workspace,
    number: int,
    splits: Splits,
    ends: "SortedCorpus | Cut",
) -> np.ndarray:
    """The pool of each document, (records,); LEFT_OUT if it is a copy, or in an earlier pool.

    `records` are those of range `number`, in hash order. `ends` says where the pools that are
    already cut end.
    """
    first, stays = distinct(records, splits.arrivals(space.sources))
    stays &= ~near_copies(records, space, number, splits, ends)
    pools = pools_of(records, splits, space.sources, ends.valid_last)
    pools = np.where(stays, pools, LEFT_OUT)
    if (stays & ~first).any():  # documents of several mega-batches
        stops = np.searchsorted(content_keys(records), ends.taken, "right")
        takes = stays & (np.arange(len(records)) < stops[pools])
        takes_before: np.ndarray = np.cumsum(takes) - takes
        document = np.cumsum(first) - 1
        is_taken = takes_before > takes_before[first][document]
        pools[is_taken] = LEFT_OUT
    return pools


def near_copies(
    records: np.ndarray,
    space: Workspace,
    number: int,
    splits: Splits,
    ends: "SortedCorpus | Cut",
) -> np.ndarray:
    """Whether each document is dropped as a near duplicate, (records,); arguments as `placed`."""
    near = similar(space, number)
    batches = splits.first + splits.arrivals(space.sources)[records["source"]]
    dropped = near[is_dropped(near, splits.first, ends.taken)]
    return matching(content_keys(records), batches, dropped)


@dataclass(frozen=True)
class Cut:
    """Where the splits end: P spans, in the hash order of their pools."""

    pool: np.ndarray  # (P,)
    split: np.ndarray  # (P,)
    last: np.ndarray  # (P,) content key of the last document
    start: np.ndarray  # (P,) bytes of the pool before the span
    before: np.ndarray  # (pools, ranges) bytes of each pool before each range
    taken: np.ndarray  # as in `SortedCorpus`
    valid_last: np.ndarray  # as in `SortedCorpus`
    read: np.ndarray  # (2,) documents and words of the corpus, copies included
    kept: np.ndarray  # (2,) documents and words of all pools
    longest: int  # words of the longest document


def cut_corpus(space: Workspace, splits: Splits, ranges: int) -> None:
    """Write cut.npz. UserError: see `Splits.cut`."""
    corpus = SortedCorpus(space, splits, ranges)
    pools, spans = splits.cut(corpus)
    begins = [0 for _ in pools]
    starts = []
    last_keys = []
    for pool, _, end in spans:
        starts.append(pools[pool].at(begins[pool]).bytes)
        last_keys.append(pools[pool].at(end).last)
        begins[pool] = end
    cut = Cut(
        pool=np.array([span.pool for span in spans]),
        split=np.array([span.split for span in spans]),
        last=np.array(last_keys, f"S{KEY_BYTES}"),
        start=np.array(starts),
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
    """The inverse of `save`. Arrays without dimensions become ints."""
    values: dict[str, Any] = read_arrays(path)
    for name, array in values.items():
        if not array.ndim:
            values[name] = int(array)
    return kind(**values)
