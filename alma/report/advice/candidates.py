"""Candidates: configurations as they were after mega-batch `now`, and what they will cost."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Any

import numpy as np

from alma import metrics
from alma.configs import canonical
from alma.errors import UserError
from alma.records import Run
from alma.report.advice.forecast import Array, Fit, LearningCurve, Scatter, estimate_scatter
from alma.report.advice.questions import sides
from alma.report.results import Result, Section, compute, find_sections, mean_and_deviation, trained
from alma.stages import stages

DRAWS = 1000
_LEAST = 1e-9  # of a metric to come: differences are of logs


@dataclass(frozen=True)
class Candidate:
    """A configuration as it was after mega-batch `now`. Its values and costs are of the rows up to then."""

    result: Result
    now: int  # the last t that was read
    start: int  # that of the run that is furthest: mega-batches after it are to come
    until: int  # the last t of the forecast

    @property
    def label(self) -> str:
        return self.result.label

    @property
    def seeds(self) -> list[int]:
        return [run.config["seed"] for run in self.result.runs]

    @property
    def command(self) -> str | None:
        """The command that makes or resumes its first run, if it is recorded."""
        return next((run.info["command"] for run in self.result.runs if "command" in run.info), None)

    @cached_property
    def sides(self) -> dict[str, str]:
        """The side of each question."""
        return sides(self.result)

    @cached_property
    def values(self) -> dict[int, float]:
        """The metric at t = 1..now, mean over seeds."""
        return {t: fmean(run[t] for run in self.of_runs) for t in range(1, self.now + 1)}

    @cached_property
    def of_runs(self) -> list[dict[int, float]]:
        """The metric at t = 1..now of each seed."""
        return [{t: rows[t]["value"] for t in range(1, self.now + 1)} for rows in self.result.repeats]

    @cached_property
    def ends(self) -> list[int]:
        """The t of its complete stages."""
        rows = self.result.repeats[0]
        found = [t for t in trained(rows) if t <= self.now]
        return [t for t in found if t - 1 not in rows or rows[t - 1]["stage"] != rows[t]["stage"]]

    @cached_property
    def to_come(self) -> list[int]:
        """The t at which its next stages end."""
        config = self.result.config
        schedule = stages(max(config["megabatches"], self.until), self.result.waiting_time, config["replay"])
        return [stage.last for stage in schedule if self.now < stage.last <= self.until]

    @cached_property
    def curve(self) -> LearningCurve:
        """The metric at the ends of stages. An error of 0 counts as half the smallest other one."""
        values = np.array([[rows[t]["value"] for t in self.ends] for rows in self.result.repeats])
        least = values[values > 0].min(initial=1.0) / 2
        return LearningCurve(np.array(self.ends, dtype=float), np.maximum(values, least))

    def measured(self, by: str, since: int = 0) -> float:
        """The measure over t = 1..now; "coming" over t = since + 1..now."""
        return _measure(by, self.values, since, self.now)

    def so_far(self, by: str) -> tuple[float, float]:
        """Mean and standard deviation over seeds of the measure until now; "coming": of the present value."""
        kind = "final" if by == "coming" else by
        return mean_and_deviation([_measure(kind, values, 0, self.now) for values in self.of_runs])

    @cached_property
    def compute(self) -> float:
        """Comp over t = 0..now, in TFLOPs."""
        return self.result.over_seeds(lambda rows: compute(rows, self.now))[0]

    @cached_property
    def compute_until(self) -> float:
        """Comp over t = 0..until, in TFLOPs: costs of stages to come lie on a line through those so far."""
        to_come = self._extended(lambda row: row["train_flops"], 1e12)
        return self.compute + sum(max(0.0, cost) for cost in to_come)

    @cached_property
    def parameters(self) -> float:
        """Parameters of the present model."""
        return self.result.over_seeds(lambda rows: rows[self.now]["parameters"])[0]

    @cached_property
    def parameters_until(self) -> float:
        """Parameters of the model at `until`, on a line through those so far."""
        return [self.parameters, *self._extended(lambda row: row["parameters"])][-1]

    def _extended(self, of_row: Callable[[dict[str, Any]], float], unit: float = 1) -> list[float]:
        """Values at the stages to come, on the line of least squares through those of its stages."""
        values = np.array([fmean(of_row(rows[t]) for rows in self.result.repeats) / unit for t in self.ends])
        n, count = len(values), len(self.to_come)
        if n < 2 or np.ptp(values) <= 1e-9 * abs(values).max():
            return [float(values[-1])] * count
        slope, start = np.polyfit(np.arange(n), values, 1)
        return [float(start + slope * (n + i)) for i in range(count)]

    def totals(self, by: str, draws: Array, values: Mapping[int, float] | None = None) -> Array:
        """Draws of the measure up to `until` (n,), from draws of the metric at `to_come` (n, stages).

        `values` at t = 1..now are those of the mean over seeds unless given.
        """
        values = values or self.values
        models = np.column_stack([np.full(len(draws), values[self.now]), draws])
        models = np.maximum(models, _LEAST)
        if by == "final":
            return models[:, -1]
        first = self.start if by == "coming" else self.now
        serving = np.searchsorted(self.to_come, range(first + 1, self.until + 1), "right")
        served = np.bincount(serving, minlength=models.shape[1])  # mega-batches of each model
        if by == "coming":
            return models @ served / served.sum()
        known = metrics.cumulative_error_rate(values)
        return (known + models @ served) / (self.until if by == "average" else 1)

    def run_totals(self, by: str, scatter: Scatter) -> list[float]:
        """The measure that each seed is expected to have by its own curve."""
        seeds = len(self.of_runs)
        fits = [Fit(self.curve.of_run(i), scatter, seeds) for i in range(seeds)]
        pairs = zip(fits, self.of_runs, strict=True)
        return [float(self.totals(by, fit.expected(self.to_come)[None], run)[0]) for fit, run in pairs]


def _measure(by: str, values: Mapping[int, float], since: int, until: int) -> float:
    """A measure over t = 1..until; "coming" over t = since + 1..until."""
    if by == "final":
        return values[until]
    function = metrics.cumulative_error_rate if by == "cer" else metrics.average
    return function({t: value for t, value in values.items() if t <= until and (by != "coming" or t > since)})


@dataclass(frozen=True)
class Forecast:
    """What is expected of a candidate, computed when it is asked for; the same for the same records."""

    candidate: Candidate
    by: str  # the measure
    scatter: Scatter

    @cached_property
    def fit(self) -> Fit:
        """The laws through the mean over seeds."""
        return Fit(self.candidate.curve, self.scatter)

    @cached_property
    def expected(self) -> float:
        """The measure by the mean of the laws."""
        return float(self.candidate.totals(self.by, self._path[None])[0])

    @cached_property
    def _path(self) -> Array:
        return self.fit.expected(self.candidate.to_come)

    @property
    def draws(self) -> Array:
        """Draws of the metric at the candidate's `to_come`, (DRAWS, stages)."""
        return self._drawn[0]

    @property
    def walks(self) -> Array:
        """Draws of the log factor by which the measure drifts from its law, (DRAWS,)."""
        return self._drawn[1]

    @cached_property
    def _drawn(self) -> tuple[Array, Array]:
        random = np.random.default_rng(list(canonical(self.candidate.result.config).encode()))
        draws = self.fit.draw(self.candidate.to_come, DRAWS, random)
        walked = self._path * np.exp(self.fit.walks(self.candidate.to_come, DRAWS, random))
        return draws, np.log(self.candidate.totals(self.by, walked) / self.expected)

    @cached_property
    def totals(self) -> Array:
        """Draws of the measure, (DRAWS,)."""
        return self.candidate.totals(self.by, self.draws)

    @cached_property
    def laws(self) -> Array:
        """Quantiles of the measure by laws alone, (DRAWS,)."""
        values, probability = self.fit.of_laws(self.candidate.to_come)
        totals = self.candidate.totals(self.by, values)
        order = totals.argsort()
        ranks = (np.arange(DRAWS) + 0.5) / DRAWS
        return totals[order][probability[order].cumsum().searchsorted(ranks).clip(max=len(order) - 1)]

    @cached_property
    def run_totals(self) -> list[float]:
        """The measure that each run is expected to have."""
        return self.candidate.run_totals(self.by, self.scatter)

    def at(self, t: int) -> Array:
        """Draws of the metric at a t after `now`, (DRAWS,)."""
        index = int(np.searchsorted(self.candidate.to_come, t, "right")) - 1
        present = self.candidate.values[self.candidate.now]
        return self.draws[:, index] if index >= 0 else np.full(len(self.draws), present)


def one_section(runs: Sequence[Run], until: int | None = None) -> Section:
    """The only stream and metric of the runs; unfinished seeds with rows up to `until` count beside finished
    ones. UserError: there are several, or no rows."""
    sections = find_sections(runs, until or math.inf)
    if len(sections) > 1:
        titles = "; ".join(section.title for section in sections)
        raise UserError(f"runs of different streams, metrics or B ({titles}): give the runs of one")
    return sections[0]


def _check_values(candidate: Candidate) -> None:
    """UserError: a value that is read is not a finite number >= 0."""
    for values, run in zip(candidate.of_runs, candidate.result.runs, strict=True):
        bad = [t for t, value in values.items() if not math.isfinite(value) or value < 0]
        if bad:
            raise UserError(f"{run.results}: the value at t={bad[0]} is not a finite number >= 0")


def find_candidates(section: Section, now: int | None = None, until: int | None = None) -> list[Candidate]:
    """The configurations with a complete stage by `now` (None: the last t of any run).

    `until` None: forecasts end with the stream, or after one more stage of all. UserError: no candidate, a
    value up to `now` is not a finite number, or `now` is not a mega-batch of the stream.
    """
    megabatches = section.results[0].megabatches
    last = max(result.progress for result in section.results)
    if now is not None and not 1 <= now <= megabatches:
        raise UserError(f"--from {now}: a mega-batch of the stream, from 1 to {megabatches}")
    now = last if now is None else now
    longest = max(result.waiting_time for result in section.results)
    until = until or (megabatches if now < megabatches else now + longest)
    start = min(now, last)
    found = []
    for result in section.results:
        candidate = Candidate(result, min(now, result.progress), start, until)
        _check_values(candidate)
        if candidate.ends:
            found.append(candidate)
    if not found:
        raise UserError(f"no stage is complete by t={now}: nothing to forecast from")
    return found


def forecasts(candidates: Sequence[Candidate], by: str) -> list[Forecast]:
    """A forecast of each candidate."""
    scatter = estimate_scatter([candidate.curve for candidate in candidates])
    return [Forecast(candidate, by, scatter) for candidate in candidates]
