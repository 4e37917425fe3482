"""How far the token frequencies of two mega-batches differ, relative to i.i.d. documents.

Words repeat within a document, so the independent samples are documents, not tokens. The documents of each
mega-batch are dealt in random order to two halves with equal numbers of tokens. The Jensen-Shannon divergence
of halves of two mega-batches is relative to that of the two halves of one: if documents are i.i.d., the ratio
is about 1.

V dictionary size.
"""

import os
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from scipy.special import rel_entr

from alma.errors import UserError
from alma.stream import DTYPES, KEY_BYTES, read_index
from data_prep.work import DOCUMENT_BYTES

_BLOCK = 1 << 21  # tokens or items per block: 16 MB as int64


class Counts(NamedTuple):
    """Lengths and token frequencies of a part."""

    lengths: np.ndarray  # (documents,) tokens of each document, eos included
    tokens: np.ndarray  # (3, V) uint32 occurrences of each token in the two halves, and in the rest

    @property
    def total(self) -> np.ndarray:
        """(V,) occurrences of each token."""
        return self.tokens.sum(0, dtype=np.int64)


def token_blocks(ids: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (position, ids) of each block."""
    for start in range(0, len(ids), _BLOCK):
        yield start, ids[start : start + _BLOCK]


def open_part(path: str) -> tuple[np.ndarray, np.ndarray]:
    """The ids of a part, memory-mapped, and (documents,) int64 the end of each document in tokens.

    Pieces of a document that follow each other count as one: they are no independent samples.
    UserError: missing or damaged.
    """
    try:
        sizes, code = read_index(f"{path}.idx")
        ids = np.memmap(f"{path}.bin", DTYPES[code], "r")
    except (OSError, ValueError) as error:  # missing; or empty, or not a whole number of ids
        raise UserError(f"{path}: damaged ({error}); `--verify` lists all damage") from error
    keys = np.fromfile(f"{path}.keys", f"S{KEY_BYTES}") if os.path.isfile(f"{path}.keys") else ids[:0]
    whole = len(keys) == len(sizes)  # else items are lines, and one of a lone eos ends a document
    found, position = [np.zeros(0, np.int64)], 0
    for start in range(0, len(sizes), _BLOCK):
        block = sizes[start : start + _BLOCK]
        running = np.cumsum(block, dtype=np.int64) + position
        found.append(running[(block == 1) | whole])
        position = int(running[-1])
    ends = np.concatenate(found)
    if not len(ends) or ends[-1] != len(ids) or (np.diff(ends) < 1).any():
        raise UserError(f"{path}: damaged (.idx does not fit .bin); `--verify` lists all damage")
    if len(keys) == len(ends):
        documents = keys.astype(f"S{DOCUMENT_BYTES}")
        ends = ends[np.append(documents[1:] != documents[:-1], True)]
    return ids, ends


def count_part(path: str, dictionary_size: int, half: int, number: int) -> Counts:
    """Put the documents of part `number` in random order; count the tokens of two times `half`, and the rest.

    Memory: about 100 MB, and 40 bytes per document. UserError: the files do not fit each other or the
    dictionary.
    """
    ids, ends = open_part(path)
    lengths = np.diff(ends, prepend=0)
    order = np.random.default_rng([0, number]).permutation(len(lengths))
    offset = np.empty(len(lengths), np.int64)  # of each document's row in the flat `tokens`
    starts = np.cumsum(lengths[order]) - lengths[order]
    offset[order] = np.minimum(starts // max(half, 1), 2) * dictionary_size
    tokens = np.zeros(3 * dictionary_size, np.uint32)
    for start, block in token_blocks(ids):
        stop = start + len(block)
        if block.max() >= dictionary_size:
            raise UserError(f"{path}: damaged (ids beyond the dictionary); `--verify` lists all damage")
        first, last = np.searchsorted(ends, [start, stop - 1], "right")
        inside = np.diff(np.minimum(ends[first : last + 1], stop), prepend=start)
        rows = np.repeat(offset[first : last + 1], inside)
        rows += block
        tokens += np.bincount(rows, minlength=len(tokens)).astype(np.uint32)
    return Counts(lengths, tokens.reshape(-1, dictionary_size))


def compare(one: np.ndarray, other: np.ndarray) -> float | None:
    """Divergence of two parts, given as `Counts.tokens`, relative to that of the halves of each. None: a half
    is empty, because the documents are too few or too long, or there is a single token."""
    if not (one[:2].any(1).all() and other[:2].any(1).all()):
        return None
    within = divergence(one[0], one[1]) + divergence(other[0], other[1])
    apart = divergence(one[0], other[1]) + divergence(one[1], other[0])
    return apart / within if within else None


def divergence(one: np.ndarray, other: np.ndarray) -> float:
    """Jensen-Shannon divergence in bits of two vectors of counts, each scaled to sum to 1."""
    one, other = one / one.sum(), other / other.sum()
    middle = (one + other) / 2
    return float((rel_entr(one, middle) + rel_entr(other, middle)).sum() / np.log(4))
