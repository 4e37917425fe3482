"""The law of staleness: the loss that age adds, with what less training costs taken out.

The loss of the model that was trained until period u on the held-out part of a period p is

    R(u, p) = d(p) + b a^c + g h(n(u)) + s w(u, p),    a = p - u > 0    (f |a|^c in place of b a^c for a < 0)

    d   the difficulty of the period: free, so only models on one period are compared
    b   what age adds; f: what the model forgets of the past, 0 or more
    g   what training gains, 0 or more: n(u) amounts of it until u, h(n) = (n^-k - 1) / k, or -log n for k = 0
    c   of _EXPONENTS, and k of _LEARNING: the pair with the least squares
    s   0, unless w explains enough of what is left (_BREAK, _SEASON). w is a step between all models before
        and periods after a break, or a season, sin^2(pi a / year): best at the time of year of training

Only losses on the past tell b from g. Intervals are of a jackknife over periods, by Student's t; how other
exponents differ counts by their likelihood, for which a model is one observation. No law of a few exponents
is true: to it is added, at each age, the mean residual there, and in between on a line.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import nnls

from alma.errors import UserError
from alma.report.losses import Losses, MeanOverSeeds, age_effect, t_interval

Array = np.ndarray[Any, np.dtype[np.float64]]
_EXPONENTS = (0.25, 0.5, 1.0)
_LEARNING = (0.0, 0.5, 1.0)
SEASON = math.inf  # in place of the period of a break
_BREAK, _SEASON = 0.5, 0.85  # most that a break, or a season, leaves of the residuals
_TELL_SEASON = 6  # models: three of TiC-LM seem to have one


def known_at(losses: Losses, last: float) -> Losses:
    """What was known at period `last`: no later model, no later held-out part."""
    columns, rows = (sum(at <= last for at in axis) for axis in (losses.periods, losses.until))
    seeds = tuple(tuple(row[:columns] for row in seed[:rows]) for seed in losses.seeds)
    return Losses(losses.label, losses.until[:rows], losses.periods[:columns], seeds)


class Law(NamedTuple):
    """A fitted law; `amount` is n of the last period, `step` the distance of two models."""

    b: float
    c: float
    f: float
    g: float
    k: float
    amount: float
    step: float
    bend: tuple[list[float], list[float]]  # ages, and what the mean residual there adds
    s: float = 0.0
    year: float = math.inf

    def aged(self, ages: Any) -> Array:
        """Loss that age adds, at ages >= 0, to a model that no break separates from the period."""
        season = self.s * np.sin(np.pi * ages / self.year) ** 2
        return np.asarray(self.b * ages**self.c + season + np.interp(ages, *self.bend))

    def extra(self, ages: Any, ahead: Any = 0.0) -> Array:
        """Loss above a new model at ages >= 0 on periods that lie `ahead` of the last one."""
        amount, ages = self.amount + np.asarray(ahead) / self.step, np.asarray(ages, dtype=float)
        before = np.minimum(np.maximum(amount - ages / self.step, 1.0), amount)
        return self.aged(ages) + self.g * (_left(before, self.k) - _left(amount, self.k))


def _left(amount: Any, k: float) -> Array:
    """h(n): what a learner has left to gain."""
    return np.asarray((amount**-k - 1) / k if k else -np.log(amount))


class Laws:
    """The law of a matrix, and those without each period, of each seed, and of other exponents.

    `event` is what has evidence beside age: the first period after a break, SEASON, or None. A season takes
    ages of a `year`, in units of the periods (inf: unknown). UserError: fewer than three models share
    periods, or none is tested after its training.
    """

    def __init__(self, losses: Losses, year: float = math.inf):
        self.losses, self.year = losses, year
        self.until, self.periods = np.array(losses.until), np.array(losses.periods)
        self.values = np.mean(losses.seeds, axis=0)  # (models, periods), NaN where a seed has none
        self.ages = self.periods - self.until[:, None]
        known = np.isfinite(self.values)
        compared = known & (known.sum(0) > 1)
        if compared.any(1).sum() < 3 or not (compared & (self.ages > 0)).any():
            raise UserError(
                f"{losses.label}: fewer than 3 models share periods that are after their training"
            )
        inner = self.periods[(self.periods > self.until[1]) & (self.periods <= self.until[-1])].tolist()
        rest, law = self._fit(self.values, known, None)[0]
        wave = len(self.until) >= _TELL_SEASON and self.ages[known].max() >= 0.75 * year
        events = [*inner, SEASON] if wave else inner
        found = [(self._fit(self.values, known, event, (law.c,), (law.k,))[0][0], event) for event in events]
        left, event = min(found, default=(rest, None))
        self.event: float | None = event if left < (_SEASON if event == SEASON else _BREAK) * rest else None
        (rest, self.whole), *others = self._fit(self.values, known, self.event)
        self.scatter = rest / math.sqrt(max(1, known.sum() - known.any(0).sum() - 3))  # of one cell
        shares = [(rest / max(each, 1e-9)) ** (len(self.until) - 1) for each, _ in others]
        total = 1 + sum(shares)
        self.others = [(share / total, law) for share, (_, law) in zip(shares, others, strict=True)]
        self._kept = [(self.until != u)[:, None] & (self.periods != u) for u in self.until]
        self.without = [self._fit(self.values, known & kept, self.event)[0][1] for kept in self._kept]
        self.of_seeds = [self._fit(np.array(seed), known, self.event)[0][1] for seed in losses.seeds]

    def _fit(
        self, values: Array, known: Any, event: float | None, cs: Any = _EXPONENTS, ks: Any = _LEARNING
    ) -> list[tuple[float, Law]]:
        """Least squares over the `known` cells, difficulty taken out by period, for each c and k: the norm of
        the residuals and the law, the best first."""
        count, step = np.maximum(known.sum(0), 1), float(np.median(np.diff(self.until)))
        amounts = 1 + (self.until - self.until[0]) / step

        def centred(x: Any) -> Array:
            x = np.where(known, x, 0.0)
            return np.asarray((x - x.sum(0) / count)[known])

        old, past, size = self.ages > 0, self.ages <= 0, np.sin(np.pi * self.ages / self.year) ** 2
        if event != SEASON and event is not None:
            old, past, size = (self.until < event)[:, None], self.periods < event, np.ones(known.shape)
        columns = [centred(size * side) for side in (old & ~past, ~old & past) if event is not None]
        fits, wanted = [], centred(values)
        amount, wide = 1 + float(self.periods[-1] - self.until[0]) / step, np.ones(len(self.periods))
        gains = {k: centred(_left(amounts, k)[:, None] * wide) for k in ks}
        for c in cs:
            aged, forgotten = (centred(np.maximum(side, 0.0) ** c) for side in (self.ages, -self.ages))
            for k, gain in gains.items():
                free = [aged, -aged]  # b may be below 0, or the interval of no drift would end there
                design = np.column_stack([*free, forgotten, gain, *columns])
                found, rest = nnls(design, wanted)
                b, less, f, g, s = map(float, [*found, 0.0][:5])
                bend = self._bend(known, wanted - design @ found)
                season = (s, self.year) if event == SEASON else ()
                fits.append((float(rest), Law(b - less, c, f, g, k, amount, step, bend, *season)))
        return sorted(fits, key=lambda fit: fit[0])

    def _bend(self, known: Any, residuals: Array) -> tuple[list[float], list[float]]:
        """Ages from 0 on, and by how much the mean residual there is above that at age 0; each shrunk to 0 by
        how much means differ more than their cells' scatter explains (empirical Bayes)."""
        ages = self.ages[known]
        at, index, count = np.unique(np.append(0.0, ages[ages >= 0]), return_inverse=True, return_counts=True)
        means = np.bincount(index, np.append(0.0, residuals[ages >= 0])) / count
        noise = residuals @ residuals / max(1, len(residuals) - known.any(0).sum() - 3) / count
        spread = max(0.0, float(np.average(means**2 - noise, weights=count)))
        means *= spread / np.maximum(spread + noise, 1e-30)
        return at.tolist(), (means - means[0]).tolist()

    def estimate(self, of: Callable[[Law], Any], cell: bool = False) -> MeanOverSeeds:
        """A number of the law with its 90% interval; no interval (NaN) of fewer than three models. `cell`:
        the interval of the difference of two losses, each with the scatter of a cell."""
        value = float(of(self.whole))
        without, seeds = ([float(of(law)) for law in laws] for laws in (self.without, self.of_seeds))
        variance = sum(share * (float(of(law)) - value) ** 2 for share, law in self.others)
        return _jackknife(value, without, seeds, variance + 2 * self.scatter**2 * cell)

    def effect_of_age(self) -> MeanOverSeeds:
        """`age_effect`, in which the amount of training cancels whatever its law, with its 90% interval; NaN
        without losses on the past."""
        values, without = age_effect(self.losses), []
        for kept in (kept for u, kept in zip(self.until, self._kept, strict=True) if u in self.periods):
            seeds = np.where(kept, self.losses.seeds, np.nan).tolist()
            without.append(statistics.fmean(age_effect(replace(self.losses, seeds=seeds))))
        return _jackknife(statistics.fmean(values), without, values)


def _jackknife(
    value: float, without: Sequence[float], seeds: Sequence[float], variance: float = 0.0
) -> MeanOverSeeds:
    """A value with its 90% interval, by the jackknife (Tukey, 1958); NaN with fewer than 3 periods.

    `without`: the values without each of the periods; `seeds`: those of each seed; `variance`: a further one.
    """
    count = len(without)
    if count < 3 or not np.isfinite([value, *without]).all():
        return MeanOverSeeds(value, math.nan, math.nan)
    variance += (count - 1) * float(np.var(without))
    variance += statistics.variance(seeds) / len(seeds) if seeds[1:] else 0.0
    return t_interval(value, math.sqrt(variance), count - 1)
