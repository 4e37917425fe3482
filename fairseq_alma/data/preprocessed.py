"""Partition fairseq-preprocess output into mega-batches of equal size: whole documents, at random.

The paper's protocol (section 5). Nothing is copied: a mega-batch is an array of item numbers.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fairseq.data import ConcatDataset, Dictionary
from fairseq.data.indexed_dataset import MMapIndexedDataset
from numpy.typing import NDArray

from alma.errors import UserError
from alma.schema import parse_json
from alma.stream import DTYPES, read_index

_CHUNK = 1 << 18  # items per pass of the word count


def indexed(prefixes: Sequence[str], items: NDArray[np.int64] | None = None) -> Any:
    """The concatenated items of .bin/.idx files, or those in `items` (n,), as a dataset with `sizes`."""
    shards = [MMapIndexedDataset(prefix) for prefix in prefixes]
    corpus = shards[0] if len(shards) == 1 else ConcatDataset(shards)
    if items is None:
        return corpus
    subset: Any = torch.utils.data.Subset(corpus, items)  # type: ignore[arg-type]
    subset.sizes = np.asarray(corpus.sizes)[items]
    return subset


def checked(prefixes: list[str]) -> list[str]:
    """`prefixes`. UserError: PREFIX.bin or .idx of one is missing, or their sizes do not match."""
    for prefix in prefixes:
        for suffix in (".idx", ".bin"):
            if not os.path.isfile(prefix + suffix):
                raise UserError(f"{prefix}{suffix} is missing; make the data again")
        try:
            sizes, code = read_index(prefix + ".idx")
        except UserError as error:
            raise UserError(
                f"{prefix}.idx is truncated or not a fairseq mmap index; make the data again"
            ) from error
        expected = int(sizes.sum(dtype=np.int64)) * np.dtype(DTYPES[code]).itemsize
        actual = os.path.getsize(prefix + ".bin")
        if actual != expected:
            raise UserError(
                f"{prefix}.bin has {actual} bytes, its index says {expected}; make the data again"
            )
    return prefixes


def documents(sizes: NDArray[np.integer]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """First item and end item (exclusive) of each document, (documents,) each.

    An item of length 1 (eos alone, a blank line to fairseq-preprocess) ends a document. Without such items,
    each item is a document.
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
    """Words per item of the .bin/.idx files, (items,), counted from the ids at the speed of the disk.

    `encoder_json`: GPT-2's file, for a dictionary of its ids as numbers. UserError: no symbol has a word
    mark, or the file is missing, damaged or of another vocabulary.
    """
    symbols = _spelled(dictionary, encoder_json)
    starts = np.array([symbol.startswith(("▁", "Ġ")) for symbol in symbols])
    if not starts.any():
        raise UserError(
            "the dictionary has no SentencePiece or GPT-2 word marks, so words cannot be counted: "
            "give --megabatch-tokens instead of --megabatch-words"
        )
    # GPT-2's mark stands for a space, so the first word of an item has none.
    marked_first = not any(symbol.startswith("Ġ") for symbol in symbols)
    counts = []
    for prefix in prefixes:
        sizes, code = read_index(f"{prefix}.idx")
        tokens = np.memmap(f"{prefix}.bin", DTYPES[code], "r")
        edges = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
        for first in range(0, len(sizes), _CHUNK):
            inside = edges[first : first + _CHUNK + 1]
            begins = starts[tokens[inside[0] : inside[-1]]]
            heads = inside[:-1] - inside[0]
            words = np.add.reduceat(begins, heads, dtype=np.int64)
            counts.append(words if marked_first else words + (~begins[heads] & (np.diff(inside) > 1)))
    return np.concatenate(counts)


def _spelled(dictionary: Dictionary, encoder_json: str | None) -> list[str]:
    """The symbols, those that are ids of GPT-2 as its tokens. fairseq pads dictionaries by madeupwords."""
    own = [symbol for symbol in dictionary.symbols[dictionary.nspecial :] if "madeupword" not in symbol]
    if not all(symbol.isdecimal() for symbol in own):
        return dictionary.symbols
    if not encoder_json:
        raise UserError(
            "the dictionary has GPT-2's ids, as for RoBERTa: to count words by --megabatch-words, give its "
            "encoder.json by --gpt2-encoder-json FILE; else give --megabatch-tokens N instead"
        )
    try:
        ids = parse_json(Path(encoder_json).read_text("utf-8"))
        tokens = {str(number): token for token, number in ids.items()}
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"--gpt2-encoder-json {encoder_json}: not GPT-2's encoder.json ({error})") from None
    if missing := [symbol for symbol in own if symbol not in tokens]:
        raise UserError(
            f"--gpt2-encoder-json {encoder_json}: of another vocabulary: it has no token {missing[0]}, which "
            "dict.txt has; give the file that encoded the text"
        )
    return [tokens.get(symbol, symbol) for symbol in dictionary.symbols]


def assign(
    sizes: NDArray[np.integer], weights: NDArray[np.integer], target: int, seed: int
) -> list[NDArray[np.int64]]:
    """Assign whole documents, in a random order that depends on `seed` alone, to mega-batches.

    Returns the item numbers of each. `sizes` (items,) are tokens; `weights` (items,) are words or tokens,
    like `target`. Mega-batch k ends at the document boundary nearest to k * target; the number of
    mega-batches is the total over the target, rounded, and the last one takes the rest. UserError: less than
    half a mega-batch, or a document as long as one.
    """
    first, end = documents(sizes)
    totals = np.concatenate([[0], np.cumsum(weights, dtype=np.int64)])
    order = np.random.default_rng(seed).permutation(len(first))
    running = np.concatenate([[0], np.cumsum((totals[end] - totals[first])[order])])
    megabatches = round(running[-1] / target)
    if megabatches < 1:
        raise UserError(
            f"{running[-1]} in total is less than half a mega-batch of {target}: choose a smaller size"
        )
    targets = np.arange(1, megabatches) * target
    above = np.searchsorted(running, targets)
    below = np.maximum(above - 1, 0)
    cuts = np.where(targets - running[below] < running[above] - targets, below, above)
    parts = np.split(order, cuts)
    if not all(len(part) for part in parts):
        raise UserError(f"a document is as long as a mega-batch of {target}: choose a larger size")
    return [_ranges(first[part], end[part]) for part in parts]


def _ranges(first: NDArray[np.int64], end: NDArray[np.int64]) -> NDArray[np.int64]:
    """The concatenated ranges [first, end), (n,) each."""
    lengths = end - first
    before = np.cumsum(lengths) - lengths  # total length of earlier ranges
    return np.arange(lengths.sum()) + np.repeat(first - before, lengths)
