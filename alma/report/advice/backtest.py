"""Backtest of the advice: would a simpler rule of choice have done better at earlier mega-batches?

At each earlier mega-batch, every rule chooses a candidate from the rows up to there; the rows that
followed tell how good the choice was.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from alma.report.advice.candidates import Candidate, choose, find_candidates, within
from alma.report.advice.law import Array
from alma.report.results import Result, Section

LEAST_ORIGINS = 5  # fewest earlier mega-batches from which the rules are compared


class Origin(NamedTuple):
    """An earlier mega-batch at which the rules choose."""

    now: int
    candidates: list[Candidate]
    """The candidates, from the rows up to `now`."""
    actual: dict[str, Candidate]
    """The same candidates by label, with the rows that followed."""


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
"""The rules of choice by name: that of the advice, and two that need no forecast."""


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
    """The regret of each rule: how much worse its choice turned out than the best candidate.

    Returns (limits, rules), as fractions of the best candidate's metric. The rules choose under
    each limit of training compute that allows another set of two or more candidates. `actual` has
    the candidates by label with the rows that followed.
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
    """A remark if a rule without forecasts chose better than the advice before `until`.

    [] if none did, or if there are fewer than LEAST_ORIGINS mega-batches to judge by.
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
    of_best = f"{means[best]:.1%}"
    of_forecast = f"{means['forecast']:.1%}"
    begin = f'At earlier mega-batches of these runs "{best}" chose'
    if of_best == of_forecast:
        return [f"{begin} as well as the forecasts: both were {of_best} above the best one."]
    return [
        f"{begin} better: its choice was {of_best} above the best one, "
        f"the forecasts' choice {of_forecast}."
    ]
