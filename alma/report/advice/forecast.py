"""Forecasts of a learner's metric: a law in the data seen, with intervals.

The log of the metric of run s of a configuration, after t of the T mega-batches that were read, is

    y_s(t) = level + a_s + f(t / T) + walk(log t) + e_s(t),     e ~ N(0, noise^2)

    level   f = 0                                nothing changes any more
    power   f = -b log(t / T)
    offset  f = log((1 - c) (t / T)^-b + c)      the share c never goes away

(Hestness et al., 2017, arXiv 1712.00409, for the power law with an offset). a_s is the run effect, which
`decisions.py` estimates: a forecast is of the runs at hand. The mean of n runs has noise / sqrt(n) but the
same walk, of variance (drift * noise)^2 over e times the data. Noise and drift are estimated from all
configurations (`estimate_scatter`); close stages are averaged first, for speed.

Exponent b and offset c have a grid of values, level and variance the usual conjugate prior. The marginal
likelihood of each cell of the grid is then exact: it compares the laws, and a forecast mixes all of them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from scipy.linalg import solve_triangular
from scipy.special import gammaln

Array = np.ndarray[Any, np.dtype[np.float64]]

LAWS = ("level", "power", "offset")
LEVELS = (0.9, 0.5)
"""Probability of the intervals."""
DRIFTS = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0)
"""Deviations of the walk over e times the data, in multiples of the noise, that are compared."""
_NO_DRIFT = 3.0  # how much likelier no drift is a priori than each other one
_PRIOR = (0.1, 0.3, 0.6)  # of the laws
_EXPONENT, _SPREAD = 0.35, 0.8  # median and log-deviation of b a priori
_DEGREES = 5.0  # of freedom: the weight of the pooled noise against the residuals of one curve
_USUAL_NOISE = 0.03  # of one run, where no residuals tell; it counts as one residual
_GROUP = 1.1  # stages are averaged in groups of mega-batches up to this factor apart


def _grid() -> tuple[Array, Array, Array, Array]:
    """Exponents, offsets, prior probability and law of each cell."""
    exponents, offsets = np.linspace(0.02, 1.2, 100), np.linspace(0.04, 0.96, 40)
    cells = [(0.0, 0.0, 0), *((b, 0.0, 1) for b in exponents)]
    cells += [(b, c, 2) for b in exponents for c in offsets]
    b, c, law = (np.array(column) for column in zip(*cells, strict=True))
    density = np.ones_like(b)
    falling = law > 0
    density[falling] = np.exp(-0.5 * (np.log(b[falling] / _EXPONENT) / _SPREAD) ** 2) / b[falling]
    for index, share in enumerate(_PRIOR):
        density[law == index] *= share / density[law == index].sum()
    return b, c, density, law


_B, _C, _DENSITY, _LAW = _grid()


@dataclass(frozen=True)
class LearningCurve:
    """The metric at the ends of stages, over seeds: times (n,) in mega-batches, values (seeds, n) > 0."""

    times: Array
    values: Array

    @property
    def mean(self) -> Array:
        """Mean over seeds, (n,)."""
        return self.values.mean(0)

    def of_run(self, index: int) -> "LearningCurve":
        """The curve of one seed."""
        return LearningCurve(self.times, self.values[index : index + 1])


class Scatter(NamedTuple):
    """How the points of one run scatter around its law."""

    noise: float  # deviation of the log of one stage
    drift: float  # deviation of the walk over e times the data, in multiples of the noise


class _Groups:
    """The times of a curve in groups, and the laws whitened by the covariance of the groups' means."""

    def __init__(self, times: tuple[float, ...], drift: float):
        log_times = np.log(times)
        _, self.group = np.unique(np.floor(log_times / math.log(_GROUP) + 1e-9), return_inverse=True)
        self.sizes = np.bincount(self.group)
        ahead = self.mean(log_times) - log_times[-1]
        walk = drift**2 * np.minimum.outer(-ahead, -ahead)
        self.root = np.linalg.cholesky(np.diag(1 / self.sizes) + walk)
        self.one = self.whitened(np.ones(len(ahead)))
        self.precision = float(self.one @ self.one)
        self.shapes = self.whitened(_log_shape(ahead).T)  # (groups, cells)
        self.shape_levels = self.one @ self.shapes / self.precision
        self.shapes -= np.outer(self.one, self.shape_levels)
        self.shape_squares = (self.shapes**2).sum(0)
        self.log_volume = float(np.log(np.diag(self.root)).sum() + 0.5 * math.log(self.precision))

    def mean(self, values: Array) -> Array:
        """Means of the groups."""
        return np.bincount(self.group, values) / self.sizes

    def whitened(self, values: Array) -> Array:
        """Values (groups, ...) with independent noise."""
        return solve_triangular(self.root, values, lower=True)

    def fit(self, values: Array) -> tuple[Array, Array]:
        """Level and sum of squares of each law, (cells,), for whitened values (groups,)."""
        level = self.one @ values / self.precision
        rest = values - self.one * level
        squares = rest @ rest - 2 * rest @ self.shapes + self.shape_squares
        return level - self.shape_levels, np.maximum(squares, 0.0)


_groups = lru_cache(32)(_Groups)


class Fit:
    """The posterior of a curve's law. `scatter` is that of `estimate_scatter`."""

    def __init__(self, curve: LearningCurve, scatter: Scatter, seeds: int | None = None):
        """`seeds`: as many as the mean has whose law the curve is to be weighed like (None: its own)."""
        seeds = seeds or len(curve.values)
        self._drift = scatter.drift * math.sqrt(seeds)  # more seeds lessen the noise, not the walk
        groups = self._groups = _groups(tuple(curve.times), self._drift)
        values = groups.whitened(groups.mean(np.log(curve.mean)))
        self._now, self._seeds = math.log(curve.times[-1]), seeds
        self._level, self._squares = groups.fit(values)
        self.residual_freedom = max(0, len(values) - 3)  # level, exponent and offset fit three groups
        self.residual_squares = float(self._squares.min()) * seeds  # of one run
        self.log_evidence = self.weigh(scatter.noise)

    def weigh(self, noise: float) -> float:
        """Weigh the laws by their likelihood with this noise of one run; log of the sum of the weights."""
        prior = _DEGREES * noise**2 / self._seeds
        self._freedom = _DEGREES + len(self._groups.sizes) - 1
        self._scale = (prior + self._squares) / self._freedom  # of the variance, (cells,)
        weight = np.log(_DENSITY) - 0.5 * self._freedom * np.log(prior + self._squares)
        self._probability = np.exp(weight - weight.max())
        total = float(self._probability.sum())
        self._probability /= total
        constants = gammaln(self._freedom / 2) - gammaln(_DEGREES / 2) + 0.5 * _DEGREES * math.log(prior)
        return float(weight.max() + math.log(total) + constants - self._groups.log_volume)

    @property
    def law(self) -> tuple[str, float]:
        """The most probable law, and its probability."""
        shares = np.bincount(_LAW, self._probability, len(LAWS))
        return LAWS[int(shares.argmax())], float(shares.max())

    def expected(self, times: Sequence[float]) -> Array:
        """The metric that the laws expect at times after the curve's end, (times,)."""
        return (self._probability * np.exp(self._level)) @ _shapes(tuple(times), self._now)

    def of_laws(self, times: Sequence[float]) -> tuple[Array, Array]:
        """The metric that each law expects at times after the curve's end, (laws, times), and the laws'
        probabilities."""
        return np.exp(self._level)[:, None] * _shapes(tuple(times), self._now), self._probability

    def walks(self, times: Sequence[float], draws: int, random: np.random.Generator) -> Array:
        """Draws of the log factors by which the metric drifts from its law, (draws, times)."""
        ahead = np.log(np.asarray(times, dtype=float)) - self._now
        if not self._drift:
            return np.zeros((draws, len(ahead)))
        deviation = self._deviation(self._probability @ self._scale, draws, random)
        return self._walk(deviation, ahead, random)

    def draw(self, times: Sequence[float], draws: int, random: np.random.Generator) -> Array:
        """Draws of the metric at times after the curve's end, (draws, times)."""
        ahead = np.log(np.asarray(times, dtype=float)) - self._now
        cell = random.choice(len(self._level), draws, p=self._probability)
        deviation = self._deviation(self._scale[cell], draws, random)
        level = self._level[cell] + deviation / math.sqrt(self._groups.precision) * random.standard_normal(
            draws
        )
        noise = deviation[:, None] * random.standard_normal((draws, len(ahead)))
        law = level[:, None] + np.log(_shapes(tuple(times), self._now)[cell])
        return np.exp(law + self._walk(deviation, ahead, random) + noise)

    def _deviation(self, scale: Any, draws: int, random: np.random.Generator) -> Array:
        return np.sqrt(self._freedom * scale / random.chisquare(self._freedom, draws))

    def _walk(self, deviation: Array, ahead: Array, random: np.random.Generator) -> Array:
        steps = random.standard_normal((len(deviation), len(ahead))) * np.sqrt(np.diff(ahead, prepend=0.0))
        return self._drift * deviation[:, None] * steps.cumsum(1)


def _log_shape(ahead: Array) -> Array:
    """Log of the laws at log(t / T) = `ahead` (n,), without their level: (cells, n)."""
    b, c = _B[:, None], _C[:, None]
    return np.log((1 - c) * np.exp(-b * ahead) + c)


@lru_cache(8)
def _shapes(times: tuple[float, ...], now: float) -> Array:
    """The laws at times after exp(now), without their level: (cells, times)."""
    return np.exp(_log_shape(np.log(np.array(times, dtype=float)) - now))


def interval(draws: Array, level: float = LEVELS[0]) -> Any:
    """Lower and upper end of the central interval of this probability, over the first dimension."""
    return np.quantile(draws, [(1 - level) / 2, (1 + level) / 2], axis=0)


def estimate_scatter(curves: Sequence[LearningCurve]) -> Scatter:
    """Noise and drift of one run: of DRIFTS the likeliest, by the residuals of all curves.

    The noise is also that by which the steps of runs of one configuration differ.
    """
    between, steps = _between_runs(curves)
    found = []
    for drift in DRIFTS:
        fits = [Fit(curve, Scatter(_USUAL_NOISE, drift)) for curve in curves]
        used = [fit for fit in fits if fit.residual_freedom]
        squares = _USUAL_NOISE**2 + sum(fit.residual_squares for fit in used) + between
        noise = math.sqrt(squares / (1 + sum(fit.residual_freedom for fit in used) + steps))
        evidence = sum(fit.weigh(noise) for fit in fits) - (math.log(_NO_DRIFT) if drift else 0.0)
        found.append((evidence, Scatter(noise, drift)))
    return max(found)[1]


def _between_runs(curves: Sequence[LearningCurve]) -> tuple[float, int]:
    """Squares of the noise by which steps from stage to stage differ between seeds, and their number."""
    squares, number = 0.0, 0
    for curve in curves:
        steps = np.diff(np.log(curve.values))  # without the run effect; each has the noise of two stages
        squares += float(((steps - steps.mean(0)) ** 2).sum()) / 2
        number += (len(steps) - 1) * steps.shape[1]
    return squares, number
