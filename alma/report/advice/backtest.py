"""Backtest: advice as it would have been at earlier mega-batches, against what came."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from alma.errors import UserError
from alma.report.advice.candidates import Candidate, Forecast, find_candidates, forecasts
from alma.report.advice.choice import Limits, choose
from alma.report.advice.forecast import LEVELS, interval
from alma.report.advice.text import DocumentPart
from alma.report.html.sections import Section, rounded
from alma.report.tables import Table

TOLERANCE = 0.05
"""Regret that counts as small: a measure this share above the best in hindsight."""
NOTE = """\
At each t only rows up to t are read. Forecasts are of the test metric after each stage to come; they are \
off by the mean absolute log ratio. Limits are all pairs of a training compute and a number of parameters \
that some configuration needs. Regret is how much the measure of the advised configuration exceeds that of \
the best one within the limits."""


class Origin(NamedTuple):
    """How the forecasts and the advice of mega-batch `now` turned out."""

    now: int
    candidates: int
    inside: dict[float, list[bool]]  # for each level whether each stage to come was in its interval
    errors: list[float]  # |log(forecast / what came)| of each stage
    naive: list[float]  # the same for "as last time"
    regrets: list[float]  # of the choice within each limit


class Backtest(NamedTuple):
    """All origins of one stream."""

    title: str
    by: str
    origins: list[Origin]

    @property
    def parts(self) -> list[DocumentPart]:
        """The document."""
        return [DocumentPart(f"Backtest by {self.by}: {self.title}", (), _table(self.origins), [NOTE])]

    def record(self) -> dict[str, Any]:
        """For JSON: shares and means over all origins, and of each."""
        each = [{"t": origin.now} | _rounded(summarize([origin])) for origin in self.origins]
        return {"by": self.by, "all": _rounded(summarize(self.origins)), "origins": each}


def _rounded(numbers: dict[str, Any]) -> dict[str, Any]:
    return {name: rounded(value) for name, value in numbers.items()}


def look_back(section: Section, by: str) -> Backtest:
    """Read rows up to each origin only, and compare forecasts and choices with the rows after it.

    Origins are all t of a stream of up to 10 mega-batches, else its tenths. Configurations that have not
    finished are left out. UserError: none has finished, or only at the end of the stream.
    """
    megabatches = section.results[0].config["megabatches"]
    done = [
        pair for pair in zip(section.results, section.runs, strict=True) if pair[0].progress == megabatches
    ]
    whole = section._replace(results=[result for result, _ in done], runs=[runs for _, runs in done])
    started = [t for t in _times(megabatches) if any(not r.waiting(t) for r in whole.results)]
    if not started:
        raise UserError(
            "--backtest needs a configuration that has seen the whole stream in at least two stages"
        )
    actual = {each.label: each for each in find_candidates(whole, megabatches)}
    origins = [_origin(now, forecasts(find_candidates(whole, now), by), actual, by) for now in started]
    return Backtest(section.title, by, origins)


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
    return Origin(now, len(found), inside, errors, naive, _regrets(found, actual, by))


def _regrets(found: Sequence[Forecast], actual: dict[str, Candidate], by: str) -> list[float]:
    """Regrets within the limits that separate the candidates and leave at least two of them."""
    ended = list(actual.values())
    regrets, seen = [], set()
    for compute in _distinct([each.compute for each in ended]):
        for parameters in _distinct([each.parameters for each in ended]):
            limits = Limits(compute, parameters)
            within = [each for each in ended if limits.hold(each.compute, each.parameters)]
            labels = frozenset(each.label for each in within)
            choice = choose(found, limits)
            if len(within) > 1 and labels not in seen and choice:
                best = min(each.measured(by) for each in within)
                regrets.append(actual[choice.candidate.label].measured(by) / best - 1 if best else 0.0)
            seen.add(labels)
    return regrets


def _distinct(values: Sequence[float]) -> list[float]:
    """Ascending, without those at most 1% above the one before."""
    found: list[float] = []
    for value in sorted(values):
        if not found or value > 1.01 * found[-1]:
            found.append(value)
    return found


def summarize(origins: Sequence[Origin]) -> dict[str, float]:
    """Shares and means over some origins, in which each stage and limit counts once; NaN of nothing."""

    def mean(values: Sequence[float]) -> float:
        return float(np.mean(values)) if values else math.nan

    def joined(name: str) -> list[float]:
        return [value for origin in origins for value in getattr(origin, name)]

    regrets = joined("regrets")
    held = {level: [inside for origin in origins for inside in origin.inside[level]] for level in LEVELS}
    return {
        "stages": len(held[LEVELS[0]]),
        **{f"coverage_{level:g}": mean(values) for level, values in held.items()},
        "forecast_error": mean(joined("errors")),
        "naive_error": mean(joined("naive")),
        "limits": len(regrets),
        "mean_regret": mean(regrets),
        "small_regret": mean([regret <= TOLERANCE for regret in regrets]),
    }


def _table(origins: Sequence[Origin]) -> Table:
    """A row for each origin, and one over all of them."""
    header = ["t", "configurations", "stages to come", *(f"{level:.0%} interval held" for level in LEVELS)]
    header += ["forecast off by", "as last time", "limits", "mean regret", f"regret <= {TOLERANCE:.0%}"]
    rows = [_row(str(each.now), str(each.candidates), [each]) for each in origins]
    return [header, *rows, *([_row("all", "", origins)] if len(origins) > 1 else [])]


def _row(name: str, candidates: str, origins: Sequence[Origin]) -> list[str]:
    texts = {
        key: str(value) if key in ("stages", "limits") else "" if math.isnan(value) else f"{100 * value:.1f}%"
        for key, value in summarize(origins).items()
    }
    return [name, candidates, *texts.values()]
