"""Cut the output of fairseq-preprocess into mega-batches of equal size (section 5).

Mega-batches have whole documents, chosen at random. They are arrays of item numbers, so no token is
copied.
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from fairseq.data import ConcatDataset, Dictionary
from fairseq.data.encoders.gpt2_bpe_utils import bytes_to_unicode
from fairseq.data.indexed_dataset import MMapIndexedDataset
from numpy.typing import NDArray

from alma.errors import UserError
from alma.schema import parse_json
from alma.stream import DTYPES, read_index

MEGABATCH_WORDS = 440_000_000  # words per mega-batch in the paper (section 5)
_CHUNK = 1 << 18  # items per pass of the word count


def indexed(prefixes: Sequence[str]) -> Any:
    """The concatenated items of .bin/.idx files as a dataset with `sizes`."""
    shards = [MMapIndexedDataset(prefix) for prefix in prefixes]
    return shards[0] if len(shards) == 1 else ConcatDataset(shards)


def checked(prefixes: list[str]) -> list[str]:
    """Return `prefixes` unchanged if all their files are there and complete.

    Raises UserError if PREFIX.bin or PREFIX.idx is missing, or their sizes do not match.
    """
    for prefix in prefixes:
        for suffix in (".idx", ".bin"):
            if not os.path.isfile(prefix + suffix):
                raise UserError(f"{prefix}{suffix} is missing; make the data again")
        sizes, code = read_index(prefix + ".idx")
        expected = int(sizes.sum(dtype=np.int64)) * np.dtype(DTYPES[code]).itemsize
        actual = os.path.getsize(prefix + ".bin")
        if actual != expected:
            raise UserError(
                f"{prefix}.bin has {actual} bytes, its index says {expected}; make it again"
            )
    return prefixes


def documents(sizes: NDArray[np.integer]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """First item and end item (exclusive) of each document, (documents,) each.

    An item of length 1 ends a document: fairseq-preprocess writes it for a blank line. Without such
    items, each item is a document.
    """
    ends = np.flatnonzero(np.asarray(sizes) == 1) + 1
    if not len(ends):
        ends = np.arange(1, len(sizes) + 1)
    elif ends[-1] != len(sizes):
        ends = np.append(ends, len(sizes))
    return np.concatenate([[0], ends[:-1]]).astype(np.int64), ends.astype(np.int64)


def count_words(
    prefixes: Sequence[str], dictionary: Dictionary, encoder_json: str | None = None
) -> NDArray[np.int64]:
    """Words per item of the .bin/.idx files, (items,), counted from the ids at the speed of the
    disk.

    Words are separated by white space, as for `alma data`. A rare Unicode space whose bytes GPT-2's
    BPE splits over two tokens is missed. `encoder_json` is the path of GPT-2's encoder.json, needed
    if the dictionary's symbols are GPT-2's ids as numbers. Raises UserError if no symbol has a word
    mark, or if encoder.json is missing, damaged or of another vocabulary.
    """
    symbols = dictionary.symbols
    if has_ids(dictionary):
        symbols = _spelled(dictionary, encoder_json)
    is_gpt2 = any(symbol.startswith("Ġ") for symbol in symbols)
    if not is_gpt2 and not any(symbol.startswith("▁") for symbol in symbols):
        problem = "the dictionary has no SentencePiece or GPT-2 word marks to count words"
        raise UserError(f"{problem}: give --megabatch-tokens instead of --megabatch-words")
    starts_word = np.array([symbol.startswith("▁") for symbol in symbols])  # (V,)
    is_blank = None  # (V,), for GPT-2 only: symbols of white space, and special ones
    if is_gpt2:
        starts_word, is_blank = _gpt2_marks(symbols, dictionary)
    counts = [words for prefix in prefixes for words in _words_of(prefix, starts_word, is_blank)]
    return np.concatenate(counts)


def _spelled(dictionary: Dictionary, encoder_json: str | None) -> list[str]:
    """Translate a dictionary whose symbols are GPT-2's ids to GPT-2's tokens, (V,).

    Raises UserError as `count_words`.
    """
    if not encoder_json:
        problem = "dict.txt has GPT-2's ids, in which --megabatch-words sees no words"
        remedy = "give its encoder.json by --gpt2-encoder-json FILE, or --megabatch-tokens N"
        raise UserError(f"{problem}: {remedy}")
    try:
        ids = parse_json(Path(encoder_json).read_text("utf-8"))
        tokens = {str(number): token for token, number in ids.items()}
    except (OSError, ValueError, AttributeError) as error:
        problem = f"not GPT-2's encoder.json ({error})"
        raise UserError(f"--gpt2-encoder-json {encoder_json}: {problem}") from None
    unknown = [symbol for symbol in _data_symbols(dictionary) if symbol not in tokens]
    if unknown:
        problem = f"of another vocabulary: it has no token {unknown[0]}, which dict.txt has"
        remedy = "give the file of the text"
        raise UserError(f"--gpt2-encoder-json {encoder_json}: {problem}; {remedy}")
    return [tokens.get(symbol, symbol) for symbol in dictionary.symbols]


def _gpt2_marks(
    symbols: Sequence[str], dictionary: Dictionary
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Two masks over GPT-2's symbols, (V,) each: those that start a word, and the blank ones.

    A symbol starts a word if its text begins with white space. It is blank if it is a special
    symbol or only white space.
    """
    byte_of = {character: number for number, character in bytes_to_unicode().items()}
    texts = []
    for symbol in symbols:
        encoded = bytes(byte_of.get(character, 0) for character in symbol)
        texts.append(encoded.decode("utf-8", "replace"))
    is_blank = np.array([text.isspace() for text in texts])
    is_blank[[dictionary.bos(), dictionary.pad(), dictionary.eos()]] = True
    starts_word = np.array([text[:1].isspace() for text in texts]) & ~is_blank
    return starts_word, is_blank


def _words_of(
    prefix: str, starts_word: NDArray[np.bool_], is_blank: NDArray[np.bool_] | None
) -> Iterator[NDArray[np.int64]]:
    """Words per item of PREFIX.bin, in chunks of items."""
    sizes, code = read_index(f"{prefix}.idx")
    tokens = np.memmap(f"{prefix}.bin", DTYPES[code], "r")
    edges = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
    for first in range(0, len(sizes), _CHUNK):
        inside = edges[first : first + _CHUNK + 1]
        ids = tokens[inside[0] : inside[-1]]
        heads = inside[:-1] - inside[0]
        begins = starts_word[ids]
        if is_blank is not None:  # GPT-2 marks no word at the start of an item or after a tab
            gaps = is_blank[ids]
            begins[1:] |= gaps[:-1]
            begins[heads] = True
            begins &= ~gaps
        yield np.add.reduceat(begins, heads, dtype=np.int64)


def has_ids(dictionary: Dictionary) -> bool:
    """Whether the symbols are GPT-2's ids as numbers, as for RoBERTa."""
    symbols = _data_symbols(dictionary)
    return bool(symbols) and all(symbol.isdecimal() for symbol in symbols)


def _data_symbols(dictionary: Dictionary) -> list[str]:
    """The symbols of the data, without special ones and the padding symbols ("madeupword") that
    fairseq adds.
    """
    symbols = dictionary.symbols[dictionary.nspecial :]
    return [symbol for symbol in symbols if "madeupword" not in symbol]


def assign(
    sizes: NDArray[np.integer], weights: NDArray[np.integer], target: int, seed: int
) -> list[NDArray[np.int64]]:
    """Assign whole documents to mega-batches, in a random order that depends on `seed` alone.

    Returns the item numbers of each. `sizes` (items,) are tokens; `weights` (items,) are words or
    tokens, like `target`. Mega-batch k ends at the document boundary nearest to k * target; the
    number of mega-batches is the total over the target, rounded, and the last one takes the rest.
    UserError: less than half a mega-batch, or a document as long as one.
    """
    first, end = documents(sizes)
    totals = np.concatenate([[0], np.cumsum(weights, dtype=np.int64)])
    order = np.random.default_rng(seed).permutation(len(first))
    running = np.concatenate([[0], np.cumsum((totals[end] - totals[first])[order])])
    megabatches = round(running[-1] / target)
    if megabatches < 1:
        problem = f"{running[-1]} is less than half a mega-batch of {target}"
        raise UserError(f"{problem}: choose a smaller size")
    targets = np.arange(1, megabatches) * target
    above = np.searchsorted(running, targets)
    below = np.maximum(above - 1, 0)
    cuts = np.where(targets - running[below] < running[above] - targets, below, above)
    parts = np.split(order, cuts)
    if not all(len(part) for part in parts):
        raise UserError(f"a document is as long as a mega-batch of {target}: choose a larger size")
    return [_concatenated(first[part], end[part]) for part in parts]


def _concatenated(first: NDArray[np.int64], end: NDArray[np.int64]) -> NDArray[np.int64]:
    """The concatenated ranges [first, end) of documents."""
    lengths = end - first
    before = np.cumsum(lengths) - lengths  # total length of earlier ranges
    return np.arange(lengths.sum()) + np.repeat(first - before, lengths)
