"""Bits a byte of dated texts: language models of hashed byte n-grams.

The Beige Book by quarter, RFCs by year. A model counts contexts of 0 to 5 bytes in the 8 newest
periods, and interpolates them: the longer context has the weight n / (n + 5) at n occurrences. Of
each period the last 4,000 bytes are tested and 60,000 other bytes trained on.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.retraining.inputs import Inputs, read_dated

Array = NDArray[Any]
"""Of bytes, hashes, counts or bits."""
WINDOW = 8
_ORDERS = 6
_BINS = 2**20
_PRIOR = 5.0
_TRAINED = 60_000  # bytes a period
_TESTED = 4_000
_FIRST_OF_RFCS = "1990"  # before, some years have less than that


def beige_book(inputs: Inputs) -> tuple[list[str], Array]:
    """Quarters, and bits a byte of each model on each quarter, (models, quarters)."""
    texts: dict[str, list[str]] = {}
    for document in read_dated(inputs.data / "dated" / "beige_book.jsonl.zst"):
        year, month = document.date.split("-")[:2]
        texts.setdefault(f"{year}-Q{(int(month) + 2) // 3}", []).append(document.text)
    return _errors_by_period(texts)


def rfcs(inputs: Inputs) -> tuple[list[str], Array]:
    """Years from 1990 on, and bits a byte, (models, years): an eighth of all RFCs."""
    texts: dict[str, list[str]] = {}
    for document in read_dated(inputs.data / "dated" / "rfc_eighth.jsonl.zst"):
        if document.date >= _FIRST_OF_RFCS:
            texts.setdefault(document.date, []).append(document.text)
    return _errors_by_period(texts)


def _errors_by_period(texts: dict[str, list[str]]) -> tuple[list[str], Array]:
    """Periods, and bits a byte, of the texts by period."""
    names = sorted(texts)
    tested = []
    trained = []
    for name in names:
        coded = np.frombuffer("\n".join(texts[name]).encode(), np.uint8)
        tested.append(coded[-_TESTED:])
        trained.append(coded[:-_TESTED][:_TRAINED])
    return names, matrix_of_bits(trained, tested)


def matrix_of_bits(trained: list[Array], tested: list[Array]) -> Array:
    """Bits a byte of the model of each period on each period; bytes of each, uint8 (bytes,)."""
    contexts = np.zeros((_ORDERS, _BINS), np.float32)
    pairs = np.zeros((_ORDERS, _BINS), np.float32)
    hashed_tests = [_hashes(coded) for coded in tested]
    test_contexts = np.concatenate([hashed[0] for hashed in hashed_tests], 1)
    test_pairs = np.concatenate([hashed[1] for hashed in hashed_tests], 1)
    ends = np.cumsum([hashed[0].shape[1] for hashed in hashed_tests])[:-1]
    bits = np.empty((len(trained), len(tested)))
    for until in range(len(trained)):
        _count(contexts, pairs, trained[until], 1)
        if until >= WINDOW:
            _count(contexts, pairs, trained[until - WINDOW], -1)
        chance = np.full(test_contexts.shape[1], 1 / 256)
        for order in range(_ORDERS):
            n = contexts[order][test_contexts[order]]
            chance = (pairs[order][test_pairs[order]] + _PRIOR * chance) / (n + _PRIOR)
        by_period = np.split(-np.log2(np.minimum(chance, 1.0)), ends)
        bits[until] = [float(period.mean()) for period in by_period]
    return bits


def _count(contexts: Array, pairs: Array, coded: Array, sign: int) -> None:
    """Add the contexts and bytes of a text to the counts, or take them away."""
    hashed_contexts, hashed_pairs = _hashes(coded)
    for order in range(_ORDERS):
        contexts[order] += sign * np.bincount(hashed_contexts[order], minlength=_BINS)
        pairs[order] += sign * np.bincount(hashed_pairs[order], minlength=_BINS)


def _hashes(coded: Array) -> tuple[Array, Array]:
    """Bins of the context of each order before each byte, and of both together.

    Two arrays (orders, bytes without the first ones).
    """
    wide = coded.astype(np.uint64)
    targets = wide[_ORDERS - 1 :]
    contexts = []
    pairs = []
    context = np.zeros(len(targets), np.uint64)
    for order in range(_ORDERS):
        if order:
            start = _ORDERS - 1 - order
            context = context * np.uint64(257) + wide[start : start + len(targets)] + np.uint64(1)
        contexts.append(_bin(context))
        pairs.append(_bin(context * np.uint64(257) + targets + np.uint64(7)))
    return np.array(contexts), np.array(pairs)


def _bin(keys: Array) -> Array:
    """Multiplicative hash of 64 bits (Knuth), as a bin."""
    mixed = keys * np.uint64(0x9E3779B97F4A7C15)
    return (mixed >> np.uint64(44)).astype(np.int64)
