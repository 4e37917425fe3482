"""Backtest: the advice as it would have been at earlier mega-batches, against what came."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from alma.errors import UserError
from alma.report.advice.candidates import Candidate, choose, find_candidates, within
from alma.report.advice.forecast import interval
from alma.report.advice.staleness import StalenessBacktest, look_back_on
from alma.report.advice.text import DocumentPart
from alma.report.age import losses_of
from alma.report.age_table import unit
from alma.report.results import Section, left_out, rounded
from alma.report.tables import Table

NOTE = """\
At each t only rows up to t are read, by the same code as for advice. Forecasts are of the test metric after \
each stage to come; they are off by the mean absolute log ratio. Regret: how much the mean over the \
mega-batches to come of the chosen configuration exceeds that of the best one, over all limits of compute \
that separate configurations. "lowest so far" chooses the lowest mean since a configuration's first stage, \
"lowest now" the lowest present value."""
LEAST_ORIGINS = 5
"""Earlier mega-batches that it takes to compare the rules of choice."""

_NAIVE: dict[str, Callable[[Candidate], float]] = {
    "lowest so far": lambda each: each.mean_since(each.ends[0] - 1),
    "lowest now": lambda each: each.values[each.now],
}
RULES = ("forecast", *_NAIVE)
"""The rule of the advice, and two that need no forecast."""


class Origin(NamedTuple):
    """How the advice of mega-batch `now` turned out."""

    now: int
    inside: list[bool]  # whether each stage to come was in its 90% interval
    errors: list[float]  # |log(forecast / what came)| of each stage
    naive: list[float]  # the same for "as last time"
    regrets: dict[str, list[float]]  # of the choice of each rule within each limit


class Backtest(NamedTuple):
    """All origins of one stream."""

    title: str
    origins: list[Origin]
    below: list[str]
    staleness: StalenessBacktest | None  # of a stream that drifts

    @property
    def parts(self) -> list[DocumentPart]:
        """The document."""
        rows = [[str(each.now), *_cells([each])] for each in self.origins]
        header = ["t", "stages to come", "90% interval held", "forecast off by", "as last time"]
        header += [f"regret: {rule}" for rule in RULES]
        table: Table = [header, *rows, ["all", *_cells(self.origins)]]
        won = naive_rule_won(mean_regrets(self.origins))
        part = DocumentPart(f"Backtest: {self.title}", won, table, [NOTE, *self.below])
        return [part, *(self.staleness.parts if self.staleness else [])]

    def record(self) -> dict[str, Any]:
        """For JSON: shares and means over all origins, and of each."""
        each = [{"t": origin.now} | _record([origin]) for origin in self.origins]
        staleness = self.staleness.record() if self.staleness else None
        return {"all": _record(self.origins), "origins": each, "staleness": staleness}


def look_back(section: Section, until: int, stages: bool = True) -> list[Origin]:
    """Origins before `until`: all t of up to 10 mega-batches, else their tenths.

    Configurations without all rows up to `until` are left out, and, without `stages`, the forecasts of
    stages, which take most of the time. [] if none is left.
    """
    whole = section._replace(results=[each for each in section.results if each.progress >= until])
    if not whole.results:
        return []
    actual = {each.label: each for each in find_candidates(whole, until)}
    tenths = range(1, until) if until <= 10 else sorted({round(until * i / 10) for i in range(1, 10)})
    started = [t for t in tenths if any(not result.waiting(t) for result in whole.results)]
    origins = []
    for now in started:
        found = find_candidates(whole, now, until)
        inside, errors, naive = [], [], []
        for each in found if stages else []:
            values = actual[each.label].values
            came = np.maximum([values[t] for t in each.to_come], 1e-9)
            low, high = interval(each.draws)
            inside += ((low <= came) & (came <= high)).tolist()
            errors += abs(np.log(np.median(each.draws, 0) / came)).tolist()
            naive += abs(np.log(each.curve.values[:, -1].mean() / came)).tolist()
        means = {label: each.mean_since(now) for label, each in actual.items()}
        origins.append(Origin(now, inside, errors, naive, _regrets(found, means)))
    return origins


def _regrets(found: Sequence[Candidate], means: dict[str, float]) -> dict[str, list[float]]:
    """Regrets of each rule within each limit of compute that leaves another set of two or more."""
    regrets: dict[str, list[float]] = {rule: [] for rule in RULES}
    sizes = set()
    for most in sorted({each.compute for each in found}):
        allowed = within(found, most)
        best = min(means[each.label] for each in allowed)
        if len(allowed) < 2 or len(allowed) in sizes or best <= 0:
            continue
        sizes.add(len(allowed))
        chosen = {rule: min(allowed, key=key) for rule, key in _NAIVE.items()}
        chosen["forecast"] = choose(allowed) or allowed[0]
        for rule, each in chosen.items():
            regrets[rule].append(means[each.label] / best - 1)
    return regrets


def mean_regrets(origins: Sequence[Origin]) -> dict[str, float]:
    """The mean regret of each rule; {} with fewer than LEAST_ORIGINS origins that have one."""
    known = [origin for origin in origins if origin.regrets["forecast"]]
    if len(known) < LEAST_ORIGINS:
        return {}
    return {rule: _mean(origin.regrets[rule] for origin in known) for rule in RULES}


def naive_rule_won(regrets: dict[str, float]) -> list[str]:
    """A line about a naive rule that chose better at earlier mega-batches; [] if none did."""
    best = min(regrets, key=lambda rule: regrets[rule], default="forecast")
    if best == "forecast" or regrets[best] == regrets["forecast"]:
        return []
    ours = f"the forecasts' choice {regrets['forecast']:.1%}"
    return [
        f'At earlier mega-batches of these runs "{best}" chose better: its choice was {regrets[best]:.1%} '
        f"above the best one, {ours}."
    ]


def backtest(section: Section) -> Backtest:
    """The backtest of a stream. UserError: none has seen it all in at least two stages."""
    end = section.results[0].megabatches
    origins = look_back(section, end)
    if not origins:
        raise UserError(
            "--backtest needs a configuration that has seen the whole stream in at least two stages"
        )
    behind = [each for each in section.results if each.progress < end]
    below = left_out(section.results)
    below += [f"left out: {each.label}, at t={each.progress} of {end}" for each in behind]
    whole = section._replace(results=[each for each in section.results if each.progress == end])
    group = [losses for result in whole.results if (losses := losses_of(result))]
    try:
        staleness = look_back_on(section.title, unit(whole.results[0]), group, "t={:g}".format)
    except UserError:  # no evaluation matrices, or few periods
        staleness = None
    return Backtest(section.title, origins, below, staleness)


def _mean(lists: Iterable[Sequence[float]]) -> float:
    values = [value for some in lists for value in some]
    return float(np.mean(values)) if values else math.nan


def _summary(origins: Sequence[Origin]) -> dict[str, float]:
    """Shares and means over some origins; NaN of nothing."""
    found = {"coverage_0.9": _mean(origin.inside for origin in origins)}
    found |= {"forecast_error": _mean(origin.errors for origin in origins)}
    found |= {"naive_error": _mean(origin.naive for origin in origins)}
    return found | {f"regret_{rule}": _mean(origin.regrets[rule] for origin in origins) for rule in RULES}


def _record(origins: Sequence[Origin]) -> dict[str, Any]:
    stages = sum(len(origin.inside) for origin in origins)
    return {"stages": stages} | {name: rounded(value) for name, value in _summary(origins).items()}


def _cells(origins: Sequence[Origin]) -> list[str]:
    shares = ["" if math.isnan(value) else f"{value:.1%}" for value in _summary(origins).values()]
    return [str(sum(len(origin.inside) for origin in origins)), *shares]
