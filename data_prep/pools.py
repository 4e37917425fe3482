"""A pool: documents in hash order, from which splits are cut one after another.

A cut may fall between the pieces of a document: what follows in the document is then in no split.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from data_prep.scan import content_keys, document_starts, words_of_documents

LEFT_OUT = -1


class Span(NamedTuple):
    """A split, or a part of it: the documents of a pool from the end of the span before."""

    pool: int
    split: int  # LEFT_OUT: the rest of a document of the split before
    end: int  # documents of the pool up to the end of the span


class Reached(NamedTuple):
    """Where some of the documents of a pool end."""

    last: bytes  # content key of the last of them
    words: int
    bytes: int


class Pool:
    """The documents of a pool in hash order, known by their sums in each range; opens the range of a cut."""

    def __init__(self, sums: np.ndarray, opened: Callable[[int], np.ndarray]) -> None:
        """`sums`: (ranges, 3) documents, words and bytes. `opened(number)`: the records in a range."""
        self._until = np.concatenate([np.zeros((1, 3), np.int64), np.cumsum(sums, 0, dtype=np.int64)])
        self.before = self._until[:-1, 2]  # (ranges,) bytes before each range
        self.documents, self.words, _ = self._until[-1].tolist()
        self._opened = functools.lru_cache(maxsize=1)(opened)

    def cuts(self, sizes: Sequence[int], spare: int) -> list[tuple[int, int]]:
        """The splits of the pool, of `sizes` words: documents up to the end of each, and up to the next.

        See `cut_document`. At most `spare` words are left out between two splits.
        """
        found = []
        target = left_out = 0
        for number, size in enumerate(sizes):
            target += size
            last = number + 1 == len(sizes)  # the words that follow are surplus anyway
            found.append(self._cut(target + left_out, self.words if last else spare - left_out))
            end, stop = (self.at(documents).words for documents in found[-1])
            left_out += stop - end
        return found

    def _cut(self, target: int, spare: int) -> tuple[int, int]:
        if target >= self.words:
            return self.documents, self.documents
        number = int(np.searchsorted(self._until[1:, 1], target))
        documents, words, _ = self._until[number].tolist()
        end, stop = cut_document(self._opened(number), target - words, spare)
        return documents + end, documents + stop

    def nearest(self, target: int) -> int:
        """Number of documents whose words add up to the nearest of the target (the fewer of two)."""
        return self._cut(target, self.words)[0]

    def at(self, documents: int) -> Reached:
        """Where the first `documents` end."""
        number = int(np.searchsorted(self._until[1:, 0], documents))
        before, words, size = self._until[number].tolist()
        rows = self._opened(number)[: documents - before]
        _, more_words, more_bytes = sums_of(rows)
        return Reached(content_keys(rows[-1:]).tobytes(), words + more_words, size + more_bytes)


def cut_document(records: np.ndarray, target: int, spare: int) -> tuple[int, int]:
    """Where a split of `target` words ends, and where the next can start: numbers of documents.

    The next starts with another whole document. The split ends at the piece nearest to the target if the
    rest of its document, which is in no split, has at most `spare` words; else where the nearest whole
    document ends. `records`: whole documents, in hash order.
    """
    words = records["words"].astype(np.int64)
    end = nearest(words, target)
    borders = np.append(np.flatnonzero(document_starts(records)), len(records))
    stop = int(borders[np.searchsorted(borders, end)])
    if words[end:stop].sum() > spare:
        end = stop = int(borders[nearest(words_of_documents(records), target)])
    return end, stop


def nearest(words: np.ndarray, target: int) -> int:
    """Number of documents whose words add up to the nearest of the target (the fewer of two)."""
    running = np.concatenate([[0], np.cumsum(words, dtype=np.int64)])
    above = min(int(np.searchsorted(running, target)), len(words))
    below = max(above - 1, 0)
    return below if target - running[below] <= running[above] - target else above


def spans_of(pool: int, splits: Iterable[int], cuts: list[tuple[int, int]]) -> list[Span]:
    """The splits of `Pool.cuts`, each with the rest of its last document."""
    found = []
    for split, (end, stop) in zip(splits, cuts, strict=True):
        found += [Span(pool, split, end), Span(pool, LEFT_OUT, stop)]
    return found


def sizes_of(spans: Sequence[Span]) -> list[int]:
    """Documents of each split of a pool; below 1: it would be empty."""
    counts = np.diff([span.end for span in spans], prepend=0).tolist()
    return [count for span, count in zip(spans, counts, strict=True) if span.split != LEFT_OUT]


def sums_of(records: np.ndarray) -> list[int]:
    """Documents, words and bytes of records."""
    return [len(records), *(int(records[name].sum(dtype=np.int64)) for name in ("words", "bytes"))]
