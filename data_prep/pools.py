"""A pool: documents in hash order, from which splits are cut one after another.

A cut may fall between the pieces of a document; the later pieces are then in no split.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from data_prep.scan import content_keys, document_starts, words_of_documents

LEFT_OUT = -1


class Span(NamedTuple):
    """A split, or a part of it: the documents of a pool from the end of the previous span."""

    pool: int
    split: int  # LEFT_OUT: the rest of the last document of the split before
    end: int  # documents of the pool up to the end of the span


class Reached(NamedTuple):
    """The position in a pool after its first n documents."""

    last: bytes  # content key of the last of them
    words: int
    bytes: int


class Pool:
    """The documents of a pool in hash order.

    It holds only the sums of each range, and opens the ranges in which a split is cut.
    """

    def __init__(self, sums: np.ndarray, opened: Callable[[int], np.ndarray]) -> None:
        """`sums`: (ranges, 3) documents, words and bytes; `opened(number)`: records of a range."""
        totals = np.cumsum(sums, 0, dtype=np.int64)
        self._until = np.concatenate([np.zeros((1, 3), np.int64), totals])
        self.before = self._until[:-1, 2]  # (ranges,) bytes before each range
        self.documents, self.words, _ = self._until[-1].tolist()
        self._opened = functools.lru_cache(maxsize=1)(opened)

    def cuts(self, sizes: Sequence[int], spare: int) -> list[tuple[int, int]]:
        """Cut splits of `sizes` words from the pool, one after another.

        Returns two numbers for each split: the documents of the pool up to its end, and up to the
        start of the next split. Documents between the two are left out, at most `spare` words in
        all; see `cut_document`.
        """
        cuts = []
        target = 0
        left_out = 0
        for number, size in enumerate(sizes):
            target += size
            is_last = number + 1 == len(sizes)
            # After the last split any number of words may be left out: they are surplus anyway.
            allowed = self.words if is_last else spare - left_out
            end, stop = self._cut(target + left_out, allowed)
            cuts.append((end, stop))
            left_out += self.at(stop).words - self.at(end).words
        return cuts

    def _cut(self, target: int, spare: int) -> tuple[int, int]:
        """`cut_document`, with numbers of documents and words from the start of the pool."""
        if target >= self.words:
            return self.documents, self.documents
        number = int(np.searchsorted(self._until[1:, 1], target))
        documents, words, _ = self._until[number].tolist()
        end, stop = cut_document(self._opened(number), target - words, spare)
        return documents + end, documents + stop

    def nearest(self, target: int) -> int:
        """Number of documents whose words are nearest to the target; of two, the fewer."""
        return self._cut(target, self.words)[0]

    def at(self, documents: int) -> Reached:
        """Where the first `documents` end."""
        number = int(np.searchsorted(self._until[1:, 0], documents))
        documents_before, words_before, bytes_before = self._until[number].tolist()
        rows = self._opened(number)[: documents - documents_before]
        _, words, size = sums_of(rows)
        last_key = content_keys(rows[-1:]).tobytes()
        return Reached(last_key, words_before + words, bytes_before + size)


def cut_document(records: np.ndarray, target: int, spare: int) -> tuple[int, int]:
    """Find the end of a split of `target` words and the start of the next, as numbers of pieces.

    Long documents consist of pieces, and a document must not be in two splits. The split ends at
    the piece nearest to the target if the rest of its document has at most `spare` words; the rest
    is then in no split. Otherwise it ends at the nearest end of a whole document. `records` are the
    pieces of whole documents, in hash order.
    """
    words = records["words"].astype(np.int64)
    end = nearest(words, target)
    borders = np.append(np.flatnonzero(document_starts(records)), len(records))
    stop = int(borders[np.searchsorted(borders, end)])
    if words[end:stop].sum() > spare:
        end = int(borders[nearest(words_of_documents(records), target)])
        stop = end
    return end, stop


def nearest(words: np.ndarray, target: int) -> int:
    """Number of documents whose words are nearest to the target; of two, the fewer."""
    running = np.concatenate([[0], np.cumsum(words, dtype=np.int64)])
    above = min(int(np.searchsorted(running, target)), len(words))
    below = max(above - 1, 0)
    if target - running[below] <= running[above] - target:
        return below
    return above


def spans_of(pool: int, splits: Iterable[int], cuts: list[tuple[int, int]]) -> list[Span]:
    """The splits of `Pool.cuts`, each followed by the rest of its last document."""
    spans = []
    for split, (end, stop) in zip(splits, cuts, strict=True):
        spans.append(Span(pool, split, end))
        spans.append(Span(pool, LEFT_OUT, stop))
    return spans


def sizes_of(spans: Sequence[Span]) -> list[int]:
    """Number of documents of each split; below 1 if the split would be empty."""
    counts = np.diff([span.end for span in spans], prepend=0).tolist()
    return [count for span, count in zip(spans, counts, strict=True) if span.split != LEFT_OUT]


def sums_of(records: np.ndarray) -> list[int]:
    """Documents, words and bytes of records."""
    words = int(records["words"].sum(dtype=np.int64))
    size = int(records["bytes"].sum(dtype=np.int64))
    return [len(records), words, size]
