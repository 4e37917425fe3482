"""The rules of choice at earlier mega-batches, against what came: would a naive rule have been better?"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from alma.report.advice.candidates import Candidate, choose, find_candidates, within
from alma.report.advice.staleness import Array
from alma.report.results import Section

LEAST_ORIGINS = 5  # earlier mega-batches that it takes to compare the rules of choice
RULES: dict[str, Callable[[Sequence[Candidate]], Candidate]] = {
    "forecast": choose,
    "lowest so far": lambda found: min(found, key=lambda each: each.mean_since(each.ends[0] - 1)),
    "lowest now": lambda found: min(found, key=lambda each: each.values[each.now]),
}
"""The rule of the advice, and two that need no forecast."""


def look_back(section: Section, until: int) -> Iterator[tuple[int, list[Candidate], dict[str, Candidate]]]:
    """Yield mega-batches before `until`, all of up to 10, else their tenths: the candidates as they were
    there, and by label as they are at `until`. Configurations without all rows up to `until` are left out.
    """
    whole = section._replace(results=[each for each in section.results if each.progress >= until])
    if not whole.results:
        return
    actual = {each.label: each for each in find_candidates(whole, until)}
    tenths = range(1, until) if until <= 10 else sorted({round(until * i / 10) for i in range(1, 10)})
    for now in tenths:
        if not all(result.waiting(now) for result in whole.results):
            yield now, find_candidates(whole, now, until), actual


def regrets_of(found: Sequence[Candidate], actual: dict[str, Candidate]) -> Array:
    """How much the choice of each rule exceeds the best one (limits, rules), within each limit of compute
    that leaves another set of two or more."""
    measures = {label: each.mean_since(found[0].now) for label, each in actual.items()}
    regrets: dict[int, list[float]] = {}
    for most in sorted({each.compute for each in found}):
        allowed = within(found, most)
        best = min(measures[each.label] for each in allowed)
        if len(allowed) > 1 and len(allowed) not in regrets and best > 0:
            regrets[len(allowed)] = [measures[rule(allowed).label] / best - 1 for rule in RULES.values()]
    return np.array(list(regrets.values())).reshape(-1, len(RULES))


def naive_rule_won(section: Section, until: int) -> list[str]:
    """A line about a naive rule that chose better before `until`; [] if none did, or if fewer than
    LEAST_ORIGINS mega-batches have a regret."""
    of_origins = [regrets_of(found, actual) for _, found, actual in look_back(section, until)]
    known = [each for each in of_origins if len(each)]
    if len(known) < LEAST_ORIGINS:
        return []
    regrets = dict(zip(RULES, np.concatenate(known).mean(0), strict=True))
    best = min(regrets, key=lambda rule: regrets[rule])
    if regrets[best] == regrets["forecast"]:
        return []
    return [
        f'At earlier mega-batches of these runs "{best}" chose better: its choice was {regrets[best]:.1%} '
        f"above the best one, the forecasts' choice {regrets['forecast']:.1%}."
    ]
