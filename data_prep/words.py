"""Words of a part, put together from their tokens, and the share of words that a mega-batch brings."""

import json

import numpy as np

from alma.errors import UserError
from alma.stream import Stream
from alma.workers import Workers
from data_prep.dictionary import EOS, SPECIALS, read_tokens
from data_prep.similarity import open_part, token_blocks
from data_prep.work import run_all

_SPACES = {"tokenizer.model": "\u2581", "encoder.json": "\u0120"}
"""What begins a token that follows a space, by the file of the tokenizer."""
_FACTOR = 0x9E3779B97F4A7C15  # odd; its powers weight the tokens of a word by their places


def new_shares(stream: Stream, workers: Workers) -> list[float] | None:
    """Share of the words of each mega-batch that are in none before it; None: the tokenizer is unknown."""
    begins = word_begins(stream)
    if begins is None:
        return None
    tasks = [(stream.path(part), begins) for part in stream.megabatches]
    weights = [part.tokens for part in stream.megabatches]
    known = np.zeros(0, np.uint64)
    shares = []
    for types, counts in run_all(workers, "words", count_words, tasks, weights, "token"):
        shares.append(float(counts[~np.isin(types, known)].sum() / counts.sum()))
        known = np.union1d(known, types)
    return shares


def word_begins(stream: Stream) -> np.ndarray | None:
    """(V,) whether a word begins with each token, wherever it stands; None: the tokenizer is unknown.

    UserError: the tokenizer's files are damaged.
    """
    tokens = read_tokens(stream.directory)
    space = next((mark for name, mark in _SPACES.items() if name in stream.files), None)
    if space is None:
        return None
    if "encoder.json" in stream.files:
        path = stream.directory / "encoder.json"
        try:
            spelling = {str(i): token for token, i in json.loads(path.read_text("utf-8")).items()}
        except (OSError, ValueError) as error:
            raise UserError(f"{path}: damaged ({error}); `--verify` lists all damage") from error
        tokens = [spelling.get(token, "") for token in tokens]
    return np.array([False] * SPECIALS + [token.startswith(space) for token in tokens])


def count_words(path: str, begins: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The distinct words of a part, as ascending hashes of their tokens (uint64), and their occurrences.

    A word begins with a line or with a token in `begins` (V,). Memory: about 200 MB, and 50 bytes a distinct
    word. UserError: the files do not fit each other.
    """
    ids, _ = open_part(path)
    begins = begins.copy()
    begins[EOS] = True  # it is cut off as a word of its own, which is then left out
    code = np.random.default_rng(0).integers(0, 2**64, len(begins), np.uint64)
    types, counts = np.zeros(0, np.uint64), np.zeros(0, np.int64)
    held = ids[:0]  # the last word of a block, which may go on in the next
    for start, block in token_blocks(ids):
        block = np.concatenate([held, block])
        first = begins[block]
        first[0] = True
        first[1:] |= block[:-1] == EOS
        at = np.flatnonzero(first)
        if start + len(block) - len(held) < len(ids):
            held = block[at[-1] :]
            block, at = block[: at[-1]], at[:-1]
        if not len(at):
            continue
        lengths = np.diff(at, append=len(block))
        place = np.arange(len(block)) - np.repeat(at, lengths)
        weights = np.cumprod(np.full(lengths.max(), _FACTOR, np.uint64))
        words = np.add.reduceat(code[block] * weights[place], at)[block[at] != EOS]
        types, where = np.unique(np.concatenate([types, words]), return_inverse=True)
        added = np.concatenate([counts, np.ones(len(words), np.int64)])
        counts = np.bincount(where, added, len(types)).astype(np.int64)
    return types, counts
