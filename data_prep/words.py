"""Words of a part, put together from their tokens, and the share of words that a mega-batch brings."""

import json
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from alma.errors import UserError
from alma.stream import Stream
from alma.workers import Workers
from data_prep.dictionary import EOS, SPECIALS, UNKNOWN, read_tokens
from data_prep.shingles import hash_bytes, hash_pieces
from data_prep.similarity import open_part, token_blocks
from data_prep.work import run_all

_IDS = ("encoder.json", "vocab.json", "tokenizer.json")  # files with the ids of byte-level tokens


@dataclass(frozen=True)
class Spelling:
    """How tokens make words, four arrays (V,); a word does not depend on the tokens it was cut into."""

    begins: np.ndarray  # whether a word begins with the token, wherever it stands
    ends: np.ndarray  # whether the next token begins a word
    codes: np.ndarray  # `shingles.hash_bytes` of the token without its marks of space, uint64
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
                added = {token["content"]: token["id"] for token in ids["added_tokens"]}
                ids = ids["model"]["vocab"] | added
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
            is_word = np.add.reduceat(spelling.sizes[block], at) > 0  # not eos or a line break
            hashes = hash_pieces(spelling.codes[block], spelling.sizes[block], at)
            yield hashes[is_word], documents[is_word]
