"""Candidates: configurations as they were after mega-batch `now`, and what they will cost."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean

import numpy as np

from alma import metrics
from alma.configs import canonical
from alma.errors import UserError
from alma.records import Run
from alma.report.advice.forecast import Array, Fit, LearningCurve, pooled_noise
from alma.report.html.sections import Section, find_sections
from alma.report.results import Measure, Result, compute, mean_and_deviation, trained, training_flops
from alma.stages import stages

DRAWS = 1000


@dataclass(frozen=True)
class Candidate:
    """A configuration as it was after mega-batch `now`; later rows are not read."""

    result: Result
    now: int  # the last t that was read
    until: int  # the last t of the forecast
    command: str | None = None  # that makes or resumes its first run, if it is recorded

    @cached_property
    def label(self) -> str:
        """Learner, variant, settings, w and replay."""
        return self.result.label

    @cached_property
    def values(self) -> dict[int, float]:
        """The metric at t = 1..now, mean over seeds."""
        return {t: fmean(rows[t]["value"] for rows in self.result.repeats) for t in range(1, self.now + 1)}

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

    def _mean(self, measure: Measure) -> float:
        return fmean(map(measure, self.result.repeats))

    def measured(self, by: str) -> float:
        """The measure over t = 1..now."""
        return _measure(by, self.values, self.now)

    def deviation(self, by: str) -> float:
        """Standard deviation of the measure over seeds; 0 of one seed."""
        values = [{t: row["value"] for t, row in rows.items()} for rows in self.result.repeats]
        return mean_and_deviation([_measure(by, each, self.now) for each in values])[1]

    @cached_property
    def compute(self) -> float:
        """Comp over t = 0..now, in TFLOPs."""
        return self._mean(lambda rows: compute(rows, self.now))

    @cached_property
    def compute_until(self) -> float:
        """Comp over t = 0..until, in TFLOPs: costs of stages to come lie on a line through those so far."""
        repeats = self.result.repeats
        costs = [fmean(training_flops(rows[t]) for rows in repeats) / 1e12 for t in self.ends]
        return self.compute + sum(max(0.0, cost) for cost in _extended(np.array(costs), len(self.to_come)))

    @cached_property
    def parameters(self) -> float:
        """Parameters of the present model."""
        return self._mean(lambda rows: rows[self.now]["parameters"])

    @cached_property
    def parameters_until(self) -> float:
        """Parameters of the model at `until`, on a line through those so far."""
        counts = [fmean(rows[t]["parameters"] for rows in self.result.repeats) for t in self.ends]
        return [self.parameters, *_extended(np.array(counts), len(self.to_come))][-1]

    def totals(self, by: str, draws: Array) -> Array:
        """Draws of the measure over t = 1..until (draws,), from draws of the metric at `to_come`."""
        present = self.values[self.now]
        if by == "final":
            return draws[:, -1] if self.to_come else np.full(len(draws), present)
        served = np.diff([self.now + 1, *self.to_come, self.until + 1])  # mega-batches of each model
        known = metrics.cumulative_error_rate(self.values) + present * served[0]
        return (known + draws @ served[1:]) / (self.until if by == "average" else 1)


def _measure(by: str, values: dict[int, float], until: int) -> float:
    """A measure over t = 1..until."""
    if by == "final":
        return values[until]
    function = metrics.average if by == "average" else metrics.cumulative_error_rate
    return function({t: value for t, value in values.items() if t <= until})


def _extended(values: Array, count: int) -> list[float]:
    """The next values of a series, on the line of least squares through it."""
    n = len(values)
    if n < 2 or np.ptp(values) <= 1e-9 * abs(values).max():
        return [float(values[-1])] * count if n else []
    slope, start = np.polyfit(np.arange(n), values, 1)
    return [float(start + slope * (n + i)) for i in range(count)]


@dataclass(frozen=True)
class Forecast:
    """What is expected of a candidate."""

    candidate: Candidate
    fit: Fit
    draws: Array  # of the metric at the candidate's `to_come`, (DRAWS, stages)
    totals: Array  # of the measure over t = 1..until, (DRAWS,)

    @cached_property
    def expected(self) -> float:
        """Mean of the measure."""
        return float(self.totals.mean())

    def at(self, t: int) -> Array:
        """Draws of the metric at a t after `now`, (DRAWS,)."""
        index = int(np.searchsorted(self.candidate.to_come, t, "right")) - 1
        present = self.candidate.values[self.candidate.now]
        return self.draws[:, index] if index >= 0 else np.full(len(self.draws), present)


def one_section(runs: Sequence[Run]) -> Section:
    """The only stream and metric of the runs. UserError: there are several or none."""
    sections = find_sections(runs)
    if not sections:
        raise UserError("no rows yet in these runs: nothing has been evaluated so far")
    if len(sections) > 1:
        titles = "; ".join(section.title for section in sections)
        raise UserError(f"runs of different streams, metrics or B ({titles}): give the runs of one")
    return sections[0]


def check_values(section: Section) -> None:
    """UserError: a value is not a finite number >= 0."""
    for result, repeats in zip(section.results, section.runs, strict=True):
        for rows, run in zip(result.repeats, repeats, strict=True):
            bad = [t for t, row in rows.items() if not math.isfinite(row["value"]) or row["value"] < 0]
            if bad:
                raise UserError(f"{run.results}: the value at t={bad[0]} is not a finite number >= 0")


def find_candidates(section: Section, now: int | None = None) -> list[Candidate]:
    """The configurations with a complete stage by `now` (None: the last t of any run).

    UserError: there is none, a value is not a finite number, or `now` is not a mega-batch of the stream.
    """
    check_values(section)
    megabatches = section.results[0].config["megabatches"]
    last = max(result.progress for result in section.results)
    now = last if now is None else now
    if not 1 <= now <= megabatches:
        raise UserError(f"--from {now}: a mega-batch of the stream, from 1 to {megabatches}")
    longest = max(result.waiting_time for result in section.results)
    until = megabatches if now < megabatches else now + longest
    found = []
    for result, runs in zip(section.results, section.runs, strict=True):
        seen = min(now, result.progress)
        command = next((run.info["command"] for run in runs if "command" in run.info), None)
        candidate = Candidate(result, seen, until, command)
        found += [candidate] if seen and candidate.ends else []
    if not found:
        raise UserError(f"no stage is complete by t={now}: nothing to forecast from")
    return found


def forecasts(candidates: Sequence[Candidate], by: str) -> list[Forecast]:
    """A forecast of each candidate. Draws are the same for the same records."""
    noise = pooled_noise([candidate.curve for candidate in candidates])
    found = []
    for candidate in candidates:
        fit = Fit(candidate.curve, noise)
        seed = canonical(candidate.result.config).encode()
        draws = fit.draw(candidate.to_come, DRAWS, np.random.default_rng(list(seed)))
        found.append(Forecast(candidate, fit, draws, candidate.totals(by, draws)))
    return found
