"""Hashes of words and of n-grams of words, of text and of its tokens; the share of new words of a mega-batch.

A word's hash is a polynomial of its bytes, so that it can be put together from the hashes of its tokens. All
hashes are uint64 and computed modulo 2**64; they depend on nothing but the spelling.
"""

import json
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from alma.errors import UserError
from alma.stream import SPECIALS, Stream
from alma.workers import Workers
from data_prep.dictionary import EOS, UNKNOWN, read_tokens
from data_prep.similarity import open_part, token_blocks
from data_prep.work import run_all

_IDS = ("encoder.json", "vocab.json", "tokenizer.json")  # files with the ids of byte-level tokens
_PLACE = np.uint64(0x9E3779B97F4A7C15)  # odd; its powers weight the bytes of a word
NEXT = np.uint64(0xD6E8FEB86659FD93)  # odd; its powers weight the words of an n-gram
_BYTES = np.random.default_rng(0).integers(0, 2**64, 256, np.uint64)
_NEWLINE, _SPACE = b"\n "


def hash_bytes(text: bytes) -> np.uint64:
    """The hash of a word, or of a piece at its beginning."""
    return (_BYTES[np.frombuffer(text, np.uint8)] * _powers(len(text))).sum(dtype=np.uint64)


def _powers(count: int) -> np.ndarray:
    return np.cumprod(np.append(np.uint64(1), np.full(count, _PLACE)))[:count]


def hash_texts(texts: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """(words,) hashes of the words of one or more normalised texts; (words,) the text number of each."""
    data = np.frombuffer(b"\n".join(texts), np.uint8)
    gaps = np.flatnonzero((data == _SPACE) | (data == _NEWLINE))
    starts = np.concatenate([[0], gaps + 1])
    sizes = np.diff(starts, append=len(data) + 1)  # with the gap
    place = np.arange(len(data)) - np.repeat(starts, sizes)[: len(data)]
    values = _BYTES[data] * _powers(int(sizes.max()))[place]
    values[gaps] = 0
    ends = np.cumsum([len(text) + 1 for text in texts])
    return np.add.reduceat(values, starts), np.searchsorted(ends, starts, "right")


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


class Spelling(NamedTuple):
    """How tokens make words, four arrays (V,); a word does not depend on the tokens it was cut into."""

    begins: np.ndarray  # whether a word begins with the token, wherever it stands
    ends: np.ndarray  # whether the next token begins a word
    codes: np.ndarray  # `hash_bytes` of the token without its marks of space, uint64
    sizes: np.ndarray  # bytes of the token without its marks, int32


def new_shares(stream: Stream, workers: Workers) -> list[float]:
    """Share of the words of each mega-batch that are in none before it."""
    spelling = read_spelling(stream)
    tasks = [(stream.path(part), spelling) for part in stream.megabatches]
    weights = [part.tokens for part in stream.megabatches]
    known = np.zeros(0, np.uint64)
    shares = []
    for types, counts in run_all(workers, "words", count_words, tasks, weights, "token"):
        shares.append(float(counts[~np.isin(types, known)].sum() / counts.sum()))
        known = np.union1d(known, types)
    return shares


def read_spelling(stream: Stream) -> Spelling:
    """The spelling of a stream's tokens. UserError: damaged files."""
    tokens, space, line = read_tokens(stream.directory), "\u2581", "\n"  # of SentencePiece, without lines
    if name := next((name for name in _IDS if name in stream.files), None):
        space, line = "\u0120", "\u010a"  # as byte-level tokens are spelt
        path = stream.directory / name
        try:
            ids = json.loads(path.read_text("utf-8"))
            if name == "tokenizer.json":
                ids = ids["model"]["vocab"] | {each["content"]: each["id"] for each in ids["added_tokens"]}
            spelt = {str(i): token for token, i in ids.items()}
        except (OSError, ValueError) as error:
            raise UserError(f"{path}: damaged ({error}); `--verify` lists all damage") from error
        tokens = [spelt.get(token, "") for token in tokens]
    pieces = [b""] * SPECIALS + [token.removeprefix(space).strip(line).encode() for token in tokens]
    pieces[UNKNOWN] = b"\0"
    eos = [number == EOS for number in range(SPECIALS)]  # a word of its own, without bytes
    return Spelling(
        np.array(eos + [token.startswith((space, line)) for token in tokens]),
        np.array(eos + [token.endswith(line) for token in tokens]),
        np.array([hash_bytes(piece) for piece in pieces]),
        np.array([len(piece) for piece in pieces], np.int32),
    )


def count_words(path: str, spelling: Spelling) -> tuple[np.ndarray, np.ndarray]:
    """The distinct words of a part, as ascending hashes (uint64), and their occurrences.

    Memory: about 200 MB, and 50 bytes a distinct word. UserError: the files do not fit each other.
    """
    types, counts = np.zeros(0, np.uint64), np.zeros(0, np.int64)
    for words, _ in word_blocks(path, spelling):
        types, where = np.unique(np.concatenate([types, words]), return_inverse=True)
        added = np.concatenate([counts, np.ones(len(words), np.int64)])
        counts = np.bincount(where, added, len(types)).astype(np.int64)
    return types, counts


def word_blocks(path: str, spelling: Spelling) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield blocks of (words,) hashes of the words of a part, and of the numbers of their documents.

    UserError: the files do not fit each other.
    """
    ids, ends = open_part(path)
    held = ids[:0]  # the last word of a block, which may go on in the next
    for start, block in token_blocks(ids):
        start -= len(held)
        block = np.concatenate([held, block])
        first = spelling.begins[block]
        first[0] = True
        first[1:] |= spelling.ends[block[:-1]]
        at = np.flatnonzero(first)
        if start + len(block) < len(ids):
            held = block[at[-1] :]
            block, at = block[: at[-1]], at[:-1]
        if len(at):
            number = np.searchsorted(ends, start, "right")
            breaks = ends[number : np.searchsorted(ends, start + len(block), "left")] - start
            documents = number + np.searchsorted(breaks, at, "right")
            sizes = spelling.sizes[block]
            is_word = np.add.reduceat(sizes, at) > 0  # not eos or a line break
            offsets = np.cumsum(sizes, dtype=np.int64) - sizes
            offsets -= np.repeat(offsets[at], np.diff(at, append=len(sizes)))  # of a token in its word
            codes = spelling.codes[block] * _powers(int(offsets.max()) + 1)[offsets]
            yield np.add.reduceat(codes, at)[is_word], documents[is_word]
