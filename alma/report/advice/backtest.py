"""The rules of choice at earlier mega-batches: would one without forecasts have been better?"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from alma.report.advice.candidates import Candidate, choose, find_candidates, within
from alma.report.advice.law import Array
from alma.report.results import Result, Section

LEAST_ORIGINS = 5  # earlier mega-batches that it takes to compare the rules of choice


class Origin(NamedTuple):
    """A mega-batch to which advice looks back."""

    now: int
    candidates: list[Candidate]
    """As they were there."""
    actual: dict[str, Candidate]
    """As they are later, by label."""


def lowest_so_far(candidates: Sequence[Candidate]) -> Candidate:
    """The candidate with the lowest mean since its first stage."""
    return min(candidates, key=lambda candidate: candidate.mean_since(candidate.ends[0] - 1))


def lowest_now(candidates: Sequence[Candidate]) -> Candidate:
    """The candidate with the lowest present value."""
    return min(candidates, key=lambda candidate: candidate.values[candidate.now])


RULES: dict[str, Callable[[Sequence[Candidate]], Candidate]] = {
    "forecast": choose,
    "lowest so far": lowest_so_far,
    "lowest now": lowest_now,
}
"""The rule of the advice, and two that need no forecast."""


def look_back(section: Section, until: int) -> Iterator[Origin]:
    """The candidates at mega-batches before `until`, and at `until`.

    Yields all mega-batches if `until` is at most 10, else each tenth of it. Configurations without
    all rows up to `until` are left out.
    """
    complete = [result for result in section.results if result.progress >= until]
    if not complete:
        return
    section = section._replace(results=complete)
    actual = {candidate.label: candidate for candidate in find_candidates(section, until)}
    origins = list(range(1, until))
    if len(origins) >= 10:
        origins = sorted({round(until * i / 10) for i in range(1, 10)})
    for now in origins:
        if any(_is_tested(result, now) for result in complete):
            yield Origin(now, find_candidates(section, now, until), actual)


def _is_tested(result: Result, t: int) -> bool:
    """Whether a stage was complete at t, and its models have a value."""
    values = [rows[t]["value"] for rows in result.repeats]
    return not result.waiting(t) and not any(map(math.isnan, values))


def regrets_of(candidates: Sequence[Candidate], actual: dict[str, Candidate]) -> Array:
    """How much worse than the best candidate that of each rule turned out, as a share.

    (limits, rules): the limits are those of training compute that leave different sets of two or
    more candidates. `actual` are the candidates later, by label.
    """
    now = candidates[0].now
    measures = {label: candidate.mean_since(now) for label, candidate in actual.items()}
    regrets: dict[int, list[float]] = {}
    for limit in sorted({candidate.compute for candidate in candidates}):
        allowed = within(candidates, limit)
        count = len(allowed)
        best = min(measures[candidate.label] for candidate in allowed)
        if count > 1 and count not in regrets and best > 0:
            chosen = [rule(allowed) for rule in RULES.values()]
            regrets[count] = [measures[candidate.label] / best - 1 for candidate in chosen]
    return np.array(list(regrets.values())).reshape(-1, len(RULES))


def naive_rule_won(section: Section, until: int) -> list[str]:
    """A remark on a rule without forecasts that chose better before `until`.

    [] if none did, or if fewer than LEAST_ORIGINS mega-batches can tell.
    """
    regrets = []
    for _, candidates, actual in look_back(section, until):
        regrets_here = regrets_of(candidates, actual)
        if len(regrets_here):
            regrets.append(regrets_here)
    if len(regrets) < LEAST_ORIGINS:
        return []
    means = dict(zip(RULES, np.concatenate(regrets).mean(0), strict=True))
    best = min(means, key=lambda rule: means[rule])
    if means[best] == means["forecast"]:
        return []
    return [
        f'At earlier mega-batches of these runs "{best}" chose better: '
        f"its choice was {means[best]:.1%} above the best one, "
        f"the forecasts' choice {means['forecast']:.1%}."
    ]
