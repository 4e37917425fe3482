"""Forecasts of a learner's metric: laws in the data seen, with intervals.

The log of the metric of run s of a configuration, after t of the T mega-batches that were read, is

    y_s(t) = level + a_s + f(log(t / T)) + walk(log t) + e_s(t),     e ~ N(0, noise^2)

with one of these laws f(x), x = log(t / T), whose family is a guess, so that a forecast mixes all of them:

    level        0
    power        -b x                                        (Hestness et al., 2017, arXiv 1712.00409)
    offset       log((1 - c) exp(-b x) + c)                  the share c never goes away
    exponential  log((1 - c) exp(-k (exp(x) - 1)) + c)       falls to a plateau
    logarithm    log(1 - b x)                                 a - b log t
    kink         a power whose exponent changes from b to r b at some t <= T

The kink at T itself is what no curve can show before it happens: it widens every forecast. In the first fifth
of the data a kink only slows the fall: learning from little data is steeper. a_s is the run
effect, which `comparison.py` estimates: a forecast is of the runs at hand. The mean of n runs has noise /
sqrt(n) but the same walk, of variance (drift * noise)^2 over e times the data. Noise and drift are estimated
from all configurations (`estimate_scatter`); close stages are averaged first, for speed.

The parameters of the laws have a grid of values, level and variance the usual conjugate prior. The marginal
likelihood of each cell of the grid is then exact: it weighs the laws. Learners on one stream fall alike, so
half of a curve's prior is what the other curves tell (`shared_priors`): without it the forecast of a learner
with two stages is mostly assumed, and the best of many such guesses is chosen.
"""

import itertools
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from scipy.linalg import solve_triangular
from scipy.special import gammaln

from alma.report.advice.staleness import Array

DRIFTS = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0)
"""Deviations of the walk over e times the data, in multiples of the noise, that are compared."""
LAWS = {
    "level": 0.1,
    "power": 0.19,
    "offset": 0.31,
    "exponential": 0.08,
    "logarithm": 0.04,
    "kink": 0.2,
    "kink ahead": 0.08,
}
"""The laws with their probability a priori."""
_SHARED = 0.5  # of the prior: the mean of the other curves' posteriors
_TELLING = 5  # degrees of freedom of the residuals from which a curve tells its law
_NO_DRIFT = 3.0  # how much likelier no drift is a priori than each other one
_EXPONENT, _SPREAD = 0.35, 0.8  # median and log-deviation of b a priori
_DEGREES = 5.0  # of freedom: the weight of the pooled noise against the residuals of one curve
_USUAL_NOISE = 0.03  # of one run, where no residuals tell; it counts as one residual
_GROUP = 1.1  # stages are averaged in groups of mega-batches up to this factor apart
_LEAST = 0.02  # of 1 - b x


class _Cells(NamedTuple):
    """The grid: a law with its parameters and prior probability a cell, arrays (cells,)."""

    law: Array  # index in LAWS
    b: Array  # exponent or rate
    c: Array  # offset; kink: log(t / T) of the change
    r: Array  # kink: the exponent after it, in multiples of b
    prior: Array


def _grid() -> _Cells:
    exponents, offsets = np.linspace(0.02, 1.2, 60), np.linspace(0.0, 0.96, 97)
    changes, ratios = np.log([0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 0.85]), (0.0, 0.2, 0.5, 1.5, 2.0)
    early = itertools.product(exponents[1::2], changes[:2], ratios[:3])
    rates, slopes = np.geomspace(0.3, 8.0, 112), np.linspace(0.01, 1.2, 120)
    parameters = {
        "level": [(0.0, 0.0, 0.0)],
        "power": [(b, 0.0, 0.0) for b in exponents],
        "offset": [(b, c, 0.0) for b, c in itertools.product(exponents, offsets[1:])],
        "exponential": [(k, c, 0.0) for k, c in itertools.product(rates, offsets)],
        "logarithm": [(b, 0.0, 0.0) for b in slopes],
        "kink": [*early, *itertools.product(exponents[1::2], changes[2:], ratios)],
        "kink ahead": list(itertools.product(exponents, [0.0], ratios)),
    }
    cells = [(i, *values) for i, law in enumerate(LAWS) for values in parameters[law]]
    law, b, c, r = (np.array(column) for column in zip(*cells, strict=True))
    prior = np.ones_like(b)
    powers = (b > 0) & (law != list(LAWS).index("exponential"))
    prior[powers] = np.exp(-0.5 * (np.log(b[powers] / _EXPONENT) / _SPREAD) ** 2) / b[powers]
    for i, share in enumerate(LAWS.values()):
        prior[law == i] *= share / prior[law == i].sum()
    return _Cells(law, b, c, r, prior)


_CELLS = _grid()


def _log_shape(x: Array) -> Array:
    """Each law at x = log(t / T), (n,), without its level: (cells, n)."""
    found = np.zeros((len(_CELLS.b), len(x)))
    for i, law in enumerate(LAWS):
        at = _CELLS.law == i
        b, c, r = (each[at, None] for each in (_CELLS.b, _CELLS.c, _CELLS.r))
        if law in ("power", "offset"):
            found[at] = np.log((1 - c) * np.exp(-b * x) + c)
        elif law == "exponential":
            found[at] = np.log(np.maximum((1 - c) * np.exp(-b * (np.exp(x) - 1)) + c, 1e-9))
        elif law == "logarithm":
            found[at] = np.log(np.maximum(1 - b * x, _LEAST))
        else:
            found[at] = -r * b * np.maximum(x, c) - b * np.minimum(x - c, 0)
    return found


class LearningCurve(NamedTuple):
    """The metric at the ends of stages, over seeds: times (n,) in mega-batches, values (seeds, n) > 0."""

    times: Array
    values: Array


class Scatter(NamedTuple):
    """How the points of one run scatter around its law."""

    noise: float  # deviation of the log of one stage; 0: not yet known
    drift: float  # deviation of the walk over e times the data, in multiples of the noise


@lru_cache(64)
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
        self.error = self.precision**-0.5  # of a level, in multiples of the noise
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


class Fit:
    """The posterior of a curve's law. `scatter` is that of `estimate_scatter`."""

    def __init__(
        self, curve: LearningCurve, scatter: Scatter, seeds: int | None = None, prior: Array = _CELLS.prior
    ):
        """`seeds`: as many as the mean has whose law the curve is to be weighed like (None: its own)."""
        seeds = seeds or len(curve.values)
        self._drift = scatter.drift * math.sqrt(seeds)  # more seeds lessen the noise, not the walk
        groups = self._groups = _Groups(tuple(curve.times), self._drift)
        values = groups.whitened(groups.mean(np.log(curve.values.mean(0))))
        self._now, self._seeds, self._prior = math.log(curve.times[-1]), seeds, prior
        self._level, self._squares = groups.fit(values)
        self.residual_freedom = max(0, len(values) - 3)  # level, exponent and offset fit three groups
        self.residual_squares = float(self._squares.min()) * seeds  # of one run
        if scatter.noise:
            self.weigh(scatter.noise)

    def weigh(self, noise: float) -> float:
        """Weigh the laws by their likelihood with this noise of one run; log of the sum of the weights."""
        prior = _DEGREES * noise**2 / self._seeds
        self._freedom = _DEGREES + len(self._groups.sizes) - 1
        self._scale = (prior + self._squares) / self._freedom  # of the variance, (cells,)
        weight = np.log(self._prior) - 0.5 * self._freedom * np.log(prior + self._squares)
        self.probability = np.exp(weight - weight.max())
        total = float(self.probability.sum())
        self.probability /= total
        constants = gammaln(self._freedom / 2) - gammaln(_DEGREES / 2) + 0.5 * _DEGREES * math.log(prior)
        return float(weight.max() + math.log(total) + constants - self._groups.log_volume)

    @property
    def law(self) -> str:
        """The most probable law."""
        return list(LAWS)[int(np.bincount(_CELLS.law, self.probability).argmax())]

    def expected(self, times: Sequence[float]) -> Array:
        """The metric that the laws expect at times after the curve's end, (times,)."""
        shape = self.probability @ _log_shapes(tuple(times), self._now)
        return np.asarray(np.exp(self.probability @ self._level + shape))

    def of_laws(self, times: Sequence[float]) -> Array:
        """The metric that each law expects at times after the curve's end, (cells, times)."""
        return np.exp(self._level[:, None] + _log_shapes(tuple(times), self._now))

    def draw(self, times: Sequence[float], draws: int, random: np.random.Generator) -> tuple[Array, Array]:
        """Draws of the metric at times after the curve's end, and of the log factors by which it walks from
        its law: (draws, times) each."""
        ahead = np.log(np.asarray(times, dtype=float)) - self._now
        cell = random.choice(len(self._level), draws, p=self.probability)
        scale = self._freedom * self._scale[cell] / random.chisquare(self._freedom, draws)
        deviation = np.sqrt(scale)[:, None]
        steps, noise = random.standard_normal((2, draws, len(ahead)))
        walk = self._drift * deviation * (steps * np.sqrt(np.diff(ahead, prepend=0.0))).cumsum(1)
        level = self._level[cell, None] + deviation * random.standard_normal((draws, 1)) * self._groups.error
        law = level + _log_shapes(tuple(times), self._now)[cell]
        return np.exp(law + walk + deviation * noise), walk


@lru_cache(8)
def _log_shapes(times: tuple[float, ...], now: float) -> Array:
    """The laws at times after exp(now), without their level: (cells, times)."""
    return _log_shape(np.log(np.array(times, dtype=float)) - now)


def interval(draws: Array, level: float = 0.9) -> Any:
    """Lower and upper end of the central interval of this probability, over the first dimension."""
    return np.quantile(draws, [(1 - level) / 2, (1 + level) / 2], axis=0)


def estimate_scatter(curves: Sequence[LearningCurve]) -> Scatter:
    """Noise and drift of one run: of DRIFTS the likeliest, by the residuals of all curves and by how much
    the steps of runs of one configuration differ."""
    between, count = 0.0, 0  # squares by which steps from stage to stage differ between seeds
    for curve in curves:
        steps = np.diff(np.log(curve.values))  # without the run effect; each has the noise of two stages
        between += float(((steps - steps.mean(0)) ** 2).sum()) / 2
        count += (len(steps) - 1) * steps.shape[1]
    found = []
    for drift in DRIFTS:
        fits = [Fit(curve, Scatter(0.0, drift)) for curve in curves]
        used = [fit for fit in fits if fit.residual_freedom]
        squares = _USUAL_NOISE**2 + sum(fit.residual_squares for fit in used) + between
        noise = math.sqrt(squares / (1 + sum(fit.residual_freedom for fit in used) + count))
        evidence = sum(fit.weigh(noise) for fit in fits) - (math.log(_NO_DRIFT) if drift else 0.0)
        found.append((evidence, Scatter(noise, drift)))
    return max(found)[1]


def shared_priors(curves: Sequence[LearningCurve], scatter: Scatter) -> list[Array]:
    """The prior of each curve, with its share of the other curves' posteriors."""
    fits = [Fit(curve, scatter) for curve in curves]
    tell = np.array([fit.residual_freedom >= _TELLING for fit in fits])
    told = np.array([fit.probability for fit in fits]) * tell[:, None]
    total, others = told.sum(0), tell.sum() - tell
    return [
        (1 - _SHARED) * _CELLS.prior + _SHARED * np.maximum(total - own, 0.0) / n if n else _CELLS.prior
        for own, n in zip(told, others, strict=True)
    ]
