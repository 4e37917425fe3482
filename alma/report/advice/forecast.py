"""Forecasts of a learner's metric: a law in the data seen, with intervals.

After t mega-batches the metric is, as a multiple of its level at the last t that was read, T,

    level   1                              nothing changes any more
    power   (t / T) ** -b
    offset  (1 - c) (t / T) ** -b + c      the share c never goes away

(Hestness et al., 2017, arXiv 1712.00409, for the power law with an offset). The logarithm of the metric
leaves the law by normal noise and by a random walk in log t, so that recent stages say most about the next
ones. Exponent and offset have a grid of values, level and variance the usual conjugate prior. The marginal
likelihood of each cell of the grid is then exact: it compares the laws, and a forecast mixes all of them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.linalg import solve_triangular
from scipy.special import logsumexp

Array = np.ndarray[Any, np.dtype[np.float64]]

LAWS = ("level", "power", "offset")
LEVELS = (0.9, 0.5)
"""Probability of the intervals."""
_PRIOR = (0.1, 0.3, 0.6)  # of the laws
_EXPONENT, _SPREAD = 0.35, 0.8  # median and log-deviation of b a priori
_DEGREES = 5.0  # of freedom: the weight of the pooled noise against the residuals of one curve
_USUAL_NOISE = 0.03  # of a mean over seeds, where neither residuals nor seeds tell
GROUP = 1.3
"""Stages are averaged in groups of mega-batches up to this factor apart: neighbours are correlated."""
DRIFT = 4.0
"""Deviation of the random walk over e times the data, in multiples of the noise of one run (LOG.md)."""


def _grid() -> tuple[Array, Array, Array, Array]:
    """Exponents, offsets, prior probability and law of each cell."""
    exponents, offsets = np.linspace(0.03, 1.2, 40), np.linspace(0.05, 0.95, 19)
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
_BY_SLOPE = np.argsort(_B * (1 - _C), kind="stable")  # the slope at T


@dataclass(frozen=True)
class LearningCurve:
    """The metric at the ends of stages, over seeds: times (n,) in mega-batches, values (seeds, n) > 0."""

    times: Array
    values: Array

    @property
    def mean(self) -> Array:
        """Mean over seeds, (n,)."""
        return self.values.mean(0)

    def grouped(self) -> tuple[Array, Array]:
        """Log of the times and of the mean metric, averaged within groups of stages."""
        log_times, log_values = np.log(self.times), np.log(self.mean)
        _, group = np.unique(np.floor(log_times / math.log(GROUP) + 1e-9), return_inverse=True)
        sizes = np.bincount(group)
        return np.bincount(group, log_times) / sizes, np.bincount(group, log_values) / sizes


class Fit:
    """The posterior of a curve's law. `noise` is that of `pooled_noise`."""

    def __init__(self, curve: LearningCurve, noise: float):
        self.now, self.noise = math.log(curve.times[-1]), noise
        x, y = curve.grouped()
        ahead = x - self.now
        self._drift = DRIFT * math.sqrt(len(curve.values))  # more seeds lessen the noise, not the walk
        root = np.linalg.cholesky(np.eye(len(x)) + self._drift**2 * np.minimum.outer(-ahead, -ahead))
        one = solve_triangular(root, np.ones(len(x)), lower=True)
        misfit = solve_triangular(root, (y - _log_shape(ahead)).T, lower=True)  # (groups, cells)
        self._precision = one @ one
        self._level = one @ misfit / self._precision  # (cells,)
        squares = ((misfit - np.outer(one, self._level)) ** 2).sum(0)
        self._freedom = _DEGREES + len(x) - 1
        self._scale = (_DEGREES * noise**2 + squares) / self._freedom  # of the variance, (cells,)
        self.least_squares = float(squares.min())
        weight = np.log(_DENSITY) - 0.5 * self._freedom * np.log(self._scale)
        self._probability = np.exp(weight - logsumexp(weight))
        self._step = self._noise_of_a_stage(curve)

    def _noise_of_a_stage(self, curve: LearningCurve) -> float:
        """Deviation of single stages around the law, over the last three quarters of the data."""
        late = curve.times >= curve.times[-1] / 4
        log_times = np.log(curve.times[late]) - self.now
        expected = self._probability @ (self._level[:, None] + _log_shape(log_times))
        squares = ((np.log(curve.mean[late]) - expected) ** 2).sum()
        return math.sqrt((_DEGREES * self.noise**2 + squares) / (_DEGREES + late.sum()))

    @property
    def law(self) -> tuple[str, float]:
        """The most probable law, and its probability."""
        shares = np.bincount(_LAW, self._probability, len(LAWS))
        return LAWS[int(shares.argmax())], float(shares.max())

    def draw(self, times: Sequence[float], draws: int, random: np.random.Generator) -> Array:
        """Draws of the metric at times after the curve's end, (draws, times)."""
        ahead = np.log(np.asarray(times, dtype=float)) - self.now
        # The same ranks for all curves: learners on one stream level off together.
        ranks, below = np.random.default_rng(0).random(draws), self._probability[_BY_SLOPE].cumsum()
        cell = _BY_SLOPE[np.searchsorted(below, ranks * below[-1])]
        deviation = np.sqrt(self._freedom * self._scale[cell] / random.chisquare(self._freedom, draws))
        level = self._level[cell] + deviation / math.sqrt(self._precision) * random.standard_normal(draws)
        walk = random.standard_normal((draws, len(ahead))) * np.sqrt(np.diff(ahead, prepend=0.0))
        steps = self._step * random.standard_normal((draws, len(ahead)))
        drift = self._drift * deviation[:, None] * walk.cumsum(1)
        return np.exp(level[:, None] + _log_shape(ahead, cell) + drift + steps)


def _log_shape(ahead: Array, cell: Any = slice(None)) -> Array:
    """Log of the laws at log(t / T) = `ahead` (n,), without their level: (cells, n)."""
    b, c = _B[cell][:, None], _C[cell][:, None]
    return np.log((1 - c) * np.exp(-b * ahead) + c)


def interval(draws: Array, level: float = LEVELS[0]) -> Any:
    """Lower and upper end of the central interval of this probability, over the first dimension."""
    return np.quantile(draws, [(1 - level) / 2, (1 + level) / 2], axis=0)


def pooled_noise(curves: Sequence[LearningCurve]) -> float:
    """Deviation of the log of mean metrics around their laws, from the residuals and seeds of all curves."""
    squares, freedom = _USUAL_NOISE**2, 1.0
    for curve in curves:
        groups = len(curve.grouped()[0])
        if groups > 3:  # level, exponent and offset fit three groups
            squares += Fit(curve, _USUAL_NOISE).least_squares
            freedom += groups - 3
        seeds = len(curve.values)
        if seeds > 1:
            squares += (seeds - 1) * float(np.log(curve.values).var(0, ddof=1).mean()) / seeds
            freedom += seeds - 1
    return math.sqrt(squares / freedom)
