"""Hashes of words and n-grams, computed from text or from token ids; new words of a mega-batch.

The hash of a word is a polynomial of its bytes, so it can be composed from the hashes of its tokens
without decoding them. All hashes are uint64, computed modulo 2**64; they depend on the spelling of
the word only.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from alma.errors import UserError
from alma.stream import SPECIALS, Stream
from alma.workers import Workers
from data_prep.dictionary import EOS, UNKNOWN, read_tokens
from data_prep.lossless import BYTES, flat_steps, has_bytes
from data_prep.similarity import open_part, token_blocks
from data_prep.work import run_all

_IDS = ("encoder.json", "vocab.json", "tokenizer.json")  # files with the ids of byte-level tokens
_BYTE = "surrogateescape"  # spells a byte that is no UTF-8 as one character
_PLACE = np.uint64(0x9E3779B97F4A7C15)  # odd; its powers weight the bytes of a word
NEXT = np.uint64(0xD6E8FEB86659FD93)  # odd; its powers weight the words of an n-gram
_BYTES = np.random.default_rng(0).integers(0, 2**64, 256, np.uint64)
_NEWLINE, _SPACE = b"\n "


def hash_bytes(text: bytes) -> np.uint64:
    """The hash of a word, or of the first bytes of a word."""
    return (_BYTES[np.frombuffer(text, np.uint8)] * _powers(len(text))).sum(dtype=np.uint64)


def _powers(count: int) -> np.ndarray:
    return np.cumprod(np.append(np.uint64(1), np.full(count, _PLACE)))[:count]


def hash_texts(texts: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """Hashes of all words of normalised texts, and the numbers of their texts; (words,) each."""
    data = np.frombuffer(b"\n".join(texts), np.uint8)
    gaps = np.flatnonzero((data == _SPACE) | (data == _NEWLINE))
    starts = np.concatenate([[0], gaps + 1])
    sizes = np.diff(starts, append=len(data) + 1)  # bytes of each word and the gap after it
    place = np.arange(len(data)) - np.repeat(starts, sizes)[: len(data)]
    values = _BYTES[data] * _powers(int(sizes.max()))[place]
    values[gaps] = 0
    ends = np.cumsum([len(text) + 1 for text in texts])
    return np.add.reduceat(values, starts), np.searchsorted(ends, starts, "right")


def n_grams(words: np.ndarray, owners: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Hashes of all n-grams of consecutive words with the same owner, and their owners.

    `words` (words,) are hashes, `owners` (words,) for example the numbers of the texts. Both
    results are (n-grams,).
    """
    count = max(len(words) - n + 1, 0)
    within = np.flatnonzero(owners[:count] == owners[n - 1 :])
    hashes = words[:count].copy()
    for k in range(1, n):
        hashes *= NEXT
        hashes += words[k : k + count]
    hashes ^= hashes >> np.uint64(32)
    return hashes[within], owners[within]


class Spelling(NamedTuple):
    """How tokens spell words, four arrays (V,).

    With it, the hash of a word does not depend on how the word is cut into tokens.
    """

    begins: np.ndarray  # whether the token always begins a word
    ends: np.ndarray  # whether the next token begins a word
    codes: np.ndarray  # `hash_bytes` of the token without its marks of space, uint64
    sizes: np.ndarray  # bytes of the token without its marks, int32


def new_shares(stream: Stream, workers: Workers) -> list[float]:
    """Share of the words of each mega-batch that occur in no mega-batch before it."""
    spelling = read_spelling(stream)
    tasks = [(stream.path(part), spelling) for part in stream.megabatches]
    weights = [part.tokens for part in stream.megabatches]
    seen = np.zeros(0, np.uint64)
    shares = []
    for types, counts in run_all(workers, "words", count_words, tasks, weights, "token"):
        is_new = ~np.isin(types, seen)
        shares.append(float(counts[is_new].sum() / counts.sum()))
        seen = np.union1d(seen, types)
    return shares


def read_spelling(stream: Stream) -> Spelling:
    """The spelling of a stream's tokens. UserError: damaged files."""
    tokens = read_tokens(stream.directory)
    space = "\u2581"  # SentencePiece's mark for a space; no token contains a line break
    line = "\n"
    ids_file = next((name for name in _IDS if name in stream.files), None)
    if ids_file:
        spelt, is_byte_level = _spelt_tokens(stream.directory / ids_file)
        tokens = [spelt.get(token, "") for token in tokens]
        if is_byte_level:
            space = "\u0120"  # as byte-level BPE spells a space, and a line break
            line = "\u010a"
    bytes_of_tokens = []
    for token in tokens:
        # A model of Hugging Face may have tokens of many spaces, which only chats have.
        word = token.lstrip(space) if ids_file else token.removeprefix(space)
        bytes_of_tokens.append(word.strip(line).encode("utf-8", _BYTE))
    pieces = [b""] * SPECIALS + bytes_of_tokens
    pieces[UNKNOWN] = b"\0"
    # eos counts as a word of its own, without bytes, so it separates words.
    is_eos = [number == EOS for number in range(SPECIALS)]
    return Spelling(
        begins=np.array(is_eos + [token.startswith((space, line)) for token in tokens]),
        ends=np.array(is_eos + [token.endswith(line) for token in tokens]),
        codes=np.array([hash_bytes(piece) for piece in pieces]),
        sizes=np.array([len(piece) for piece in pieces], np.int32),
    )


def _spelt_tokens(path: Path) -> tuple[dict[str, str], bool]:
    """The tokens in a file of _IDS, by their ids as text, and whether they are byte-level.

    The tokens of bytes, which SentencePiece spells as <0xE9>, are those bytes, see _BYTE.
    UserError: the file is damaged.
    """
    try:
        ids = json.loads(path.read_text("utf-8"))
        is_byte_level = True
        if path.name == "tokenizer.json":
            steps = [*flat_steps(ids["normalizer"]), *flat_steps(ids["pre_tokenizer"])]
            is_byte_level = has_bytes(steps)
            added = {token["content"]: token["id"] for token in ids["added_tokens"]}
            ids = ids["model"]["vocab"]
            if isinstance(ids, list):  # of a Unigram model: pairs of token and score
                ids = {token: number for number, (token, _) in enumerate(ids)}
            ids |= added
        tokens = {str(i): token for token, i in ids.items()}
    except (OSError, LookupError, TypeError, ValueError) as error:
        raise UserError(f"{path}: damaged ({error}); `--verify` lists all damage") from error
    if not is_byte_level:
        spellings = {token: bytes([i]).decode("utf-8", _BYTE) for i, token in enumerate(BYTES)}
        tokens = {i: spellings.get(token, token) for i, token in tokens.items()}
    return tokens, is_byte_level


def count_words(path: str, spelling: Spelling) -> tuple[np.ndarray, np.ndarray]:
    """The distinct words of a part, as ascending hashes (uint64), and their occurrences.

    Memory: about 200 MB, and 50 bytes a distinct word. UserError: the files do not fit each other.
    """
    types = np.zeros(0, np.uint64)
    counts = np.zeros(0, np.int64)
    for words, _ in word_blocks(path, spelling):
        types, places = np.unique(np.concatenate([types, words]), return_inverse=True)
        occurrences = np.concatenate([counts, np.ones(len(words), np.int64)])
        counts = np.bincount(places, occurrences, len(types)).astype(np.int64)
    return types, counts


def word_blocks(path: str, spelling: Spelling) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield blocks of (words,) hashes of the words of a part, and their documents' numbers.

    UserError: the files do not fit each other.
    """
    ids, ends = open_part(path)
    last_word = ids[:0]  # tokens of the previous block's last word, which may continue here
    for start, block in token_blocks(ids):
        start -= len(last_word)
        block = np.concatenate([last_word, block])
        begins = spelling.begins[block]
        begins[0] = True
        begins[1:] |= spelling.ends[block[:-1]]
        starts = np.flatnonzero(begins)
        if start + len(block) < len(ids):
            last_word = block[starts[-1] :]
            block = block[: starts[-1]]
            starts = starts[:-1]
        if len(starts):
            sizes = spelling.sizes[block]
            is_word = np.add.reduceat(sizes, starts) > 0  # false for eos and line breaks
            documents = _documents_of(starts, ends, start, len(block))
            yield _word_hashes(block, starts, spelling)[is_word], documents[is_word]


def _documents_of(starts: np.ndarray, ends: np.ndarray, offset: int, size: int) -> np.ndarray:
    """(words,) numbers of the documents of words that begin at `starts` in a block.

    The block is tokens [offset, offset + size) of the part; `ends`: see `open_part`.
    """
    first = np.searchsorted(ends, offset, "right")
    stop = np.searchsorted(ends, offset + size, "left")
    return first + np.searchsorted(ends[first:stop] - offset, starts, "right")


def _word_hashes(block: np.ndarray, starts: np.ndarray, spelling: Spelling) -> np.ndarray:
    """(words,) hashes of the words of a block of tokens that begin at `starts`."""
    sizes = spelling.sizes[block]
    offsets = np.cumsum(sizes, dtype=np.int64) - sizes
    offsets -= np.repeat(offsets[starts], np.diff(starts, append=len(sizes)))  # within its word
    codes = spelling.codes[block] * _powers(int(offsets.max()) + 1)[offsets]
    return np.add.reduceat(codes, starts)
