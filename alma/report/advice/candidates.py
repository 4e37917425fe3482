"""Candidates of the advice: configurations, with forecasts of their metric and their cost."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import fmean

import numpy as np

from alma.configs import canonical
from alma.errors import UserError
from alma.records import Run
from alma.report.advice.forecast import (
    Fit,
    LearningCurve,
    Scatter,
    estimate_scatter,
    interval,
    shared_priors,
)
from alma.report.advice.law import Array
from alma.report.advice.questions import LEARNER, QUESTIONS
from alma.report.losses import MeanOverSeeds
from alma.report.results import Result, Section, find_sections, matrix, trained
from alma.stages import stages

DRAWS = 1000
_LEAST = 1e-9  # least forecast of a metric, since differences are taken of logs
_TOLERANCE = 1.01  # a budget may be exceeded by 1%, since stages differ in size


@dataclass(frozen=True)
class Candidate:
    """A configuration as it was after mega-batch `now`, from the rows up to then.

    Candidates are compared by their *measure*: the mean of the metric over the mega-batches to
    come, start+1..until, each with the model that is deployed then. A learner that waits keeps its
    old model deployed.
    """

    result: Result
    now: int
    """The last t whose row is used."""
    start: int
    """The last t of any candidate's rows; mega-batches after it are to come."""
    until: int
    """The last t of the forecast."""
    scatter: Scatter | None = None
    """Noise and drift, estimated from all candidates; None: not yet estimated."""
    prior: Array | None = field(default=None, compare=False)
    """Prior of the laws, (cells,), see `forecast`; None: not yet estimated."""

    @property
    def label(self) -> str:
        """The name of the configuration in reports."""
        return self.result.label

    @property
    def seeds(self) -> list[int]:
        """The seeds of its runs."""
        return [run.config["seed"] for run in self.result.runs]

    @property
    def command(self) -> str | None:
        """The command that starts or resumes its first run, if it is recorded."""
        return self.result.runs[0].info.get("command")

    @cached_property
    def sides(self) -> dict[str, str]:
        """The side that it takes on each question, see `questions`, and its learner."""
        sides = {question: side(self.result) for question, side in QUESTIONS.items()}
        return sides | {LEARNER: self.result.learner}

    @cached_property
    def values(self) -> dict[int, float]:
        """The metric at t = 1..now, mean over seeds; without t whose model was not tested."""
        means = {}
        for t in range(1, self.now + 1):
            mean = fmean(rows[t]["value"] for rows in self.result.repeats)
            if not math.isnan(mean):
                means[t] = mean
        return means

    @cached_property
    def ends(self) -> list[int]:
        """The t of its complete stages, of tested models."""
        rows = self.result.repeats[0]
        ends = []
        for t in trained(rows):
            is_first = t - 1 not in rows or rows[t - 1]["stage"] != rows[t]["stage"]
            if t in self.values and is_first:
                ends.append(t)
        return ends

    @cached_property
    def to_come(self) -> list[int]:
        """The t at which its next stages end."""
        schedule = stages(max(self.result.megabatches, self.until), self.result.waiting_time)
        return [stage.last for stage in schedule if self.now < stage.last <= self.until]

    @cached_property
    def curve(self) -> LearningCurve:
        """The metric at the ends of stages. An error of 0 counts as half the smallest other one.

        If all are 0, that of the whole evaluation matrix.
        """
        curves = []
        for rows in self.result.repeats:
            curves.append([rows[t]["value"] for t in self.ends])
        values = np.array(curves)
        observed = values
        if not (values > 0).any():
            cells = [matrix(rows).get(t, []) for rows in self.result.repeats for t in self.ends]
            observed = np.concatenate([values.ravel(), *map(np.array, cells)])
        least = observed[observed > 0].min(initial=1.0) / 2
        return LearningCurve(np.array(self.ends, dtype=float), np.maximum(values, least))

    def mean_since(self, t: int) -> float:
        """The mean of the metric over t+1..now."""
        return fmean(value for at, value in self.values.items() if at > t)

    @cached_property
    def compute(self) -> float:
        """Training compute to come, in TFLOPs."""
        return self._to_come("train_flops") / 1e12

    @cached_property
    def hours(self) -> float:
        """Hours of training to come, by the clock of the runs."""
        return self._to_come("seconds") / 3600

    def _to_come(self, cost: str) -> float:
        """The sum of a cost over the stages to come, extrapolated on a line through past stages."""
        costs = []
        for t in self.ends:
            costs.append(fmean(rows[t][cost] for rows in self.result.repeats))
        slope = 0.0
        first = costs[0]
        if len(costs) > 1:
            slope, first = np.polyfit(range(len(costs)), costs, 1)
        stages_to_come = len(costs) + np.arange(len(self.to_come))
        return float(np.maximum(first + slope * stages_to_come, 0.0).sum())

    @cached_property
    def fit(self) -> Fit:
        """The fit of the laws to the mean curve over seeds."""
        return self._fit(self.curve.values)

    def _fit(self, values: Array) -> Fit:
        """The fit of the laws to the mean of the curves `values` (seeds, stages)."""
        assert self.scatter
        assert self.prior is not None
        curve = self.curve._replace(values=values)
        return Fit(curve, self.scatter, len(self.curve.values), self.prior)

    def measure(self, metric: Array, present: float | None = None) -> Array:
        """The measure, (n,), given the metric after each stage to come, (n, stages).

        `present` is the metric of the model that is deployed now; None: its mean over seeds.
        """
        if present is None:
            present = self.values[self.now]
        present_column = np.full(len(metric), present)
        by_model = np.maximum(np.column_stack([present_column, metric]), _LEAST)
        serving = np.searchsorted(self.to_come, range(self.start + 1, self.until + 1), "right")
        # Number of mega-batches for which each model is deployed.
        served = np.bincount(serving, minlength=by_model.shape[1])
        return by_model @ served / served.sum()

    @cached_property
    def expected(self) -> float:
        """The expected measure by the fitted laws."""
        return float(self.measure(self.fit.expected(self.to_come)[None])[0])

    @property
    def forecast(self) -> MeanOverSeeds:
        """The expected measure with its 90% interval."""
        return MeanOverSeeds(self.expected, *interval(self.measure(self.draws[0])).tolist())

    @cached_property
    def of_runs(self) -> list[float]:
        """The expected measure of each seed, from a fit to its own curve."""
        measures = []
        for values, rows in zip(self.curve.values, self.result.repeats, strict=True):
            expected = self._fit(values[None]).expected(self.to_come)
            present = rows[self.now]["value"]
            measures.append(float(self.measure(expected[None], present)[0]))
        return measures

    @cached_property
    def draws(self) -> tuple[Array, Array]:
        """Draws of the metric after each stage to come, and of its walk: (DRAWS, stages) each.

        See `Fit.draw`. The random seed depends on the configuration only, so draws are repeatable.
        """
        random = np.random.default_rng(list(canonical(self.result.config).encode()))
        return self.fit.draw(self.to_come, DRAWS, random)

    @cached_property
    def departures(self) -> Array:
        """Draws of the error of the forecast: log(measure / expected measure), (DRAWS,).

        Each is the sum of an error of the law, ascending over the draws, and of one of the walk.
        Sorted errors let `Field` pair candidates so that their laws err in the same direction.
        """
        by_law = self.measure(self.fit.of_laws(self.to_come))
        order = by_law.argsort()
        cumulated = self.fit.probability[order].cumsum()
        quantiles = (np.arange(DRAWS) + 0.5) / DRAWS
        ranks = cumulated.searchsorted(quantiles).clip(max=len(order) - 1)
        measures = by_law[order[ranks]]
        walked = self.measure(self.fit.expected(self.to_come) * np.exp(self.draws[1]))
        return np.log(measures / measures.mean()) + np.log(walked / self.expected)


def one_section(runs: Sequence[Run], until: int | None = None) -> Section:
    """The only stream and metric of the runs.

    Unfinished seeds with rows up to `until` count beside finished ones. UserError: there are
    several streams or metrics, or no rows.
    """
    sections = find_sections(runs, until or math.inf)
    if len(sections) > 1:
        titles = "; ".join(section.title for section in sections)
        raise UserError(f"runs of different streams, metrics or B ({titles}): give the runs of one")
    return sections[0]


def find_candidates(
    section: Section,
    now: int | None = None,
    until: int | None = None,
) -> list[Candidate]:
    """The configurations with a complete stage by `now`.

    now      the last t to use; None: the last t of any run
    until    last t of the forecasts; None: the end of the stream or, if that is reached, one more
             stage of all

    UserError: no candidate, a value up to `now` is not a finite number, or `now` is not a
    mega-batch of the stream.
    """
    megabatches = section.results[0].megabatches
    last = max(result.progress for result in section.results)
    if now is None:
        now = last
    elif not 1 <= now <= megabatches:
        raise UserError(f"--from {now}: a mega-batch of the stream, from 1 to {megabatches}")
    if not until:
        longest_wait = max(result.waiting_time for result in section.results)
        until = megabatches if now < megabatches else now + longest_wait
    candidates = []
    for result in section.results:
        candidate = Candidate(result, min(now, result.progress), min(now, last), until)
        _check_values(candidate)
        candidates.append(candidate)
    candidates = [
        candidate
        for candidate in candidates
        if candidate.ends and candidate.now in candidate.values
    ]
    if not candidates:
        raise UserError(f"no stage is complete by t={now}: nothing to forecast from")
    curves = [candidate.curve for candidate in candidates]
    scatter = estimate_scatter(curves)
    priors = shared_priors(curves, scatter)
    return [
        replace(candidate, scatter=scatter, prior=prior)
        for candidate, prior in zip(candidates, priors, strict=True)
    ]


def _check_values(candidate: Candidate) -> None:
    """Raise a UserError if a value of the metric up to `now` is not a finite number >= 0.

    NaN is allowed on a held-out part: the model was not tested there.
    """
    for rows, run in zip(candidate.result.repeats, candidate.result.runs, strict=True):
        for t in range(1, candidate.now + 1):
            value = rows[t]["value"]
            is_untested = candidate.result.part and math.isnan(value)
            if not is_untested and not 0 <= value < math.inf:
                raise UserError(f"{run.results}: the value at t={t} is not a finite number >= 0")


def within(candidates: Sequence[Candidate], budget: float | None) -> list[Candidate]:
    """The candidates within a budget of compute to come, in TFLOPs (None: no limit).

    1% more counts as equal: stages differ in size.
    """
    if budget is None:
        return list(candidates)
    return [candidate for candidate in candidates if candidate.compute <= _TOLERANCE * budget]


def choose(allowed: Sequence[Candidate]) -> Candidate:
    """The candidate with the lowest expected measure."""
    return min(allowed, key=lambda candidate: candidate.expected)
