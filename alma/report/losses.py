"""Evaluation matrices with two axes of time (`Losses`), staleness and the effect of age.

A `Losses` is an evaluation matrix with two axes of time: a row is a model, at the newest period
that it was trained on; a column is the held-out part of a period. The age of a cell is the period
of the column minus that of the row: 0 on data as new as the newest training data, negative on older
data. This module needs no run records, so that losses measured by other software can be read, too.
"""

import functools
import itertools
import math
from dataclasses import dataclass
from typing import NamedTuple

from alma.tables import number

LEAST_CELLS = 3
"""Cells of age above 0 from which losses tell what age adds."""


@dataclass(frozen=True)
class Losses:
    """The evaluation matrices of one configuration, one for each seed."""

    label: str
    until: tuple[float, ...]
    """For each row the newest period that the model was trained on, ascending."""
    periods: tuple[float, ...]
    """For each column its period, ascending, on the same axis."""
    seeds: tuple[tuple[tuple[float, ...], ...], ...]
    """Losses (seeds, rows, columns); NaN where there is none."""

    @functools.cached_property
    def by_age(self) -> dict[float, list[tuple[int, int]]]:
        """The cells (row, column) that all seeds have, by age, ages ascending; read-only."""
        cells: dict[float, list[tuple[int, int]]] = {}
        for i, until in enumerate(self.until):
            values_by_column = zip(*(seed[i] for seed in self.seeds), strict=True)
            for j, values in enumerate(values_by_column):
                if all(map(math.isfinite, values)):
                    cells.setdefault(self.periods[j] - until, []).append((i, j))
        return dict(sorted(cells.items()))


class MeanOverSeeds(NamedTuple):
    """A mean over seeds with its 90% t-interval; without an interval (NaN) for one seed."""

    mean: float
    low: float
    high: float

    def text(self, factor: float = 1.0) -> str:
        """In units of 1 / factor, such as "24 [22.5, 25.8]"; "24 [?]" without an interval."""
        mean, low, high = (number(factor * value) for value in self)
        return f"{mean} [{low}, {high}]" if self.low <= self.high else f"{mean} [?]"

    def within(self, lowest: float, highest: float) -> "MeanOverSeeds":
        """With each number moved to the nearest one from `lowest` to `highest`; NaN stays."""
        moved = []
        for value in self:
            moved.append(value if math.isnan(value) else min(max(value, lowest), highest))
        return MeanOverSeeds(*moved)


def t_interval(mean: float, error: float, freedom: float) -> MeanOverSeeds:
    """Student's 90% interval of a mean with its standard error and degrees of freedom."""
    # Importing scipy.special takes a sixth of the time of scipy.stats.
    from scipy.special import stdtrit

    half = float(stdtrit(freedom, 0.95)) * error
    return MeanOverSeeds(mean, mean - half, mean + half)


def staleness_curve(losses: Losses) -> dict[float, list[float]]:
    """Extra loss by age, one value per seed: the mean over periods of R[age] - R[0].

    R[a] is the loss on a period of the model that is a periods old, and R[0] that of the model
    whose newest training data are of this period. Only periods with both count, and only ages with
    such a period. Comparing models on one period takes out how difficult the period is. What
    remains holds two things: the stream has moved on, and an older model has trained less (see
    `age_effect`).
    """
    import numpy as np  # here, so that `alma report --help` does not load it

    until = np.array(losses.until)
    ages = np.array(losses.periods) - until[:, None]
    values = np.array(losses.seeds)
    measured = np.isfinite(values).all(0)
    is_fresh = measured & (ages == 0)
    fresh = np.where(is_fresh, values, 0.0).sum(1)  # (seeds, columns), one row each
    compared = measured & is_fresh.any(0)
    at, index = np.unique(ages[compared], return_inverse=True)
    counts = np.bincount(index)
    means = []
    for of_seed, fresh_of_seed in zip(values, fresh, strict=True):
        extra = (of_seed - fresh_of_seed)[compared]
        means.append(np.bincount(index, extra) / counts)
    by_age = np.array(means).T.tolist() if len(at) else []
    return dict(zip(at.tolist(), by_age, strict=True))


def staleness(losses: Losses) -> list[float]:
    """Extra loss per period of age, one value per seed: the slope of the staleness curve.

    By least squares over ages above 0, through 0 at age 0. NaN without an age above 0.
    """
    curve = staleness_curve(losses)
    later = {age: values for age, values in curve.items() if age > 0}
    return _slopes(later, len(losses.seeds))


def age_effect(losses: Losses) -> list[float]:
    """Extra loss per period of distance, corrected for the amount of training; one value per seed.

    The slope of (S(a) + S(-a)) / 2, where S is the staleness curve. On a full matrix that is the
    mean over periods s < t of (R[s, t] + R[t, s] - R[s, s] - R[t, t]) / 2: terms of the period
    alone (its difficulty) and of the model alone (its training) cancel, so that it is 0 on a stream
    that does not drift. It averages ageing (a > 0) and forgetting (a < 0): a model that keeps the
    past has half its staleness. NaN unless some age occurs with both signs.
    """
    curve = staleness_curve(losses)
    means = {}
    for age, values in curve.items():
        if age > 0 and -age in curve:
            both_sides = zip(values, curve[-age], strict=True)
            means[age] = [(ahead + behind) / 2 for ahead, behind in both_sides]
    return _slopes(means, len(losses.seeds))


def _slopes(curve: dict[float, list[float]], seeds: int) -> list[float]:
    """Least-squares slope through the origin, for each seed; NaN for an empty curve."""
    if not curve:
        return list(itertools.repeat(math.nan, seeds))
    total = math.fsum(age * age for age in curve)
    slopes = []
    for i in range(seeds):
        slopes.append(math.fsum(age * values[i] for age, values in curve.items()) / total)
    return slopes
