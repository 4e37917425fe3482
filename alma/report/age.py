"""Loss against age: how fast a model falls behind a stream that drifts, and how far it is from the best one.

A `Losses` is an evaluation matrix with two axes of time: a row is a model, at the newest period that it was
trained on; a column is the held-out part of a period. The age of a cell is the period of the column minus
that of the row: 0 on data as new as the newest training data, negative on older data.
"""

import functools
import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from alma.report.results import Result, matrix
from alma.report.tables import number
from alma.stages import stages


@dataclass(frozen=True)
class Losses:
    """The evaluation matrices of one configuration, one for each seed."""

    label: str
    until: tuple[float, ...]  # per row: the newest period that the model was trained on, ascending
    periods: tuple[float, ...]  # per column, ascending, on the same axis
    seeds: tuple[tuple[tuple[float, ...], ...], ...]  # losses by row and column; NaN where there is none

    @functools.cached_property
    def by_age(self) -> dict[float, list[tuple[int, int]]]:
        """The (row, column) of the cells of each age that all seeds have, ages ascending; read-only."""
        found: dict[float, list[tuple[int, int]]] = {}
        for i, until in enumerate(self.until):
            of_row = zip(*(seed[i] for seed in self.seeds), strict=True)
            for j, (period, values) in enumerate(zip(self.periods, of_row, strict=True)):
                if all(map(math.isfinite, values)):
                    found.setdefault(period - until, []).append((i, j))
        return dict(sorted(found.items()))


class MeanOverSeeds(NamedTuple):
    """A mean over seeds with its 90% t-interval; without an interval (NaN) for one seed."""

    mean: float
    low: float
    high: float

    def text(self, factor: float = 1.0) -> str:
        """In multiples of 1 / factor, such as "24 [22.5, 25.8]"; "24 [?]" without an interval."""
        mean, low, high = (number(factor * each) for each in self)
        return f"{mean} [{low}, {high}]" if self.low <= self.high else f"{mean} [?]"


def losses_of(result: Result) -> Losses | None:
    """The losses of a run's configuration: nats a token, or errors in %; None without an evaluation matrix.

    A row per trained model, from the mega-batch at which its stage ends; NaN on held-out parts that the
    stream did not have then.
    """
    if not all(matrix(rows) for rows in result.repeats):
        return None
    plan = stages(result.megabatches, result.waiting_time)
    until = tuple(stage.last for stage in plan if stage.last <= result.progress)

    def loss(value: float) -> float:
        if result.metric == "perplexity":
            return math.log(value) if value > 0 else math.nan
        return result.display.factor * value

    if not until:
        return None
    matrices = map(matrix, result.repeats)
    periods = range(1, result.megabatches + 1)
    seeds = tuple(
        tuple(tuple(loss(by_t[t][j - 1]) if j <= len(by_t[t]) else math.nan for j in periods) for t in until)
        for by_t in matrices
    )
    return Losses(result.label, until, tuple(periods), seeds)


def staleness_curve(losses: Losses) -> dict[float, list[float]]:
    """Extra loss by age, one value per seed: the mean over periods of R[age] - R[0] on the same period.

    R[a] is the loss on a period of the model that is a periods old, and R[0] that of the model whose newest
    training data are of this period. Periods without both do not count, nor do ages without any period.
    Comparing models on one period takes out how difficult the period is. What remains holds two things: the
    stream has moved on, and an older model has trained less (see `age_effect`).
    """
    ages = losses.by_age
    fresh = {j: i for i, j in ages.get(0, [])}
    curve = {}
    for age, cells in ages.items():
        pairs = [(i, j) for i, j in cells if j in fresh]
        if pairs:
            curve[age] = [_mean([seed[i][j] - seed[fresh[j]][j] for i, j in pairs]) for seed in losses.seeds]
    return curve


def staleness(losses: Losses) -> list[float]:
    """Extra loss a period of age, one value per seed: the slope of the staleness curve for ages above 0.

    The line goes through 0 at age 0, by least squares. NaN without an age above 0.
    """
    curve = staleness_curve(losses)
    return _slopes({age: values for age, values in curve.items() if age > 0}, len(losses.seeds))


def age_effect(losses: Losses) -> list[float]:
    """Extra loss a period of distance, corrected for the amount of training; one value per seed.

    The slope of (S(a) + S(-a)) / 2, where S is the staleness curve. On a full matrix that is the mean over
    periods s < t of (R[s, t] + R[t, s] - R[s, s] - R[t, t]) / 2: terms of the period alone (its difficulty)
    and of the model alone (its training) cancel, so that it is 0 on a stream that does not drift. It averages
    ageing (a > 0) and forgetting (a < 0): a model that keeps the past has half its staleness.
    NaN without both sides.
    """
    curve = staleness_curve(losses)
    means = {}
    for age, values in curve.items():
        if age > 0 and -age in curve:
            means[age] = [(ahead + behind) / 2 for ahead, behind in zip(values, curve[-age], strict=True)]
    return _slopes(means, len(losses.seeds))


def _slopes(curve: dict[float, list[float]], seeds: int) -> list[float]:
    """Least-squares slope through the origin, for each seed."""
    if not curve:
        return [math.nan] * seeds
    total = math.fsum(age * age for age in curve)
    per_seed = zip(*([age * value for value in values] for age, values in curve.items()), strict=True)
    return [math.fsum(terms) / total for terms in per_seed]


def best_by_period(group: Iterable[Losses]) -> dict[float, float]:
    """The lowest loss on each period that any model of any configuration has, by its mean over seeds."""
    best: dict[float, float] = {}
    for losses in group:
        for i, j in itertools.chain(*losses.by_age.values()):
            mean = _mean([seed[i][j] for seed in losses.seeds])
            best[losses.periods[j]] = min(mean, best.get(losses.periods[j], math.inf))
    return best


def regret(losses: Losses, best: dict[float, float], ages: Callable[[float], bool]) -> list[float]:
    """Mean of R - best over the cells whose age passes, one value per seed; NaN without such cells.

    As the oracle-relative regret of TiC-LM (Li et al., ACL 2025, arXiv 2504.02107), whose oracle is trained
    anew on all data up to the period. Here `best` is the best model at hand.
    """
    cells = [cell for age, found in losses.by_age.items() if ages(age) for cell in found]
    return [_mean([seed[i][j] - best[losses.periods[j]] for i, j in cells]) for seed in losses.seeds]


def over_seeds(values: Sequence[float]) -> MeanOverSeeds:
    """Mean and t-interval over seeds."""
    mean = _mean(values)
    if len(values) < 2 or not math.isfinite(mean):
        return MeanOverSeeds(mean, math.nan, math.nan)
    return t_interval(mean, statistics.stdev(values) / math.sqrt(len(values)), len(values) - 1)


def welch(ours: Sequence[float], theirs: Sequence[float]) -> MeanOverSeeds:
    """Mean of ours less that of theirs, of other seeds: Welch's t-interval (1947)."""
    mean = _mean(ours) - _mean(theirs)
    if min(len(ours), len(theirs)) < 2 or not math.isfinite(mean):
        return MeanOverSeeds(mean, math.nan, math.nan)
    errors = [statistics.variance(each) / len(each) for each in (ours, theirs)]
    total = sum(errors)
    terms = sum(e**2 / (len(each) - 1) for e, each in zip(errors, (ours, theirs), strict=True))
    return t_interval(mean, math.sqrt(total), total**2 / terms if terms else 1)


def t_interval(mean: float, error: float, freedom: float) -> MeanOverSeeds:
    """Student's 90% interval of a mean with its standard error and degrees of freedom."""
    from scipy.special import stdtrit  # a sixth of the time that importing scipy.stats takes

    half = float(stdtrit(freedom, 0.95)) * error
    return MeanOverSeeds(mean, mean - half, mean + half)


def _mean(values: Sequence[float]) -> float:
    """NaN of none."""
    return math.fsum(values) / len(values) if values else math.nan
