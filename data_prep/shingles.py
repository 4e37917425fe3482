"""Hashes of words and of n-grams of words, the same for text and for its tokens.

A word's hash is a polynomial of its bytes, so that it can be put together from the hashes of its tokens. All
hashes are uint64 and computed modulo 2**64; they depend on nothing but the spelling.
"""

import numpy as np

_PLACE = np.uint64(0x9E3779B97F4A7C15)  # odd; its powers weight the bytes of a word
NEXT = np.uint64(0xD6E8FEB86659FD93)  # odd; its powers weight the words of an n-gram
_BYTES = np.random.default_rng(0).integers(0, 2**64, 256, np.uint64)
_NEWLINE, _SPACE = b"\n "


def hash_bytes(text: bytes) -> np.uint64:
    """The hash of a word, or of a piece at its beginning."""
    codes = _BYTES[np.frombuffer(text, np.uint8)]
    return (codes * _powers(len(text))).sum(dtype=np.uint64)


def hash_pieces(codes: np.ndarray, sizes: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """(words,) hashes of words that begin at `starts` of their pieces: `hash_bytes` and bytes of each."""
    offsets = np.cumsum(sizes, dtype=np.int64) - sizes
    offsets -= np.repeat(offsets[starts], np.diff(starts, append=len(sizes)))
    return np.add.reduceat(codes * _powers(int(offsets.max()) + 1)[offsets], starts)


def _powers(count: int) -> np.ndarray:
    powers = np.full(count, _PLACE)
    powers[:1] = 1
    return np.cumprod(powers)


def hash_texts(texts: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """(words,) hashes of the words of normalised texts, and (words,) the number of the text of each."""
    if not texts:
        return np.zeros(0, np.uint64), np.zeros(0, np.int64)
    data = np.frombuffer(b"\n".join(texts), np.uint8)
    gaps = np.flatnonzero((data == _SPACE) | (data == _NEWLINE))
    starts = np.concatenate([[0], gaps + 1])
    sizes = np.diff(starts, append=len(data) + 1)  # with the gap
    place = np.arange(len(data)) - np.repeat(starts, sizes)[: len(data)]
    values = _BYTES[data] * _powers(int(sizes.max()))[place]
    values[gaps] = 0
    ends = np.cumsum([len(text) + 1 for text in texts])
    number = np.searchsorted(ends, starts, "right")
    return np.add.reduceat(values, starts), number


def n_grams(words: np.ndarray, owners: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Hashes of the n-grams of consecutive `words` (words,) with one owner, and the owner of each."""
    count = max(len(words) - n + 1, 0)
    within = np.flatnonzero(owners[:count] == owners[n - 1 :])
    hashes = words[:count].copy()
    for k in range(1, n):
        hashes *= NEXT
        hashes += words[k : k + count]
    hashes ^= hashes >> np.uint64(32)
    return hashes[within], owners[within]
