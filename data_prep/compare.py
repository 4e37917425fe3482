"""Comparison of the parts of a stream: the test whether the mega-batches are i.i.d., or their drift."""

from collections.abc import Sequence
from itertools import combinations

import numpy as np

from alma.stream import Part, Stream
from alma.tables import as_text
from alma.workers import Workers
from data_prep import similarity, words
from data_prep.similarity import Counts
from data_prep.work import run_all

_DEVIATIONS = 6  # z from which a pair differs; i.i.d. parts of few, long documents reach 5, real streams 3.3
_FITTED = 1.3  # ratio from which pairs of megabatch_00 differ: 20,000 tokens trained on 0.5M words reach 1.23
_SHARE_DEVIATIONS = 5  # |z| from which the shares of sources differ
QUESTION = """\
Are the mega-batches i.i.d.? Jensen-Shannon divergence of the token frequencies of two parts, relative to
random regroupings of the same documents (1 = i.i.d.; at the size of the smaller part; - = too few documents).
A tokenizer trained on megabatch_00 fits it better than the others, which raises its pairs by up to 0.25.
The verdict leaves out valid, which often has a single source."""
DRIFT = """\
Drift. new tokens, new words: share of the occurrences in a mega-batch whose token or word is in no mega-batch
before (-: the tokenizer is unknown). Then the Jensen-Shannon divergence of the token frequencies of two
mega-batches, relative to random regroupings of the same documents (1 = i.i.d.; at the size of the smallest
mega-batch; - = too few documents). A tokenizer trained on megabatch_00 raises its ratios a little.
valid and test mix all mega-batches, so a choice made by valid uses text of the future; training validates on
valid_00, ... of the mega-batches that it has."""


Ratios = dict[tuple[int, int], tuple[float, float] | None]
"""(ratio, z) of each pair i < j of parts, see `similarity.compare`."""


def ratios(counts: Sequence[Counts], sizes: Sequence[int], cuts: np.ndarray, workers: Workers) -> Ratios:
    """Compare the first len(sizes) parts, each pair at the smaller of their `sizes` in tokens."""
    pairs = list(combinations(range(len(sizes)), 2))
    tasks = [(counts[i].tokens, counts[j].tokens, cuts, min(sizes[i], sizes[j])) for i, j in pairs]
    found = run_all(workers, "compare", similarity.compare, tasks, [1] * len(pairs), "pair")
    return dict(zip(pairs, found, strict=True))


def alike(stream: Stream, counts: Sequence[Counts], ratios: Ratios) -> str:
    """The matrix of ratios, and the verdicts on tokens and sources."""
    parts = stream.parts
    names = [part.name for part in parts]
    rows = [["", *(name.removeprefix("megabatch_") for name in names[:-1])]]
    for j, name in list(enumerate(names))[1:]:
        rows.append([name, *(_cell(ratios[i, j]) for i in range(j)), *[""] * (len(names) - 1 - j)])
    judged = [i for i, part in enumerate(parts) if part is not stream.valid]
    known = {pair: found for pair, found in ratios.items() if found and set(pair) <= set(judged)}
    lines = [QUESTION, *(line.rstrip() for line in as_text(rows).splitlines())]
    lines.append(verdict(names, known))
    lines.append(shares_verdict([parts[i] for i in judged], [counts[i] for i in judged]))
    return "\n".join(lines)


def _cell(found: tuple[float, float] | None) -> str:
    return f"{found[0]:.2f}" if found else "-"


def verdict(names: Sequence[str], ratios: dict[tuple[int, int], tuple[float, float]]) -> str:
    """One sentence on the token frequencies, with the worst pair."""
    if not ratios:
        return "Tokens: cannot tell, because the documents of the parts are too few or too long."
    differ = {
        pair: (ratio, z)
        for pair, (ratio, z) in ratios.items()
        if z > _DEVIATIONS and (0 not in pair or ratio > _FITTED)
    }
    (i, j), (ratio, z) = max((differ or ratios).items(), key=lambda item: item[1][0])
    answer = f"NOT i.i.d., {len(differ)} of {len(ratios)} pairs differ" if differ else "as i.i.d."
    return f"Tokens: {answer}; worst are {names[i]} and {names[j]}, ratio {ratio:.2f} (z = {z:.1f})."


def shares_verdict(parts: Sequence[Part], counts: Sequence[Counts]) -> str:
    """One sentence on the shares of the sources, with the worst."""
    sources = sorted({name for part in parts for name in part.sources})
    worst, where = 0.0, ""
    for name in sources:
        shares = [part.sources.get(name, 0) / part.words for part in parts]
        lengths = [found.lengths for found in counts]
        for part, share, z in zip(parts, shares, similarity.share_deviation(shares, lengths), strict=True):
            if abs(z) >= abs(worst):
                worst, where = z, f"{part.name} with {share:.1%} of {name}"
    if len(sources) == 1:
        return f"Sources: one, {sources[0]}."
    answer = "NOT i.i.d." if abs(worst) > _SHARE_DEVIATIONS else "as i.i.d."
    return f"Sources: {answer}; farthest from the others is {where}, by |z| of {abs(worst):.1f} or more."


def drift(stream: Stream, counts: Sequence[Counts], ratios: Ratios, workers: Workers) -> str:
    """For each mega-batch of an ordered stream: its new tokens and words, and its ratio to each other one."""
    parts = stream.megabatches
    seen = np.zeros(len(counts[0].total), bool)
    new_tokens = []
    for found in counts[: len(parts)]:
        total = found.total
        new_tokens.append(total[~seen].sum() / total.sum())
        seen |= total > 0
    new_words = words.new_shares(stream, workers)
    rows = [["", "new tokens", "new words", *(part.name.removeprefix("megabatch_") for part in parts)]]
    for t, part in enumerate(parts):
        shares = [f"{new_tokens[t]:.2%}", f"{new_words[t]:.2%}" if new_words else "-"] if t else ["", ""]
        pairs = [(min(t, other), max(t, other)) for other in range(len(parts))]
        rows.append([part.name, *shares, *(_cell(ratios[pair]) if pair in ratios else "" for pair in pairs)])
    return "\n".join([DRIFT, *(line.rstrip() for line in as_text(rows).splitlines())])
