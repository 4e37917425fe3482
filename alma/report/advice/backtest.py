"""Backtest: the advice as it would have been at earlier mega-batches, against what came."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from alma.errors import UserError
from alma.report.advice.candidates import Candidate, choose, find_candidates, within
from alma.report.advice.forecast import Array, interval
from alma.report.advice.staleness import StalenessBacktest, look_back_on
from alma.report.age import losses_of
from alma.report.age_table import unit
from alma.report.results import Section, left_out, rounded
from alma.report.tables import Table, TitledTable

NOTE = """\
At each t only rows up to t are read, by the same code as for advice. Forecasts are of the test metric after \
each stage to come; they are off by the mean absolute log ratio. Regret: how much the mean over the \
mega-batches to come of the chosen configuration exceeds that of the best one, over all limits of compute \
that separate configurations. "lowest so far" chooses the lowest mean since a configuration's first stage, \
"lowest now" the lowest present value."""
LEAST_ORIGINS = 5
"""Earlier mega-batches that it takes to compare the rules of choice."""
RULES: dict[str, Callable[[Sequence[Candidate]], Candidate]] = {
    "forecast": choose,
    "lowest so far": lambda found: min(found, key=lambda each: each.mean_since(each.ends[0] - 1)),
    "lowest now": lambda found: min(found, key=lambda each: each.values[each.now]),
}
"""The rule of the advice, and two that need no forecast."""
_MEASURES = ("90% interval held", "forecast off by", "as last time", *(f"regret: {rule}" for rule in RULES))


class Origin(NamedTuple):
    """How the advice of mega-batch `now` turned out."""

    now: int
    stages: Array  # a row for each stage to come: in its interval, |log(forecast / what came)|, as last time
    regrets: Array  # (limits, rules): of the choice of each rule within each limit


class Backtest(NamedTuple):
    """All origins of one stream."""

    title: str
    origins: list[Origin]
    below: list[str]
    staleness: StalenessBacktest | None  # of a stream that drifts

    @property
    def parts(self) -> list[TitledTable]:
        """The document."""
        table: Table = [["t", "stages to come", *_MEASURES]]
        for name, some in [*((str(each.now), [each]) for each in self.origins), ("all", self.origins)]:
            stages, *shares = means(some).values()
            table.append([name, str(stages), *("" if math.isnan(each) else f"{each:.1%}" for each in shares)])
        won = naive_rule_won(self.origins)
        part = TitledTable(f"Backtest: {self.title}", table, "\n".join([NOTE, *self.below]), won)
        return [part, *(self.staleness.parts if self.staleness else [])]

    def record(self) -> dict[str, Any]:
        """For JSON: shares and means over all origins, and of each."""
        each = [{"t": origin.now} | means([origin]) for origin in self.origins]
        staleness = self.staleness.record() if self.staleness else None
        return {"all": rounded(means(self.origins)), "origins": rounded(each), "staleness": staleness}


def means(origins: Sequence[Origin]) -> dict[str, float]:
    """Stages to come, and shares and means over some origins, by name; NaN of nothing."""
    stages = np.concatenate([each.stages for each in origins])
    regrets = np.concatenate([each.regrets for each in origins])
    found = [x.mean(0) if len(x) else np.full(x.shape[1], math.nan) for x in (stages, regrets)]
    return {"stages": len(stages)} | dict(zip(_MEASURES, np.concatenate(found).tolist(), strict=True))


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
    origins = []
    for now in tenths:
        if all(result.waiting(now) for result in whole.results):
            continue
        found = find_candidates(whole, now, until)
        rows = [np.empty((0, 3))]
        for each in found if stages else []:
            came = np.maximum([actual[each.label].values[t] for t in each.to_come], 1e-9)
            low, high = interval(each.draws)
            off = [
                abs(np.log(guess / came))
                for guess in (np.median(each.draws, 0), each.curve.values[:, -1].mean())
            ]
            rows.append(np.column_stack([(low <= came) & (came <= high), *off]))
        measures = {label: each.mean_since(now) for label, each in actual.items()}
        origins.append(Origin(now, np.concatenate(rows), _regrets(found, measures)))
    return origins


def _regrets(found: Sequence[Candidate], measures: dict[str, float]) -> Array:
    """Regrets (limits, rules), within each limit of compute that leaves another set of two or more."""
    regrets: dict[int, list[float]] = {}
    for most in sorted({each.compute for each in found}):
        allowed = within(found, most)
        best = min(measures[each.label] for each in allowed)
        if len(allowed) > 1 and len(allowed) not in regrets and best > 0:
            regrets[len(allowed)] = [measures[rule(allowed).label] / best - 1 for rule in RULES.values()]
    return np.array(list(regrets.values())).reshape(-1, len(RULES))


def naive_rule_won(origins: Sequence[Origin]) -> list[str]:
    """A line about a naive rule that chose better at earlier mega-batches; [] if none did, or if fewer than
    LEAST_ORIGINS origins have a regret."""
    known = [each for each in origins if len(each.regrets)]
    if len(known) < LEAST_ORIGINS:
        return []
    regrets = dict(zip(RULES, np.concatenate([each.regrets for each in known]).mean(0), strict=True))
    best = min(regrets, key=lambda rule: regrets[rule])
    if regrets[best] == regrets["forecast"]:
        return []
    return [
        f'At earlier mega-batches of these runs "{best}" chose better: its choice was {regrets[best]:.1%} '
        f"above the best one, the forecasts' choice {regrets['forecast']:.1%}."
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
    whole = [each for each in section.results if each.progress == end]
    group = [losses for result in whole if (losses := losses_of(result))]
    try:
        staleness = look_back_on(section.title, unit(whole[0]), group, "t={:g}".format)
    except UserError:  # no evaluation matrices, or few periods
        staleness = None
    return Backtest(section.title, origins, below, staleness)
