"""Contamination: how much of the held-out parts occurs in the training data.

An n-gram of words of a held-out part counts as seen if it occurs in a mega-batch that the learner
receives before it is tested on the part. In an i.i.d. stream this is any mega-batch, in an ordered
stream one up to the part's own.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from alma.stream import Stream
from alma.tables import as_text
from alma.workers import Workers
from data_prep.words import Spelling, n_grams, read_spelling, word_blocks
from data_prep.work import run_all

N = 8  # words of an n-gram
MOSTLY = 0.8  # a document counts as seen if more than this fraction of its n-grams is seen
SAMPLE = 1 << 23
"""Most n-grams of all held-out parts together. Of larger parts only the beginning is counted, which
is a random sample because documents are in random order."""

NOTES = (
    f"Contamination. {N}-grams: share of the {N}-grams of words of a held-out part that occur in "
    "the training data\n"
    f"{{where}}; documents: share of its documents with more than {MOSTLY:.0%} of their {N}-grams "
    "there."
)


def contamination(stream: Stream, workers: Workers) -> dict[str, list[float]]:
    """For each held-out part by name: the fraction of its n-grams and of its documents seen.

    An n-gram is seen if it occurs in the training data, a document if more than MOSTLY of its
    n-grams are; documents without an n-gram are left out. Memory of a process: about 0.5 GB for
    large held-out parts. UserError: damaged files.
    """
    spelling = read_spelling(stream)
    batches = len(stream.megabatches)
    if stream.ordered:
        parts = [*stream.held_out, *stream.held_out_valid]
        batches_before = [number % batches + 1 for number in range(len(parts))]
    else:
        parts = [stream.test, stream.valid]
        batches_before = [batches, batches]
    paths = [stream.path(part) for part in parts]
    limit = max(1, SAMPLE // len(parts))
    tasks = [(stream.path(part), paths, spelling, limit) for part in stream.megabatches]
    weights = [part.tokens for part in stream.megabatches]
    hits_of_batches = run_all(workers, "contamination", seen, tasks, weights, "token")
    shares = {}
    start = 0  # offset of the part's n-grams among those of all parts
    for part, arrived in zip(parts, batches_before, strict=True):
        _, documents = held_out(stream.path(part), spelling, limit)
        end = start + len(documents)
        hits = np.zeros(len(documents), bool)
        for packed in hits_of_batches[:arrived]:
            hits |= np.unpackbits(packed, count=end)[start:].astype(bool)
        start = end
        n_gram_counts = np.bincount(documents)
        hit_counts = np.bincount(documents, hits)
        has_n_grams = n_gram_counts > 0
        mostly = hit_counts[has_n_grams] > MOSTLY * n_gram_counts[has_n_grams]
        shares[part.name] = [_mean(hits), _mean(mostly)]
    return shares


def _mean(flags: np.ndarray) -> float:
    """The share of True; 0 without elements."""
    return float(flags.mean()) if len(flags) else 0.0


def report(stream: Stream, workers: Workers) -> str:
    """The contamination of each held-out part as a table."""
    rows = [["", f"{N}-grams", "documents"]]
    for name, shares in contamination(stream, workers).items():
        rows.append([name, *(f"{share:.1%}" for share in shares)])
    training_data = "up to its mega-batch" if stream.ordered else "of all mega-batches"
    near = near_dropped([stream.corpus, *(addition["corpus"] for addition in stream.appended)])
    note = "Near duplicates were kept; `alma data --near-duplicates drop` leaves them out."
    if near:
        note = f"Dropped: {near}."
    return "\n".join([NOTES.format(where=training_data), as_text(rows), note])


def near_dropped(corpora: Sequence[Mapping[str, Any]]) -> str:
    """How many near duplicates were dropped; empty if they are kept."""
    counted = [corpus for corpus in corpora if "near_duplicate_documents" in corpus]
    documents = sum(corpus["near_duplicate_documents"] for corpus in counted)
    words = sum(corpus["near_duplicate_words"] for corpus in counted)
    return f"{documents:,} near duplicates ({words:,} words)" if counted else ""


def seen(path: str, held_out_paths: list[str], spelling: Spelling, limit: int) -> np.ndarray:
    """Whether each n-gram of the held-out parts, one part after another, occurs in a part.

    Returned as packed bits.
    """
    held_out_grams = [
        held_out(held_out_path, spelling, limit)[0] for held_out_path in held_out_paths
    ]
    distinct, places = np.unique(np.concatenate(held_out_grams), return_inverse=True)
    hits = np.zeros(len(distinct), bool)
    # A table that tells for the leading bits of a hash whether any held-out n-gram has them. Most
    # n-grams of the part fall into an empty cell, which is much faster to find than by a search.
    shift = np.uint64(64 - 4 - len(distinct).bit_length())
    cells = np.zeros(2 ** (64 - int(shift)), bool)
    cells[distinct >> shift] = True
    for hashes, _ in part_n_grams(path, spelling):
        candidates = hashes[cells[hashes >> shift]]
        at = np.minimum(np.searchsorted(distinct, candidates), max(len(distinct) - 1, 0))
        hits[at[distinct[at] == candidates]] = True
    return np.packbits(hits[places])


def held_out(path: str, spelling: Spelling, limit: int) -> tuple[np.ndarray, np.ndarray]:
    """The first `limit` n-grams of a part, and the number of the document of each."""
    hashes = [np.zeros(0, np.uint64)]
    documents = [np.zeros(0, np.int64)]
    for block, numbers in part_n_grams(path, spelling):
        hashes.append(block)
        documents.append(numbers)
        if sum(map(len, hashes)) >= limit:
            break
    return np.concatenate(hashes)[:limit], np.concatenate(documents)[:limit]


def part_n_grams(path: str, spelling: Spelling) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield blocks of the n-grams of a part, within documents, and of their documents' numbers."""
    words = np.zeros(0, np.uint64)
    documents = np.zeros(0, np.int64)
    for block, numbers in word_blocks(path, spelling):
        words = np.concatenate([words, block])
        documents = np.concatenate([documents, numbers])
        yield n_grams(words, documents, N)
        words = words[1 - N :]
        documents = documents[1 - N :]
