"""A description of a stream: tables of its parts, and their comparison."""

from collections.abc import Sequence
from itertools import combinations

import numpy as np

from alma.stream import Stream
from alma.tables import as_text
from alma.workers import Workers
from data_prep import contamination, similarity, words
from data_prep.dictionary import SPECIALS, UNKNOWN, read_tokens
from data_prep.similarity import Counts
from data_prep.work import run_all

_DEVIATIONS = 6  # z from which a pair differs; i.i.d. parts of few, long documents reach 5, real streams 3.3
_FITTED = 1.3  # ratio from which pairs of megabatch_00 differ: 20,000 tokens trained on 0.5M words reach 1.23
_TOKENS_PER_WORD = 8  # from which text is taken to have no spaces between words; code and URLs have up to 5
_FEW = 50  # effective documents; with fewer, shares of sources vary by more than 7%
QUESTION = """\
Are the mega-batches i.i.d.? Jensen-Shannon divergence of the token frequencies of two parts, relative to
random regroupings of the same documents (1 = i.i.d.; at the size of the smaller part; - = too few documents).
A tokenizer trained on megabatch_00 fits it better than the others, which raises its pairs by up to 0.25.
The verdict leaves out valid, which often has a single source."""
DRIFT = """\
Drift. new tokens, new words: share of the occurrences in a mega-batch whose token or word is in no mega-batch
before. Then the divergence of the token frequencies of two mega-batches,
relative to random regroupings of the same documents (1 = i.i.d.; - = too few documents).
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
    """The table of parts, the similarity of the mega-batches or their drift, and the contamination."""
    parts = stream.parts
    least = min(part.tokens for part in stream.megabatches)
    sizes = [min(least, part.tokens) for part in (stream.megabatches if stream.ordered else parts)]
    cuts = np.unique([end for size in sizes for end in similarity.group_ends(size)])
    tokens = read_tokens(stream.directory)
    tasks = [(stream.path(part), len(tokens) + SPECIALS, cuts, number) for number, part in enumerate(parts)]
    counts = run_all(workers, "count", similarity.count_part, tasks, [part.tokens for part in parts], "token")
    pairs = list(combinations(range(len(sizes)), 2))  # each at the smaller size of the two
    both = [(counts[i].tokens, counts[j].tokens, cuts, min(sizes[i], sizes[j])) for i, j in pairs]
    found = run_all(workers, "compare", similarity.compare, both, [1] * len(pairs), "pair")
    ratios = dict(zip(pairs, found, strict=True))
    comparison = drift(stream, counts, ratios, workers) if stream.ordered else alike(stream, counts, ratios)
    rows = []
    for part, own in zip(parts, counts, strict=True):
        middle, high = np.percentile(own.lengths, [50, 95])
        lengths = [f"{len(own.lengths):,}", f"{middle:,.0f}", f"{high:,.0f}", f"{own.lengths.max():,}"]
        per_word, unknown = part.tokens / part.words, own.total[UNKNOWN] / part.tokens
        rows.append([f"{part.words:,}", f"{part.tokens:,}", f"{per_word:.3f}", *lengths, f"{unknown:.3%}"])
    names = ["words", "tokens", "tokens/word", "documents", "median", "95%", "longest", "unknown"]
    table = part_table(stream, names, rows)
    return "\n".join([table, NOTES, comparison, "", contamination.report(stream, workers)])


Ratios = dict[tuple[int, int], tuple[float, float] | None]
"""(ratio, z) of each pair i < j of parts, see `similarity.compare`."""


def alike(stream: Stream, counts: Sequence[Counts], ratios: Ratios) -> str:
    """The matrix of ratios, and the verdict on them."""
    names = [part.name for part in stream.parts]
    rows = [["", *(name.removeprefix("megabatch_") for name in names[:-1])]]
    for j, name in list(enumerate(names))[1:]:
        rows.append([name, *(_cell(ratios[i, j]) for i in range(j)), *[""] * (len(names) - 1 - j)])
    lines = [QUESTION, *(line.rstrip() for line in as_text(rows).splitlines())]
    valid = names.index(stream.valid.name)
    known = {pair: found for pair, found in ratios.items() if found and valid not in pair}
    if not known:
        lines.append("Tokens: cannot tell, because the documents of the parts are too few or too long.")
        return "\n".join(lines)
    effective = [own.lengths.sum() ** 2 / (own.lengths**2).sum() for own in counts]
    differ = {
        pair: (ratio, z)
        for pair, (ratio, z) in known.items()
        if z > _DEVIATIONS and (0 not in pair or ratio > _FITTED)
    }
    (i, j), (ratio, z) = max((differ or known).items(), key=lambda item: item[1][0])
    few = min({part for pair in known for part in pair}, key=effective.__getitem__)
    answer = "as i.i.d."
    if differ:
        answer = f"NOT i.i.d., {len(differ)} of {len(known)} pairs differ"
    elif effective[few] < _FEW:
        answer = f"cannot tell: the effective number of documents of {names[few]} is {effective[few]:.0f}, "
        answer += f"below {_FEW}; ask for more words, or cut documents with --documents"
    lines.append(f"Tokens: {answer}; worst are {names[i]} and {names[j]}, ratio {ratio:.2f} (z = {z:.1f}).")
    return "\n".join(lines)


def _cell(found: tuple[float, float] | None) -> str:
    return f"{found[0]:.2f}" if found else "-"


def drift(stream: Stream, counts: Sequence[Counts], ratios: Ratios, workers: Workers) -> str:
    """For each mega-batch of an ordered stream: its new tokens and words, and its ratio to each other one."""
    parts = stream.megabatches
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
        cells = [
            _cell(ratios[min(t, other), max(t, other)]) if t != other else "" for other in range(len(parts))
        ]
        rows.append([part.name, *[part.period] * dated, *shares, *cells])
    return "\n".join([DRIFT, *(line.rstrip() for line in as_text(rows).splitlines())])
