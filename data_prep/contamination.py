"""Contamination: how much of the held-out parts occurs in the training data.

An n-gram of words of a held-out part is seen if a mega-batch that the learner receives before it is tested
on the part has it: any mega-batch of an i.i.d. stream; in an ordered one those up to the part's own.
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
MOSTLY = 0.8  # a document counts as seen if more than this share of its n-grams is
SAMPLE = 1 << 23
"""n-grams of all held-out parts together. Of larger parts the beginnings count: their order is random."""

NOTES = f"""\
Contamination. {N}-grams: share of the {N}-grams of words of a held-out part that occur in the training data
{{where}}; documents: share of its documents with more than {MOSTLY:.0%} of their {N}-grams there."""


def contamination(stream: Stream, workers: Workers) -> dict[str, list[float]]:
    """By name of a held-out part: the share of its n-grams that are seen, then that of its documents.

    An n-gram is seen if it occurs in the training data, a document if more than MOSTLY of its n-grams are;
    documents without an n-gram are left out.
    Memory of a process: about 0.5 GB for large held-out parts. UserError: damaged files.
    """
    spelling = read_spelling(stream)
    parts = [*stream.held_out, *stream.held_out_valid] if stream.ordered else [stream.test, stream.valid]
    batches = len(stream.megabatches)
    until = [number % batches + 1 if stream.ordered else batches for number in range(len(parts))]
    paths, limit = [stream.path(part) for part in parts], max(1, SAMPLE // len(parts))
    tasks = [(stream.path(part), paths, spelling, limit) for part in stream.megabatches]
    weights = [part.tokens for part in stream.megabatches]
    found = run_all(workers, "contamination", seen, tasks, weights, "token")
    shares, start = {}, 0
    for part, arrived in zip(parts, until, strict=True):
        _, documents = held_out(stream.path(part), spelling, limit)
        hits = np.zeros(len(documents), bool)
        for packed in found[:arrived]:
            hits |= np.unpackbits(packed, count=start + len(documents))[start:].astype(bool)
        start += len(documents)
        counts, of_document = np.bincount(documents), np.bincount(documents, hits)
        mostly = of_document[counts > 0] > MOSTLY * counts[counts > 0]
        shares[part.name] = [float(each.mean()) if len(each) else 0.0 for each in (hits, mostly)]
    return shares


def report(stream: Stream, workers: Workers) -> str:
    """The contamination of each held-out part as a table."""
    found = contamination(stream, workers)
    rows = [["", f"{N}-grams", "documents"]]
    rows += [[name, *(f"{share:.1%}" for share in shares)] for name, shares in found.items()]
    where = "up to its mega-batch" if stream.ordered else "of all mega-batches"
    near = near_dropped([stream.corpus, *(each["corpus"] for each in stream.appended)])
    kept = "Near duplicates were kept; `alma data --near-duplicates drop` leaves them out."
    return "\n".join([NOTES.format(where=where), as_text(rows), f"Dropped: {near}." if near else kept])


def near_dropped(corpora: Sequence[Mapping[str, Any]]) -> str:
    """How many near duplicates were dropped; empty if they are kept."""
    counted = [corpus for corpus in corpora if "near_duplicate_documents" in corpus]
    documents = sum(corpus["near_duplicate_documents"] for corpus in counted)
    words = sum(corpus["near_duplicate_words"] for corpus in counted)
    return f"{documents:,} near duplicates ({words:,} words)" if counted else ""


def seen(path: str, held_out_paths: list[str], spelling: Spelling, limit: int) -> np.ndarray:
    """Whether each n-gram of the held-out parts, one part after another, occurs in a part; packed bits."""
    wanted = np.concatenate([held_out(each, spelling, limit)[0] for each in held_out_paths])
    known, where = np.unique(wanted, return_inverse=True)
    hits = np.zeros(len(known), bool)
    # Most n-grams of the part fall into an empty cell of this table, which is much faster than a search.
    shift = np.uint64(64 - 4 - len(known).bit_length())
    cells = np.zeros(2 ** (64 - int(shift)), bool)
    cells[known >> shift] = True
    for hashes, _ in part_n_grams(path, spelling):
        hashes = hashes[cells[hashes >> shift]]
        at = np.minimum(np.searchsorted(known, hashes), max(len(known) - 1, 0))
        hits[at[known[at] == hashes]] = True
    return np.packbits(hits[where])


def held_out(path: str, spelling: Spelling, limit: int) -> tuple[np.ndarray, np.ndarray]:
    """The first `limit` n-grams of a part, and the number of the document of each."""
    hashes, documents = [np.zeros(0, np.uint64)], [np.zeros(0, np.int64)]
    for block, numbers in part_n_grams(path, spelling):
        hashes.append(block)
        documents.append(numbers)
        if sum(map(len, hashes)) >= limit:
            break
    return np.concatenate(hashes)[:limit], np.concatenate(documents)[:limit]


def part_n_grams(path: str, spelling: Spelling) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield blocks of the n-grams of a part, within documents, and of the numbers of their documents."""
    words, documents = np.zeros(0, np.uint64), np.zeros(0, np.int64)
    for block, numbers in word_blocks(path, spelling):
        words, documents = np.concatenate([words, block]), np.concatenate([documents, numbers])
        yield n_grams(words, documents, N)
        words, documents = words[1 - N :], documents[1 - N :]
