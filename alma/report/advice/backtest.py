"""Backtest: advice as it would have been at earlier mega-batches, against what came."""

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from alma.errors import UserError
from alma.report.advice.candidates import Candidate, Forecast, find_candidates, forecasts
from alma.report.advice.choice import RULES, Limits, choose
from alma.report.advice.forecast import LEVELS, interval
from alma.report.advice.staleness_backtest import StalenessBacktest, look_back_on
from alma.report.advice.text import DocumentPart
from alma.report.age import losses_of
from alma.report.age_table import unit
from alma.report.results import Section, left_out, rounded
from alma.report.tables import Table

TOLERANCE = 0.05
"""Regret that counts as small: a measure this share above the best in hindsight."""
LEAST_ORIGINS = 5
"""Earlier mega-batches that it takes to compare the rules of choice."""
NOTE = """\
At each t only rows up to t are read. Forecasts are of the test metric after each stage to come; they are \
off by the mean absolute log ratio. Regret is how much the measure of the chosen configuration exceeds that \
of the best one within the limits: all pairs of a training compute and a number of parameters that some \
configuration needs. Each cell has the mean regret, and the share of choices with a regret of at most 5%. \
"forecast" is the advice; "lowest so far" chooses the lowest mean over t=1, 2, ..., "lowest now" the lowest \
present value."""


class Origin(NamedTuple):
    """How the forecasts and the advice of mega-batch `now` turned out."""

    now: int
    candidates: int
    inside: dict[float, list[bool]]  # for each level whether each stage to come was in its interval
    errors: list[float]  # |log(forecast / what came)| of each stage
    naive: list[float]  # the same for "as last time"
    regrets: dict[str, list[float]]  # of the choices of each rule within each limit


class Backtest(NamedTuple):
    """All origins of one stream."""

    title: str
    by: str
    origins: list[Origin]
    staleness: StalenessBacktest | None  # of a stream that drifts
    left_out: list[str]  # lines about runs and configurations that do not count

    @property
    def parts(self) -> list[DocumentPart]:
        """The document."""
        heading, below = f"Backtest by {self.by}: {self.title}", [NOTE, *self.left_out]
        part = DocumentPart(heading, (), _table(self.origins), below)
        return [part, *(self.staleness.parts if self.staleness else [])]

    def record(self) -> dict[str, Any]:
        """For JSON: shares and means over all origins, and of each."""
        each = [{"t": origin.now} | _rounded(summarize([origin])) for origin in self.origins]
        staleness = self.staleness.record() if self.staleness else None
        found = {"by": self.by, "all": _rounded(summarize(self.origins)), "origins": each}
        return found | {"staleness": staleness}


def _rounded(numbers: dict[str, Any]) -> dict[str, Any]:
    return {k: _rounded(each) if isinstance(each, dict) else rounded(each) for k, each in numbers.items()}


def look_back(section: Section, by: str) -> Backtest:
    """Read rows up to each origin only, and compare forecasts and choices with the rows after it.

    Origins are all t of a stream of up to 10 mega-batches, else its tenths. Configurations that have not
    finished are left out. UserError: none has finished, or only at the end of the stream.
    """
    megabatches = section.results[0].megabatches
    whole = _seen(section, megabatches)
    started = [t for t in _times(megabatches) if any(not r.waiting(t) for r in whole.results)]
    if not started:
        raise UserError(
            "--backtest needs a configuration that has seen the whole stream in at least two stages"
        )
    actual = {each.label: each for each in find_candidates(whole, megabatches)}
    origins = [_origin(now, forecasts(find_candidates(whole, now), by), actual, by) for now in started]
    behind = [result for result in section.results if result.progress < megabatches]
    lines = [f"left out: {result.label}, at t={result.progress} of {megabatches}" for result in behind]
    return Backtest(section.title, by, origins, _of_staleness(whole), left_out(section.results) + lines)


def _of_staleness(section: Section) -> StalenessBacktest | None:
    """The backtest of staleness of all configurations; None: no evaluation matrices, or few periods."""
    group = [losses for result in section.results if (losses := losses_of(result))]
    try:
        return look_back_on(section.title, unit(section.results[0]), group, "t={:g}".format)
    except UserError:
        return None


def regrets_so_far(section: Section, by: str, found: Sequence[Forecast]) -> dict[str, float]:
    """Mean regret of each rule at earlier mega-batches, among those of `found` that have seen all so far.

    {} with fewer than LEAST_ORIGINS mega-batches at which two of them had a complete stage.
    """
    if not found:
        return {}
    now = found[0].candidate.start
    actual = [each.candidate for each in found if each.candidate.now == now]
    if len(actual) < 2:
        return {}
    whole = _seen(section, now, {each.label for each in actual})
    times = [t for t in _times(now) if sum(not result.waiting(t) for result in whole.results) > 1]
    if len(times) < LEAST_ORIGINS:
        return {}
    regrets = []
    for t in times:
        values = {each.label: each.measured(by, t) for each in actual}
        earlier = forecasts(find_candidates(whole, t, now), by)
        regrets.append(_of_each_rule(earlier, Limits(), values, min(values.values())))
    return {rule: float(np.mean([each[rule] for each in regrets])) for rule in RULES}


def _seen(section: Section, until: int, labels: set[str] | None = None) -> Section:
    """The configurations with all rows up to `until`."""
    kept = [r for r in section.results if r.progress >= until and (labels is None or r.label in labels)]
    return section._replace(results=kept)


def _times(megabatches: int) -> list[int]:
    if megabatches <= 10:
        return list(range(1, megabatches))
    return sorted({round(megabatches * tenth / 10) for tenth in range(1, 10)})


def _origin(now: int, found: Sequence[Forecast], actual: dict[str, Candidate], by: str) -> Origin:
    """Compare the forecasts of `now` with what came."""
    inside: dict[float, list[bool]] = {level: [] for level in LEVELS}
    errors: list[float] = []
    naive: list[float] = []
    for each in found:
        candidate, (present,) = each.candidate, each.candidate.curve.mean[-1:]
        came = np.array([actual[candidate.label].values[t] for t in candidate.to_come])
        for level in LEVELS:
            low, high = interval(each.draws, level)
            inside[level] += ((low <= came) & (came <= high)).tolist()
        positive = came > 0
        errors += abs(np.log(np.median(each.draws, 0)[positive] / came[positive])).tolist()
        naive += abs(np.log(present / came[positive])).tolist()
    return Origin(now, len(found), inside, errors, naive, _regrets(now, found, actual, by))


def _regrets(
    now: int, found: Sequence[Forecast], actual: dict[str, Candidate], by: str
) -> dict[str, list[float]]:
    """Regrets of each rule within the limits that separate the candidates and leave at least two of them."""
    ended = list(actual.values())
    values = {each.label: each.measured(by, now) for each in ended}
    regrets, seen = [], set()
    for compute in _distinct([each.compute for each in ended]):
        for parameters in _distinct([each.parameters for each in ended]):
            limits = Limits(compute, parameters)
            within = frozenset(each.label for each in ended if limits.hold(each.compute, each.parameters))
            if len(within) > 1 and within not in seen and choose(found, limits):
                regrets.append(_of_each_rule(found, limits, values, min(values[label] for label in within)))
            seen.add(within)
    return {rule: [each[rule] for each in regrets] for rule in RULES}


def _of_each_rule(
    found: Sequence[Forecast], limits: Limits, values: dict[str, float], best: float
) -> dict[str, float]:
    """How much the value of each rule's choice exceeds the best one, as a share of that."""
    choices = {rule: choose(found, limits, rule) for rule in RULES}
    return {
        rule: values[each.candidate.label] / best - 1 if each and best else 0.0
        for rule, each in choices.items()
    }


def _distinct(values: Sequence[float]) -> list[float]:
    """Ascending, without those at most 1% above the one before."""
    found: list[float] = []
    for value in sorted(values):
        if not found or value > 1.01 * found[-1]:
            found.append(value)
    return found


def summarize(origins: Sequence[Origin]) -> dict[str, Any]:
    """Shares and means over some origins, in which each stage and limit counts once; NaN of nothing."""

    def mean(lists: Iterable[Sequence[float]]) -> float:
        values = list(itertools.chain.from_iterable(lists))
        return float(np.mean(values)) if values else math.nan

    regrets = {rule: [origin.regrets[rule] for origin in origins] for rule in RULES}
    small = {rule: [[each <= TOLERANCE for each in some] for some in regrets[rule]] for rule in RULES}
    return {
        "stages": sum(len(origin.inside[LEVELS[0]]) for origin in origins),
        **{f"coverage_{level:g}": mean(origin.inside[level] for origin in origins) for level in LEVELS},
        "forecast_error": mean(origin.errors for origin in origins),
        "naive_error": mean(origin.naive for origin in origins),
        "limits": sum(map(len, regrets["forecast"])),
        "mean_regret": {rule: mean(values) for rule, values in regrets.items()},
        "small_regret": {rule: mean(values) for rule, values in small.items()},
    }


def _table(origins: Sequence[Origin]) -> Table:
    """A row for each origin, and one over all of them."""
    header = ["t", "configurations", "stages to come", *(f"{level:.0%} interval held" for level in LEVELS)]
    header += ["forecast off by", "as last time", "choices", *(f"regret: {rule}" for rule in RULES)]
    rows = [_row(str(each.now), str(each.candidates), [each]) for each in origins]
    return [header, *rows, *([_row("all", "", origins)] if len(origins) > 1 else [])]


def _row(name: str, candidates: str, origins: Sequence[Origin]) -> list[str]:
    found = summarize(origins)
    shares = [f"coverage_{level:g}" for level in LEVELS] + ["forecast_error", "naive_error"]
    texts = [_percent(found[share]) for share in shares]
    regrets = [
        _percent(found["mean_regret"][rule]) + f" ({found['small_regret'][rule]:.0%})" * bool(found["limits"])
        for rule in RULES
    ]
    return [name, candidates, str(found["stages"]), *texts, str(found["limits"]), *regrets]


def _percent(share: float) -> str:
    return "" if math.isnan(share) else f"{100 * share:.1f}%"
