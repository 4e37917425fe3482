"""How far the token frequencies of two mega-batches differ, relative to i.i.d. documents.

Words repeat within a document, so the independent samples are documents, not tokens. The documents
of each mega-batch are dealt in random order to two halves with equal numbers of tokens. The ratio
is the Jensen-Shannon divergence of halves of two mega-batches over that of the two halves of one:
about 1 if documents are i.i.d.

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
_REMEDY = "`--verify` lists all damage"


class Counts(NamedTuple):
    """Lengths and token frequencies of a part."""

    lengths: np.ndarray  # (documents,) tokens of each document, eos included
    tokens: np.ndarray
    """(3, V) uint32 occurrences of each token in the two halves and the remainder."""

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
        raise UserError(f"{path}: damaged ({error}); {_REMEDY}") from error
    keys = np.zeros(0, f"S{KEY_BYTES}")
    if os.path.isfile(f"{path}.keys"):
        keys = np.fromfile(f"{path}.keys", keys.dtype)
    # Otherwise items are lines, and an item that is a lone eos ends a document.
    items_are_documents = len(keys) == len(sizes)
    ends = _document_ends(sizes, items_are_documents)
    if not len(ends) or ends[-1] != len(ids) or (np.diff(ends) < 1).any():
        raise UserError(f"{path}: damaged (.idx does not fit .bin); {_REMEDY}")
    if len(keys) == len(ends):
        documents = keys.astype(f"S{DOCUMENT_BYTES}")
        is_last_piece = np.append(documents[1:] != documents[:-1], True)
        ends = ends[is_last_piece]
    return ids, ends


def _document_ends(sizes: np.ndarray, items_are_documents: bool) -> np.ndarray:
    """(documents,) int64 the end of each document in tokens, from the sizes of items."""
    ends = [np.zeros(0, np.int64)]
    position = 0
    for start in range(0, len(sizes), _BLOCK):
        block = sizes[start : start + _BLOCK]
        running = np.cumsum(block, dtype=np.int64) + position
        ends.append(running if items_are_documents else running[block == 1])
        position = int(running[-1])
    return np.concatenate(ends)


def count_part(path: str, dictionary_size: int, half: int, number: int) -> Counts:
    """Deal the documents of part `number` to two halves of `half` tokens; count the tokens.

    Memory: about 100 MB, and 40 bytes per document. UserError: the files do not fit each other or
    the dictionary.
    """
    ids, ends = open_part(path)
    lengths = np.diff(ends, prepend=0)
    order = np.random.default_rng([0, number]).permutation(len(lengths))
    starts = np.cumsum(lengths[order]) - lengths[order]
    # Offset of each document's row (half or remainder) in the flattened `tokens`.
    row_offset = np.empty(len(lengths), np.int64)
    row_offset[order] = np.minimum(starts // max(half, 1), 2) * dictionary_size
    tokens = np.zeros(3 * dictionary_size, np.uint32)
    for start, block in token_blocks(ids):
        stop = start + len(block)
        if block.max() >= dictionary_size:
            raise UserError(f"{path}: damaged (ids beyond the dictionary); {_REMEDY}")
        first, last = np.searchsorted(ends, [start, stop - 1], "right")
        # Number of tokens of each document that are inside the block.
        inside = np.diff(np.minimum(ends[first : last + 1], stop), prepend=start)
        cells = np.repeat(row_offset[first : last + 1], inside)
        cells += block
        tokens += np.bincount(cells, minlength=len(tokens)).astype(np.uint32)
    return Counts(lengths, tokens.reshape(-1, dictionary_size))


def compare(left: np.ndarray, right: np.ndarray) -> float | None:
    """Divergence of two parts relative to that of the halves of each; `Counts.tokens` of both.

    None: a half is empty, because the documents are too few or too long, or there is a single
    token.
    """
    halves = [*left[:2], *right[:2]]
    if not all(half.any() for half in halves):
        return None
    within = divergence(left[0], left[1]) + divergence(right[0], right[1])
    across = divergence(left[0], right[1]) + divergence(left[1], right[0])
    return across / within if within else None


def divergence(left: np.ndarray, right: np.ndarray) -> float:
    """Jensen-Shannon divergence in bits of two vectors of counts, each scaled to sum to 1."""
    left = left / left.sum()
    right = right / right.sum()
    middle = (left + right) / 2
    return float((rel_entr(left, middle) + rel_entr(right, middle)).sum() / np.log(4))
