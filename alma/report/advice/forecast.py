"""Forecast a learner's metric by laws in the amount of data, with intervals.

After t mega-batches, of T whose rows are read, the log of the metric of run s of a configuration is

    y_s(t) = level + a_s + f(log(t / T)) + walk(log t) + e_s(t),     e ~ N(0, noise^2)

with one of these laws f(x), x = log(t / T). The true one is unknown, so a forecast mixes them:

    level        0
    power        -b x                                      (Hestness et al., 2017, arXiv 1712.00409)
    offset       log((1 - c) exp(-b x) + c)                a share c of the metric at T remains
    exponential  log((1 - c) exp(-b (exp(x) - 1)) + c)     falls to a plateau
    logarithm    log(1 - b x)                              the metric is linear in log t
    kink         a power whose exponent changes from b to r b at a t <= T
    kink ahead   the same at T itself

No data can show a kink at T, so it widens every forecast. A kink in the first fifth of the data
only slows the fall, since learning from little data is steeper.

a_s is the effect of the seed, which `comparison.py` estimates; forecasts here are for the runs at
hand. walk is a random walk in log t, whose variance is (drift * noise)^2 when the data grow by a
factor e; all runs of a configuration share it. So the mean of n runs has noise / sqrt(n) but the
same walk. Noise and drift are estimated from all configurations (`estimate_scatter`); neighbouring
stages are averaged first, for speed.

The parameters of the laws are on a grid. Level and variance have the usual conjugate prior, so the
marginal likelihood of each cell of the grid is exact; it gives the weights of the laws. Learners on
one stream improve alike, so half of a curve's prior is the mean posterior of the other curves
(`shared_priors`). Without it, the forecast of a learner with two stages would rest mostly on the
prior, and the choice would be the best of many such guesses.
"""

import itertools
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from scipy.linalg import solve_triangular
from scipy.special import gammaln

from alma.report.advice.law import Array

DRIFTS = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0)
"""Grid of the drift: the walk's deviation over a factor e of data, in multiples of the noise."""
LAWS = {
    "level": 0.1,
    "power": 0.19,
    "offset": 0.31,
    "exponential": 0.08,
    "logarithm": 0.04,
    "kink": 0.2,
    "kink ahead": 0.08,
}
"""The laws by name, with their prior probabilities."""
_SHARED = 0.5  # fraction of the prior that is the mean of the other curves' posteriors
_TELLING = 5  # fewest residual degrees of freedom with which a curve counts in others' priors
_NO_DRIFT = 3.0  # prior odds of no drift against each other value of the grid
_EXPONENT = 0.35  # prior median of b
_SPREAD = 0.8  # prior standard deviation of log b
_DEGREES = 5.0  # degrees of freedom of the prior of a curve's noise, centred at the pooled noise
_USUAL_NOISE = 0.03  # prior noise of one run; weighs as much as one residual
_GROUP = 1.1  # stages whose t differ by less than this factor are averaged
_NEWEST = 3  # stages whose mean tells whether a curve turns up
_CLEAR_RISE = 3.0  # standard errors of that mean above the lowest one before
_LEAST = 0.02  # lower bound of 1 - b x in the law "logarithm"


class _Cells(NamedTuple):
    """The grid: in each cell a law with its parameters and prior probability; arrays (cells,)."""

    law: Array  # index in LAWS
    b: Array  # exponent or rate
    c: Array  # offset; kink: log(t / T) of the change
    r: Array  # kink: the exponent after it, in multiples of b
    prior: Array


def _grid() -> _Cells:
    exponents = np.linspace(0.02, 1.2, 60)
    offsets = np.linspace(0.0, 0.96, 97)
    changes = np.log([0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 0.85])
    ratios = (0.0, 0.2, 0.5, 1.5, 2.0)
    early = itertools.product(exponents[1::2], changes[:2], ratios[:3])
    rates = np.geomspace(0.3, 8.0, 112)
    slopes = np.linspace(0.01, 1.2, 120)
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
    shapes = np.zeros((len(_CELLS.b), len(x)))
    for i, law in enumerate(LAWS):
        cells = _CELLS.law == i
        b = _CELLS.b[cells, None]
        c = _CELLS.c[cells, None]
        r = _CELLS.r[cells, None]
        if law in ("power", "offset"):
            shapes[cells] = np.log((1 - c) * np.exp(-b * x) + c)
        elif law == "exponential":
            falling = (1 - c) * np.exp(-b * (np.exp(x) - 1)) + c
            shapes[cells] = np.log(np.maximum(falling, 1e-9))
        elif law == "logarithm":
            shapes[cells] = np.log(np.maximum(1 - b * x, _LEAST))
        else:
            shapes[cells] = -r * b * np.maximum(x, c) - b * np.minimum(x - c, 0)
    return shapes


class LearningCurve(NamedTuple):
    """The metric at the ends of stages."""

    times: Array  # (n,), in mega-batches
    values: Array  # (seeds, n), above 0


class Scatter(NamedTuple):
    """How far the points of one run are from its law, in logs of the metric."""

    noise: float
    """Standard deviation of one stage; 0: not yet estimated."""
    drift: float
    """Standard deviation of the walk over a factor e of data, in multiples of the noise."""


@lru_cache(64)
class _Groups:
    """The stages of a curve, averaged in groups of close times, and the laws at these groups.

    Both are whitened by the covariance of the group means (noise and walk), so that least squares
    is the maximum likelihood.
    """

    def __init__(self, times: tuple[float, ...], drift: float):
        log_times = np.log(times)
        steps = np.floor(log_times / math.log(_GROUP) + 1e-9)
        _, self.group = np.unique(steps, return_inverse=True)
        self.sizes = np.bincount(self.group)
        ahead = self.mean(log_times) - log_times[-1]
        walk = drift**2 * np.minimum.outer(-ahead, -ahead)
        self.root = np.linalg.cholesky(np.diag(1 / self.sizes) + walk)
        self.one = self.whitened(np.ones(len(ahead)))
        self.precision = float(self.one @ self.one)
        self.error = self.precision**-0.5  # standard error of the level, in multiples of the noise
        self.shapes = self.whitened(_log_shape(ahead).T)  # (groups, cells)
        self.shape_levels = self.one @ self.shapes / self.precision
        self.shapes -= np.outer(self.one, self.shape_levels)
        self.shape_squares = (self.shapes**2).sum(0)
        self.log_volume = float(np.log(np.diag(self.root)).sum() + 0.5 * math.log(self.precision))

    def mean(self, values: Array) -> Array:
        """Means of the groups."""
        return np.bincount(self.group, values) / self.sizes

    def whitened(self, values: Array) -> Array:
        """Values (groups, ...), transformed so that their noise is independent."""
        return solve_triangular(self.root, values, lower=True)

    def fit(self, values: Array) -> tuple[Array, Array]:
        """Level and residual sum of squares of each law, (cells,), of whitened values (groups,)."""
        level = self.one @ values / self.precision
        centred = values - self.one * level
        squares = centred @ centred - 2 * centred @ self.shapes + self.shape_squares
        return level - self.shape_levels, np.maximum(squares, 0.0)


class Fit:
    """The posterior over the laws, given a curve."""

    def __init__(
        self,
        curve: LearningCurve,
        scatter: Scatter,
        seeds: int | None = None,
        prior: Array = _CELLS.prior,
    ):
        """Fit the mean over the curve's seeds.

        curve      the metric of all seeds
        scatter    noise and drift, from `estimate_scatter`; with noise 0 the laws get no weights
        seeds      number of runs in the mean, which reduces the noise; None: the curve's seeds
        prior      prior probability of the cells of the grid, (cells,)
        """
        seeds = seeds or len(curve.values)
        # In multiples of the noise of the mean: averaging seeds reduces the noise, not the walk.
        self._drift = scatter.drift * math.sqrt(seeds)
        groups = self._groups = _Groups(tuple(curve.times), self._drift)
        values = groups.whitened(groups.mean(np.log(curve.values.mean(0))))
        self._now = math.log(curve.times[-1])
        self._seeds = seeds
        self._prior = prior
        self._level, self._squares = groups.fit(values)
        # Three parameters are fitted: level, exponent and offset.
        self.residual_freedom = max(0, len(values) - 3)
        self.residual_squares = float(self._squares.min()) * seeds  # scaled to a single run
        if scatter.noise:
            self.weigh(scatter.noise)

    def weigh(self, noise: float) -> float:
        """Set the posterior weights of the laws, given the noise of one run; return the log
        evidence."""
        prior_squares = _DEGREES * noise**2 / self._seeds
        squares = prior_squares + self._squares
        self._freedom = _DEGREES + len(self._groups.sizes) - 1
        self._scale = squares / self._freedom  # scale of the variance's posterior, (cells,)
        weight = np.log(self._prior) - 0.5 * self._freedom * np.log(squares)
        self.probability = np.exp(weight - weight.max())
        total = float(self.probability.sum())
        self.probability /= total
        constants = gammaln(self._freedom / 2) - gammaln(_DEGREES / 2)
        constants += 0.5 * _DEGREES * math.log(prior_squares)
        return float(weight.max() + math.log(total) + constants - self._groups.log_volume)

    @property
    def law(self) -> str:
        """The most probable law."""
        return list(LAWS)[int(np.bincount(_CELLS.law, self.probability).argmax())]

    def expected(self, times: Sequence[float]) -> Array:
        """The expected metric at later times, (times,): exp of the mean log over the laws."""
        shape = self.probability @ _log_shapes(tuple(times), self._now)
        return np.asarray(np.exp(self.probability @ self._level + shape))

    def of_laws(self, times: Sequence[float]) -> Array:
        """The metric at later times by each cell of the grid, (cells, times)."""
        return np.exp(self._level[:, None] + _log_shapes(tuple(times), self._now))

    def draw(
        self,
        times: Sequence[float],
        draws: int,
        random: np.random.Generator,
    ) -> tuple[Array, Array]:
        """Posterior draws of the metric at later times, and of its walk, (draws, times) each.

        The walk is log(metric / law).
        """
        ahead = np.log(np.asarray(times, dtype=float)) - self._now
        cell = random.choice(len(self._level), draws, p=self.probability)
        scale = self._freedom * self._scale[cell] / random.chisquare(self._freedom, draws)
        deviation = np.sqrt(scale)[:, None]
        steps, noise = random.standard_normal((2, draws, len(ahead)))
        walk = (steps * np.sqrt(np.diff(ahead, prepend=0.0))).cumsum(1)
        walk = self._drift * deviation * walk
        level_noise = deviation * random.standard_normal((draws, 1)) * self._groups.error
        level = self._level[cell, None] + level_noise
        law = level + _log_shapes(tuple(times), self._now)[cell]
        return np.exp(law + walk + deviation * noise), walk


@lru_cache(8)
def _log_shapes(times: tuple[float, ...], now: float) -> Array:
    """The laws at times after exp(now), without their level: (cells, times)."""
    return _log_shape(np.log(np.array(times, dtype=float)) - now)


def interval(draws: Array, level: float = 0.9) -> Any:
    """Lower and upper end, (2, ...), of the central interval of draws, (draws, ...)."""
    return np.quantile(draws, [(1 - level) / 2, (1 + level) / 2], axis=0)


def estimate_scatter(curves: Sequence[LearningCurve]) -> Scatter:
    """Estimate noise and drift of one run from all curves.

    For each drift of DRIFTS, the noise is pooled over the residuals of all curves and over the
    differences between runs of one configuration (`_between_seeds`). The drift with the largest
    evidence is taken.
    """
    squares_between, freedom_between = _between_seeds(curves)
    candidates = []
    for drift in DRIFTS:
        fits = [Fit(curve, Scatter(0.0, drift)) for curve in curves]
        used = [fit for fit in fits if fit.residual_freedom]
        squares = _USUAL_NOISE**2 + sum(fit.residual_squares for fit in used) + squares_between
        freedom = 1 + sum(fit.residual_freedom for fit in used) + freedom_between
        noise = math.sqrt(squares / freedom)
        evidence = sum(fit.weigh(noise) for fit in fits)
        if drift:
            evidence -= math.log(_NO_DRIFT)
        candidates.append((evidence, Scatter(noise, drift)))
    return max(candidates)[1]


def _between_seeds(curves: Sequence[LearningCurve]) -> tuple[float, int]:
    """Sum of squares, and degrees of freedom, of the differences between seeds in steps of a curve.

    A step is the change of the log metric from one stage to the next: the effect of the seed
    cancels in it, and it has the noise of two stages.
    """
    squares = 0.0
    freedom = 0
    for curve in curves:
        steps = np.diff(np.log(curve.values))
        squares += float(((steps - steps.mean(0)) ** 2).sum()) / 2
        freedom += (len(steps) - 1) * steps.shape[1]
    return squares, freedom


def shared_priors(curves: Sequence[LearningCurve], scatter: Scatter) -> list[Array]:
    """The prior of each curve, (cells,): half the grid's prior, half the other curves' posteriors.

    Only curves with at least _TELLING residual degrees of freedom count; without any, the prior is
    that of the grid.
    """
    fits = [Fit(curve, scatter) for curve in curves]
    telling = np.array([fit.residual_freedom >= _TELLING for fit in fits])
    posteriors = np.array([fit.probability for fit in fits]) * telling[:, None]
    total = posteriors.sum(0)
    counts = telling.sum() - telling
    priors = []
    for posterior, count in zip(posteriors, counts, strict=True):
        if count:
            from_others = _SHARED * np.maximum(total - posterior, 0.0) / count
            priors.append((1 - _SHARED) * _CELLS.prior + from_others)
        else:
            priors.append(_CELLS.prior)
    return priors


def turns_up(values: Sequence[float]) -> bool:
    """Whether the newest values, all above 0, are above the lowest ones before: no law can rise.

    Means of three logarithms are compared; differences of neighbours tell how far values scatter.
    """
    if len(values) < 3 * _NEWEST:
        return False
    logs = np.log(np.maximum(values, 1e-12))
    means = np.convolve(logs, np.ones(_NEWEST) / _NEWEST, "valid")
    # second differences hold no trend; those of independent values have 6 times their variance
    scatter = float(np.sqrt(np.mean(np.diff(logs, 2) ** 2) / 6))
    error = scatter * np.sqrt(2 / _NEWEST)
    rise = float(means[-1] - means[:-_NEWEST].min())
    return rise > max(_CLEAR_RISE * error, 1e-9)
