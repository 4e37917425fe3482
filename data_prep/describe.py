"""A description of a stream: tables of its parts, and their comparison."""

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np

from alma.stream import SPECIALS, Part, Stream
from alma.tables import as_text
from alma.workers import Workers
from data_prep import contamination, similarity, words
from data_prep.dictionary import UNKNOWN, read_tokens
from data_prep.work import run_all

_TOKENS_PER_WORD = 8
"""Tokens per word above which a text has no spaces between words; code and URLs have up to 5."""
DRIFT = (
    "Drift. new tokens, new words: share of the occurrences in a mega-batch whose token or word is "
    "in no mega-batch\n"
    "before. Then the Jensen-Shannon divergence of the token frequencies of two mega-batches,\n"
    "relative to that of two random halves of one (1 = i.i.d.; - = too few documents).\n"
    "valid and test mix all mega-batches, so a choice made by valid uses text of the future; "
    "training validates on\n"
    "valid_00, ... of the mega-batches that it has."
)

NOTES = """\
Tokens include the end of every line and document; median, 95% and longest are tokens of a document.
unknown: share of <unk>. Sources: share of the words.
"""


def summary(stream: Stream) -> str:
    """The parts as a table, and what was read, dropped and skipped."""
    rows = []
    for part in stream.parts:
        numbers = (part.words, part.documents, part.items, part.tokens)
        rows.append([*(f"{count:,}" for count in numbers), f"{part.bytes / 1e6:.1f}"])
    corpus = stream.appended[-1]["corpus"] if stream.appended else stream.corpus
    lines = [
        part_table(stream, ["words", "documents", "items", "tokens", "MB"], rows),
        _read_and_dropped(corpus),
    ]
    left_out = corpus.get("dates", {}).get("left_out")
    if left_out:
        counts = ", ".join(f"{count:,} {why}" for why, count in left_out.items())
        lines.append(f"left out by date, documents: {counts}")
    longest_words = max(stream.parts, key=lambda part: part.tokens / part.words)
    ratio = longest_words.tokens / longest_words.words
    if ratio > _TOKENS_PER_WORD:
        advice = f"for 1,000,000 tokens ask for {1e6 / ratio:.0f} words"
        lines.append(
            f"warning: {longest_words.name} has {ratio:.0f} tokens a word. Sizes count what white "
            f"space separates, and Chinese has none between words: {advice}"
        )
    if "skipped" in corpus:
        lines.append(corpus["skipped"]["summary"])
    return "\n".join(lines)


def _read_and_dropped(corpus: Mapping[str, Any]) -> str:
    """A line with the totals of a corpus."""
    read = f"read {corpus['words']:,} words in {corpus['documents']:,} documents"
    dropped = f"dropped {corpus['duplicate_documents']:,} duplicates"
    dropped += f" ({corpus['duplicate_words']:,} words)"
    near = contamination.near_dropped([corpus])
    if near:
        dropped += f", of which {near}"
    line = f"{read}; {dropped}; left out {corpus['surplus_words']:,} surplus words"
    if "spread" in corpus:
        line += f"; spread of the mega-batches {corpus['spread']:.3%}"
    return line


def part_table(stream: Stream, names: list[str], rows: list[list[str]]) -> str:
    """A row for each part: its period, the figures `names` in `rows`, and its shares of sources."""
    sources = sorted({name for part in stream.parts for name in part.sources})
    periods = _period_cells(stream.parts)
    table = [["", *_period_header(stream.parts), *names, *sources]]
    for part, period, figures in zip(stream.parts, periods, rows, strict=True):
        shares = [f"{part.sources.get(name, 0) / part.words:.1%}" for name in sources]
        table.append([part.name, *period, *figures, *shares])
    return as_text(table)


def _period_header(parts: Sequence[Part]) -> list[str]:
    """The header of the column of periods, which only dated streams have."""
    return ["period"] if any(part.period for part in parts) else []


def _period_cells(parts: Sequence[Part]) -> list[list[str]]:
    """The cells of each part in the column of periods."""
    if _period_header(parts):
        return [[part.period] for part in parts]
    return [[] for _ in parts]


def describe(stream: Stream, workers: Workers) -> str:
    """The table of parts, the drift of an ordered stream, and the contamination."""
    parts = stream.parts
    dictionary_size = len(read_tokens(stream.directory)) + SPECIALS
    half = min(part.tokens for part in stream.megabatches) // 2
    tasks = []
    for number, part in enumerate(parts):
        tasks.append((stream.path(part), dictionary_size, half, number))
    weights = [part.tokens for part in parts]
    counts = run_all(workers, "count", similarity.count_part, tasks, weights, "token")
    rows = [_token_row(part, of_part) for part, of_part in zip(parts, counts, strict=True)]
    names = [
        "words",
        "tokens",
        "tokens/word",
        "documents",
        "median",
        "95%",
        "longest",
        "unknown",
    ]
    sections = [part_table(stream, names, rows), NOTES]
    if stream.ordered:
        sections += [drift(stream, counts, workers), ""]
    sections.append(contamination.report(stream, workers))
    return "\n".join(sections)


def _token_row(part: Part, counts: similarity.Counts) -> list[str]:
    """The cells of a part in the table of `describe`."""
    median, high = np.percentile(counts.lengths, [50, 95])
    return [
        f"{part.words:,}",
        f"{part.tokens:,}",
        f"{part.tokens / part.words:.3f}",
        f"{len(counts.lengths):,}",
        f"{median:,.0f}",
        f"{high:,.0f}",
        f"{counts.lengths.max():,}",
        f"{counts.total[UNKNOWN] / part.tokens:.3%}",
    ]


def drift(stream: Stream, counts: Sequence[similarity.Counts], workers: Workers) -> str:
    """For each mega-batch of an ordered stream: new tokens and words, and ratios to the others."""
    parts = stream.megabatches
    pairs = list(combinations(range(len(parts)), 2))
    tasks = [(counts[i].tokens, counts[j].tokens) for i, j in pairs]
    weights = [1 for _ in pairs]
    ratios = run_all(workers, "compare", similarity.compare, tasks, weights, "pair")
    cells = {}
    for pair, ratio in zip(pairs, ratios, strict=True):
        cells[pair] = "-" if ratio is None else f"{ratio:.2f}"
    seen_tokens = np.zeros(len(counts[0].total), bool)
    new_words = words.new_shares(stream, workers)
    batch_names = [part.name.removeprefix("megabatch_") for part in parts]
    rows = [["", *_period_header(parts), "new tokens", "new words", *batch_names]]
    for t, (part, period) in enumerate(zip(parts, _period_cells(parts), strict=True)):
        total = counts[t].total
        new_tokens = total[~seen_tokens].sum() / total.sum()
        seen_tokens |= total > 0
        shares = ["", ""]
        if t > 0:
            shares = [f"{new_tokens:.2%}", f"{new_words[t]:.2%}"]
        row_cells = [cells.get((min(t, j), max(t, j)), "") for j in range(len(parts))]
        rows.append([part.name, *period, *shares, *row_cells])
    return "\n".join([DRIFT, *(line.rstrip() for line in as_text(rows).splitlines())])
