"""A description of a stream: tables of its parts, and their comparison."""

from collections.abc import Sequence
from itertools import combinations

import numpy as np

from alma.stream import SPECIALS, Stream
from alma.tables import as_text
from alma.workers import Workers
from data_prep import contamination, similarity, words
from data_prep.dictionary import UNKNOWN, read_tokens
from data_prep.work import run_all

_TOKENS_PER_WORD = 8  # from which text is taken to have no spaces between words; code and URLs have up to 5
DRIFT = """\
Drift. new tokens, new words: share of the occurrences in a mega-batch whose token or word is in no mega-batch
before. Then the Jensen-Shannon divergence of the token frequencies of two mega-batches,
relative to that of two random halves of one (1 = i.i.d.; - = too few documents).
valid and test mix all mega-batches, so a choice made by valid uses text of the future; training validates on
valid_00, ... of the mega-batches that it has."""

NOTES = """\
Tokens include the end of every line and document; median, 95% and longest are tokens of a document.
unknown: share of <unk>. Sources: share of the words.
"""


def summary(stream: Stream) -> str:
    """The parts as a table, and what was read, dropped and skipped."""
    rows = []
    for part in stream.parts:
        numbers = part.words, part.documents, part.items, part.tokens
        rows.append([*(f"{count:,}" for count in numbers), f"{part.bytes / 1e6:.1f}"])
    corpus = stream.appended[-1]["corpus"] if stream.appended else stream.corpus
    near = contamination.near_dropped([corpus])
    lines = [
        part_table(stream, ["words", "documents", "items", "tokens", "MB"], rows),
        f"read {corpus['words']:,} words in {corpus['documents']:,} documents; dropped "
        f"{corpus['duplicate_documents']:,} duplicates ({corpus['duplicate_words']:,} words)"
        f"{near and f', of which {near}'}; left out {corpus['surplus_words']:,} surplus words"
        + (f"; spread of the mega-batches {corpus['spread']:.3%}" if "spread" in corpus else ""),
    ]
    if left_out := corpus.get("dates", {}).get("left_out"):
        counts = ", ".join(f"{count:,} {why}" for why, count in left_out.items())
        lines.append(f"left out by date, documents: {counts}")
    part = max(stream.parts, key=lambda part: part.tokens / part.words)
    if (ratio := part.tokens / part.words) > _TOKENS_PER_WORD:
        lines.append(
            f"warning: {part.name} has {ratio:.0f} tokens a word. Sizes count what white space separates, "
            f"and Chinese has none between words: for 1,000,000 tokens ask for {1e6 / ratio:.0f} words"
        )
    if "skipped" in corpus:
        lines.append(corpus["skipped"]["summary"])
    return "\n".join(lines)


def part_table(stream: Stream, names: list[str], rows: list[list[str]]) -> str:
    """A row for each part: its period, the figures `names` in `rows`, and the shares of its sources."""
    sources = sorted({name for part in stream.parts for name in part.sources})
    dated = any(part.period for part in stream.parts)
    table = [["", *["period"] * dated, *names, *sources]]
    for part, figures in zip(stream.parts, rows, strict=True):
        shares = [f"{part.sources.get(name, 0) / part.words:.1%}" for name in sources]
        table.append([part.name, *[part.period] * dated, *figures, *shares])
    return as_text(table)


def describe(stream: Stream, workers: Workers) -> str:
    """The table of parts, the drift of an ordered stream, and the contamination."""
    parts, size = stream.parts, len(read_tokens(stream.directory)) + SPECIALS
    half = min(part.tokens for part in stream.megabatches) // 2
    tasks = [(stream.path(part), size, half, number) for number, part in enumerate(parts)]
    counts = run_all(workers, "count", similarity.count_part, tasks, [part.tokens for part in parts], "token")
    rows = []
    for part, own in zip(parts, counts, strict=True):
        middle, high = np.percentile(own.lengths, [50, 95])
        lengths = [f"{len(own.lengths):,}", f"{middle:,.0f}", f"{high:,.0f}", f"{own.lengths.max():,}"]
        per_word, unknown = part.tokens / part.words, own.total[UNKNOWN] / part.tokens
        rows.append([f"{part.words:,}", f"{part.tokens:,}", f"{per_word:.3f}", *lengths, f"{unknown:.3%}"])
    names = ["words", "tokens", "tokens/word", "documents", "median", "95%", "longest", "unknown"]
    table = part_table(stream, names, rows)
    found = [table, NOTES, *([drift(stream, counts, workers), ""] if stream.ordered else [])]
    return "\n".join([*found, contamination.report(stream, workers)])


def drift(stream: Stream, counts: Sequence[similarity.Counts], workers: Workers) -> str:
    """For each mega-batch of an ordered stream: its new tokens and words, and its ratio to each other one."""
    parts = stream.megabatches
    pairs = list(combinations(range(len(parts)), 2))
    both = [(counts[i].tokens, counts[j].tokens) for i, j in pairs]
    found = run_all(workers, "compare", similarity.compare, both, [1] * len(pairs), "pair")
    shown = {pair: "-" if ratio is None else f"{ratio:.2f}" for pair, ratio in zip(pairs, found, strict=True)}
    seen = np.zeros(len(counts[0].total), bool)
    new_words = words.new_shares(stream, workers)
    dated = any(part.period for part in parts)
    header = ["", *["period"] * dated, "new tokens", "new words"]
    rows = [[*header, *(part.name.removeprefix("megabatch_") for part in parts)]]
    for t, part in enumerate(parts):
        total = counts[t].total
        new_tokens = total[~seen].sum() / total.sum()
        seen |= total > 0
        shares = [f"{new_tokens:.2%}", f"{new_words[t]:.2%}"] if t else ["", ""]
        cells = [shown.get((min(t, other), max(t, other)), "") for other in range(len(parts))]
        rows.append([part.name, *[part.period] * dated, *shares, *cells])
    return "\n".join([DRIFT, *(line.rstrip() for line in as_text(rows).splitlines())])
