"""Forecasts of staleness: the extra loss of a model by its age, with intervals.

The loss of the model that was trained until period u on the held-out part of a period p >= u is, as a mean
over seeds,

    R(u, p) = d(p) + b (a / A)^c + m(u) + W(u) + e(u, p),     a = p - u

    d   the difficulty of the period: free, so only models on one period are compared
    b   extra loss at the age A; any number. c: 0 (a level), 1 (linear), up to 1.5. The law is 0 at age 0
    m   how models differ by chance: model * noise
    W   a walk, by which a stream drifts more in one period than in another: walk * noise in each period
    e   noise of a cell

Exponent c and the ratios `model` and `walk` have a grid of values, b a flat prior and the noise that of
Jeffreys. The marginal likelihood of each point of the grid is then exact, and draws mix all of them. A slope
over age that differs between seeds widens the law by its standard error.

An older model has also trained less, which the law includes; `age_effect` tells whether the stream drifts.
"""

import functools
import itertools
import statistics
from collections.abc import Sequence

import numpy as np
from scipy.linalg import block_diag, helmert, solve_triangular

from alma.errors import UserError
from alma.report import age
from alma.report.advice.forecast import Array
from alma.report.age import Losses, MeanOverSeeds

DRAWS = 1000
_EXPONENTS = tuple(i / 20 for i in range(31))
_MODEL_RATIOS = (0.0, 1.0, 3.0)
_WALK_RATIOS = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0)
_MOST = 30  # of the newest models and periods are read: older ones say little, and cost time
_LEAST_NOISE = 1e-5  # records round losses
_DAMPING = (0.6, 0.8, 0.9999)  # of a trend of losses in each period ahead, equally likely; the last: none
_LEAST_CONTRASTS = 3  # of models on one period: a slope and two for its error


def known_at(losses: Losses, last: float) -> Losses:
    """What was known at period `last`: no later model, no later held-out part."""
    columns = sum(period <= last for period in losses.periods)
    rows = sum(u <= last for u in losses.until)
    seeds = tuple(tuple(row[:columns] for row in seed[:rows]) for seed in losses.seeds)
    return Losses(losses.label, losses.until[:rows], losses.periods[:columns], seeds)


def effect_of_age(losses: Losses) -> MeanOverSeeds:
    """`age_effect`, extra loss a period of distance without the amount of training, with its 90% interval.

    The interval is that of a jackknife over periods, whose variance is added to that over seeds. NaN of fewer
    than three periods that have both a model and a held-out part.
    """
    values = age.age_effect(losses)
    mean = statistics.fmean(values)
    left_out = [age.age_effect(_without(losses, p)) for p in losses.until if p in losses.periods]
    means = np.array([statistics.fmean(each) for each in left_out])
    count = len(means)
    if count < 3 or not np.isfinite([mean, *means]).all():
        return MeanOverSeeds(mean, np.nan, np.nan)
    variance = (count - 1) * means.var() + (statistics.variance(values) / len(values) if values[1:] else 0.0)
    return age.t_interval(mean, float(np.sqrt(variance)), count - 1)


def _without(losses: Losses, period: float) -> Losses:
    """Without the model and the held-out part of a period."""
    rows = [i for i, u in enumerate(losses.until) if u != period]
    columns = [j for j, p in enumerate(losses.periods) if p != period]
    seeds = tuple(tuple(tuple(seed[i][j] for j in columns) for i in rows) for seed in losses.seeds)
    kept = tuple(losses.until[i] for i in rows), tuple(losses.periods[j] for j in columns)
    return Losses(losses.label, *kept, seeds)


class StalenessFit:
    """The posterior of a law of staleness, as DRAWS draws."""

    def __init__(self, losses: Losses):
        """UserError: too few models were tested on one period."""
        self.losses = losses
        mean = np.mean(losses.seeds, axis=0)
        self.mean = np.where(np.isfinite(mean), mean, np.nan)  # (rows, columns); NaN where a seed has none
        first_row, first = (len(each) - _MOST for each in (losses.until, losses.periods))
        cells = [cell for a, found in losses.by_age.items() if a >= 0 for cell in found]
        cells = sorted((j, i) for i, j in cells if i >= first_row and j >= first)
        sizes = [len(list(same)) for _, same in itertools.groupby(cells, lambda cell: cell[0])]
        if len(cells) - len(sizes) < _LEAST_CONTRASTS:
            raise UserError(
                f"{losses.label}: no forecast of staleness from fewer than {_LEAST_CONTRASTS} comparisons of "
                "models of different ages on one period: test more models on the periods after them"
            )
        if len(losses.periods) < 2:
            raise UserError(f"{losses.label}: no forecast of staleness from models tested on a single period")
        gaps = [later - earlier for earlier, later in itertools.pairwise(losses.periods)]
        self.period = statistics.median(gaps)  # distance of the held-out parts
        columns, rows = np.array(cells).T
        self._until = np.array(losses.until)[rows]
        ages = np.array(losses.periods)[columns] - self._until
        self._unit = float(np.median(ages[ages > 0]))  # A
        self._contrasts = block_diag(*(helmert(size) if size > 1 else np.zeros((0, 1)) for size in sizes))
        self._values = self._contrasts @ self.mean[rows, columns]
        self._shapes = self._contrasts @ self._shape(ages)  # (contrasts, laws)
        self._weigh()
        self._draw(np.random.default_rng(0))

    def _shape(self, ages: Array) -> Array:
        """The laws with b = 1, (ages, laws)."""
        relative = np.maximum(ages, 0)[:, None] / self._unit
        return np.where(relative > 0, relative ** np.array(_EXPONENTS), 0.0)

    def _model_covariance(self, left: Array, right: Array, model: float, walk: float) -> Array:
        """Covariance of m + W between models, in multiples of the noise's variance, (left, right)."""
        first = self._until.min()
        shared = np.minimum.outer(left - first, right - first) / self.period
        return np.asarray(model**2 * (left[:, None] == right) + walk**2 * shared)

    def _weigh(self) -> None:
        """Likelihood, slope and scale of each point of the grid: arrays (ratios, laws)."""
        self._ratios = list(itertools.product(_MODEL_RATIOS, _WALK_RATIOS))
        self.freedom = len(self._values) - 1
        parts = [self._model_covariance(self._until, self._until, *each) for each in ((1, 0), (0, 1))]
        one, walks = (self._contrasts @ part @ self._contrasts.T for part in parts)
        weights, self._slopes, self._scales, self._errors, self._roots = [], [], [], [], []
        for model, walk in self._ratios:
            root = np.linalg.cholesky(np.eye(len(one)) + model**2 * one + walk**2 * walks)
            y, x = (solve_triangular(root, each, lower=True) for each in (self._values, self._shapes))
            precision = (x**2).sum(0)
            slope = y @ x / precision
            squares = np.maximum(y @ y - slope**2 * precision, 0.0) + self.freedom * _LEAST_NOISE**2
            volume = np.log(np.diag(root)).sum() + 0.5 * np.log(precision)
            weights.append(-volume - 0.5 * self.freedom * np.log(squares))
            self._slopes.append(slope)
            self._scales.append(squares / self.freedom)
            self._errors.append(1 / precision)
            self._roots.append(root)
        weight = np.exp(np.array(weights) - np.max(weights))
        self._probability = weight / weight.sum()

    def _draw(self, random: np.random.Generator) -> None:
        """Draws of the grid, the noise, b, and how slopes differ between seeds: arrays (DRAWS,)."""
        point = random.choice(self._probability.size, DRAWS, p=self._probability.ravel())
        self._at, self._law = np.unravel_index(point, self._probability.shape)
        scale, slope, error = (
            np.array(each)[self._at, self._law] for each in (self._scales, self._slopes, self._errors)
        )
        self._noise = np.sqrt(self.freedom * scale / random.chisquare(self.freedom, DRAWS))
        self._b = slope + self._noise * np.sqrt(error) * random.standard_normal(DRAWS)
        slopes = age.staleness(self.losses)
        self._of_seeds = np.zeros(DRAWS)
        if len(slopes) > 1 and np.isfinite(slopes).all():
            spread = statistics.stdev(slopes) / np.sqrt(len(slopes))
            self._of_seeds = spread * random.standard_t(len(slopes) - 1, DRAWS)
        self._random = random

    @property
    def law(self) -> tuple[float, float]:
        """The most probable exponent c, and its probability."""
        shares = self._probability.sum(0)
        return _EXPONENTS[int(shares.argmax())], float(shares.max())

    def extra(self, ages: Sequence[float]) -> Array:
        """Draws of the extra loss that the laws expect at these ages, (DRAWS, ages)."""
        at = np.asarray(ages, dtype=float)
        return self._drawn_law(at) + np.outer(self._of_seeds, at)

    def _drawn_law(self, ages: Array) -> Array:
        """Draws of the law at ages (n,) or (DRAWS, n): (DRAWS, n)."""
        relative = np.maximum(ages, 0) / self._unit
        exponents = np.array(_EXPONENTS)[self._law, None]
        return self._b[:, None] * np.where(relative > 0, relative**exponents, 0.0)

    def extra_losses(self, row: int, periods: Sequence[float]) -> Array:
        """Draws of R(u, p) - R(p, p) for the model u of a row and periods after all of `losses`,
        (DRAWS, periods). The model p is yet to be trained."""
        trained = self.losses.until[row]
        expected, variance = np.zeros(DRAWS), np.zeros((DRAWS, len(periods)))
        for g, (model, walk) in enumerate(self._ratios):
            drawn = self._at == g
            if not drawn.any():
                continue
            own = self._model_covariance(np.array([trained]), self._until, model, walk)[0]
            newest = self._model_covariance(np.array([periods[0]]), self._until, model, walk)[0]
            known = solve_triangular(self._roots[g], self._contrasts @ (own - newest), lower=True)
            weights = solve_triangular(self._roots[g], known, lower=True, trans="T")
            law = (weights @ self._shapes)[self._law[drawn]]
            expected[drawn] = weights @ self._values - law * self._b[drawn]
            distance = (np.array(periods) - trained) / self.period
            variance[drawn] = 2 + 2 * model**2 + walk**2 * distance - known @ known
        scatter = self._noise[:, None] * np.sqrt(variance) * self._random.standard_normal(variance.shape)
        return self.extra([p - trained for p in periods]) + expected[:, None] + scatter

    def coming_losses(self, row: int, periods: Sequence[float]) -> Array | None:
        """Draws of R(u, p) for the model u of a row and periods after all of `losses`, (DRAWS, periods).

        From its loss on the last period on, the law adds what age costs, and difficulty walks on with the
        mean and the variance of its steps so far. Both trends may fade, as trends often do (Gardner and
        McKenzie, 1985). None: fewer than two steps, or no loss on the last period.
        """
        (steps, adds, gap), last = self._steps, self.mean[row, -1]
        if len(gap) < 2 or not np.isfinite(last):
            return None
        trained, newest = self.losses.until[row], self.losses.periods[-1]
        harder = steps - self._b[:, None] * adds.T[self._law]  # (DRAWS, steps)
        rate = harder.sum(1) / gap.sum()
        squares = ((harder - np.outer(rate, gap)) ** 2 / gap).sum(1)
        deviation = np.sqrt(squares / self._random.chisquare(len(gap) - 1, DRAWS))
        ahead = np.array(periods) - newest
        spread = np.sqrt(ahead + ahead**2 / gap.sum()) * self._random.standard_normal((DRAWS, len(ahead)))
        noise = np.sqrt(2) * self._noise[:, None] * self._random.standard_normal((DRAWS, len(ahead)))
        share = self._random.choice(_DAMPING, (DRAWS, 1))
        faded = self.period * share * (1 - share ** (ahead / self.period)) / (1 - share)  # (DRAWS, periods)
        aged = self._drawn_law(newest - trained + faded) - self._drawn_law(np.array([newest - trained]))
        return np.asarray(last + aged + rate[:, None] * faded + deviation[:, None] * spread + noise)

    @functools.cached_property
    def _steps(self) -> tuple[Array, Array, Array]:
        """From each period to the next, over the models trained by then: mean change of the loss, (steps,),
        that of the laws with b = 1, (steps, laws), and the distance, (steps,)."""
        at, trained = np.array(self.losses.periods), np.array(self.losses.until)
        steps, adds, gaps = [], [], []
        for j in range(len(at) - 1):
            change = self.mean[:, j + 1] - self.mean[:, j]
            kept = (trained <= at[j]) & np.isfinite(change)
            if kept.any():
                later, earlier = (self._shape(each - trained[kept]) for each in at[[j + 1, j]])
                steps.append(change[kept].mean())
                adds.append((later - earlier).mean(0))
                gaps.append(at[j + 1] - at[j])
        return np.array(steps), np.array(adds), np.array(gaps)
