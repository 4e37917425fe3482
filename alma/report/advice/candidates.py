"""Candidates: configurations as they were after mega-batch `now`, what they promise and cost."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import fmean

import numpy as np

from alma.configs import canonical
from alma.errors import UserError
from alma.records import Run
from alma.report.advice.forecast import Fit, LearningCurve, Scatter, estimate_scatter, interval, shared_priors
from alma.report.advice.questions import LEARNER, QUESTIONS
from alma.report.advice.staleness import Array
from alma.report.losses import MeanOverSeeds
from alma.report.results import Result, Section, find_sections, trained
from alma.stages import stages

DRAWS = 1000
_LEAST = 1e-9  # of a metric to come: differences are of logs


@dataclass(frozen=True)
class Candidate:
    """A configuration as it was after mega-batch `now`, from the rows up to then.

    The *measure* is the mean of the metric over the mega-batches to come, start+1..until, of the models that
    serve there: a learner that waits serves its old one.
    """

    result: Result
    now: int  # the last t that was read
    start: int  # that of the run that is furthest: mega-batches after it are to come
    until: int  # the last t of the forecast
    scatter: Scatter | None = None  # that of all candidates; None, as the prior: not yet estimated
    prior: Array | None = field(default=None, compare=False)  # of the laws

    @property
    def label(self) -> str:
        return self.result.label

    @property
    def seeds(self) -> list[int]:
        return [run.config["seed"] for run in self.result.runs]

    @property
    def command(self) -> str | None:
        """The command that makes or resumes its first run, if it is recorded."""
        return self.result.runs[0].info.get("command")

    @cached_property
    def sides(self) -> dict[str, str]:
        """The side of each question, and the learner."""
        sides = {question: side(self.result) for question, side in QUESTIONS.items()}
        return sides | {LEARNER: self.result.learner}

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
        schedule = stages(max(self.result.megabatches, self.until), self.result.waiting_time)
        return [stage.last for stage in schedule if self.now < stage.last <= self.until]

    @cached_property
    def curve(self) -> LearningCurve:
        """The metric at the ends of stages. An error of 0 counts as half the smallest other one."""
        values = np.array([[rows[t]["value"] for t in self.ends] for rows in self.result.repeats])
        least = values[values > 0].min(initial=1.0) / 2
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
        """The sum over the stages to come, on the line of least squares through the costs of those so far."""
        values = [fmean(rows[t][cost] for rows in self.result.repeats) for t in self.ends]
        n, coming = len(values), np.arange(len(self.to_come))
        slope, first = np.polyfit(range(n), values, 1) if n > 1 else (0.0, values[0])
        return float(np.maximum(first + slope * (n + coming), 0.0).sum())

    @cached_property
    def fit(self) -> Fit:
        """The laws through the mean over seeds."""
        return self._fit(self.curve.values)

    def _fit(self, values: Array) -> Fit:
        assert self.scatter
        assert self.prior is not None
        return Fit(self.curve._replace(values=values), self.scatter, len(self.curve.values), self.prior)

    def measure(self, metric: Array, present: float | None = None) -> Array:
        """The measure, (n,), from the metric at `to_come`, (n, stages); `present`: that of the present model
        (None: the mean over seeds)."""
        now = self.values[self.now] if present is None else present
        models = np.maximum(np.column_stack([np.full(len(metric), now), metric]), _LEAST)
        serving = np.searchsorted(self.to_come, range(self.start + 1, self.until + 1), "right")
        served = np.bincount(serving, minlength=models.shape[1])  # mega-batches of each model
        return models @ served / served.sum()

    @cached_property
    def expected(self) -> float:
        """The measure that the laws expect."""
        return float(self.measure(self.fit.expected(self.to_come)[None])[0])

    @property
    def forecast(self) -> MeanOverSeeds:
        """The expected measure with its 90% interval."""
        return MeanOverSeeds(self.expected, *interval(self.measure(self.draws[0])).tolist())

    @cached_property
    def of_runs(self) -> list[float]:
        """The measure that each seed is expected to have by its own curve."""
        paths = [self._fit(values[None]).expected(self.to_come) for values in self.curve.values]
        present = [rows[self.now]["value"] for rows in self.result.repeats]
        return [float(self.measure(path[None], now)[0]) for path, now in zip(paths, present, strict=True)]

    @cached_property
    def draws(self) -> tuple[Array, Array]:
        """Draws of the metric at `to_come`, and of the log factors of its walk: (DRAWS, stages) each."""
        random = np.random.default_rng(list(canonical(self.result.config).encode()))
        return self.fit.draw(self.to_come, DRAWS, random)

    @cached_property
    def departures(self) -> Array:
        """Draws of the log ratio of the measure to the expected one, (DRAWS,): laws, by rank, and walks."""
        measures = self.measure(self.fit.of_laws(self.to_come))
        order = measures.argsort()
        ranks = (np.arange(DRAWS) + 0.5) / DRAWS
        at = order[self.fit.probability[order].cumsum().searchsorted(ranks).clip(max=len(order) - 1)]
        walked = self.measure(self.fit.expected(self.to_come) * np.exp(self.draws[1]))
        return np.log(measures[at] / measures[at].mean()) + np.log(walked / self.expected)


def one_section(runs: Sequence[Run], until: int | None = None) -> Section:
    """The only stream and metric of the runs; unfinished seeds with rows up to `until` count beside finished
    ones. UserError: there are several, or no rows."""
    sections = find_sections(runs, until or math.inf)
    if len(sections) > 1:
        titles = "; ".join(section.title for section in sections)
        raise UserError(f"runs of different streams, metrics or B ({titles}): give the runs of one")
    return sections[0]


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
    found = [Candidate(each, min(now, each.progress), min(now, last), until) for each in section.results]
    for each in found:
        for rows, run in zip(each.result.repeats, each.result.runs, strict=True):
            bad = [t for t in range(1, each.now + 1) if not 0 <= rows[t]["value"] < math.inf]
            if bad:
                raise UserError(f"{run.results}: the value at t={bad[0]} is not a finite number >= 0")
    found = [each for each in found if each.ends]
    if not found:
        raise UserError(f"no stage is complete by t={now}: nothing to forecast from")
    curves = [each.curve for each in found]
    scatter = estimate_scatter(curves)
    priors = zip(found, shared_priors(curves, scatter), strict=True)
    return [replace(each, scatter=scatter, prior=prior) for each, prior in priors]


def within(found: Sequence[Candidate], budget: float | None) -> list[Candidate]:
    """The candidates within a budget of compute to come, in TFLOPs (None: no limit). 1% more counts as equal:
    stages differ in size."""
    return [each for each in found if budget is None or each.compute <= 1.01 * budget]


def choose(allowed: Sequence[Candidate]) -> Candidate:
    """The rule of choice: the lowest expected measure."""
    return min(allowed, key=lambda each: each.expected)
