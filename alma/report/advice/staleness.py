"""Fit the law of staleness (`alma.report.advice.law`) to an evaluation matrix, with intervals.

The exponents c of age and k of training are on a grid; the pair with the least sum of squares is
taken. A break or season becomes part of the law only if it explains enough of the residuals. To
separate age from less training, the matrix must have losses on the past. Intervals come from a
jackknife over periods, of many models over groups of successive ones, with Student's t. They are
widened by the differences between the laws of other exponents, weighed by likelihood, where each
model counts as one observation.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import nnls

from alma.errors import UserError
from alma.report.advice.axes import AgeColumns, Axes
from alma.report.advice.change import DriftTest, thinned
from alma.report.advice.law import (
    EXPONENTS,
    Array,
    Break,
    Change,
    Event,
    Grace,
    Law,
    Season,
    left_to_gain,
)
from alma.report.losses import LEAST_CELLS, Losses, MeanOverSeeds, age_effect, t_interval

_LEARNING = (0.0, 0.5, 1.0)  # grid of k
_MOST_LEFT = {Break: 0.5, Season: 0.85}  # largest fraction of residuals that an event may leave
_MOST_PARTS = 40  # of models, left out one after another for intervals
_LEAST_MODELS = 6  # fewest models for a season; the three models of TiC-LM would seem to have one
_LEAST_SINCE = 3  # models after a change of the drift from which its new rate is known
_LEAST_YEAR = 0.75  # age in years that the oldest model must reach for a season


def known_at(losses: Losses, last: float) -> Losses:
    """The part of the losses that existed at period `last`: no later model or held-out part."""
    rows = sum(until <= last for until in losses.until)
    columns = sum(period <= last for period in losses.periods)
    seeds = []
    for seed in losses.seeds:
        seeds.append(tuple(row[:columns] for row in seed[:rows]))
    return Losses(losses.label, losses.until[:rows], losses.periods[:columns], tuple(seeds))


def cells_without(axes: Axes) -> list[Any]:
    """For each part of the models the cells without them and their periods.

    bool (models, periods). Each model is a part; of more than _MOST_PARTS models successive ones
    are together.
    """
    masks = []
    for part in np.array_split(axes.until, min(len(axes.until), _MOST_PARTS)):
        masks.append(~np.isin(axes.until, part)[:, None] & ~np.isin(axes.periods, part))
    return masks


def tells_age(axes: Axes, compared: Any) -> bool:
    """Whether cells tell what age adds: LEAST_CELLS of age above 0, one or more without any period.

    The law has three terms beside the difficulty of periods, and the jackknife leaves out a period
    at a time: without a cell of age above 0, b would be 0 by default, not by evidence.

    compared    cells on whose period another model was tested, bool (models, periods)
    """
    later = compared & (axes.ages > 0)
    if later.sum() < LEAST_CELLS:
        return False
    return all((later & cells).any() for cells in cells_without(axes))


class FittedLaw(NamedTuple):
    """A law and how well it fits."""

    residual: float  # norm of the residuals
    law: Law


def fit_laws(
    axes: Axes,
    values: Array,
    used: Any,
    event: Event | None = None,
    exponents: Sequence[float] = EXPONENTS,
    learning: Sequence[float] = _LEARNING,
) -> list[FittedLaw]:
    """The least-squares law for each pair of exponents c and k, the best first.

    values     losses (models, periods)
    used       cells to fit, bool (models, periods); others may be NaN
    event      an event to include in the law
    exponents  values of c to try
    learning   values of k to try
    """
    columns = AgeColumns(axes, event)
    target = _centred(values, used)
    of_event = [_centred(shape, used) for shape in columns.of_event]
    choices_of_event = [of_event]
    if isinstance(event, Change):
        choices_of_event = []
        for exponent in EXPONENTS:
            forgotten = _centred(columns.forgotten(exponent), used)
            choices_of_event.append([*of_event, forgotten])
    gains = {}
    for k in learning:
        gain = left_to_gain(axes.amounts, k)[:, None] * np.ones(len(axes.periods))
        gains[k] = _centred(gain, used)
    in_bend = np.ones_like(used[used])
    if isinstance(event, Change):
        in_bend = ((axes.until >= event.first)[:, None] & used)[used]
    amount = axes.last_amount
    step = axes.step
    fits = []
    for c in exponents:
        aged = _centred(columns.aged(c), used)
        past = _centred(columns.past(c), used)
        for k, gain in gains.items():
            # The fit has non-negative coefficients; two columns of opposite sign let b be negative.
            # Otherwise the interval of b would end at 0 on a stream without drift.
            design = [aged, -aged, past, gain]
            fit = _least_squares(design, choices_of_event, target)
            rise, fall, f, g, *size = fit.coefficients
            bend = _bend(axes, used, in_bend, fit.residuals)
            law = Law(rise - fall, c, f, g, k, amount, step, bend)
            if isinstance(event, Season):
                law = law._replace(s=size[0], year=event.year)
            if isinstance(event, Grace):
                law = law._replace(grace=event.length)
            fits.append(FittedLaw(fit.residual, law))
    return sorted(fits, key=lambda fit: fit.residual)


def _centred(x: Array, used: Any) -> Array:
    """The used cells, (cells,), minus the mean of their period.

    This removes the difficulty d of each period, which is a free parameter.
    """
    x = np.where(used, x, 0.0)
    return np.asarray((x - x.sum(0) / np.maximum(used.sum(0), 1))[used])


class _LeastSquares(NamedTuple):
    """A fit with non-negative coefficients."""

    coefficients: list[float]
    residual: float  # norm of the residuals
    residuals: Array  # (cells,)


def _least_squares(
    design: Sequence[Array], choices_of_event: Sequence[Sequence[Array]], target: Array
) -> _LeastSquares:
    """Fit the target by the design and the columns of an event that fit best."""
    fits = []
    for of_event in choices_of_event:
        columns = np.column_stack([*design, *of_event])
        solution, residual = nnls(columns, target)
        residuals = target - columns @ solution
        fits.append(_LeastSquares(solution.tolist(), float(residual), residuals))
    return min(fits, key=lambda fit: fit.residual)


def _bend(axes: Axes, used: Any, in_bend: Any, residuals: Array) -> tuple[list[float], list[float]]:
    """The bend of the law: ages from 0 on, and the mean residual at each, relative to age 0.

    Of the `used` cells only those `in_bend` count, bool (cells,): models since a change.

    Each mean is shrunk towards 0 by empirical Bayes: strongly, if the means differ no more than the
    scatter of their cells explains.
    """
    cell_ages = axes.ages[used]
    later = (cell_ages >= 0) & in_bend
    ages_with_0 = np.append(0.0, cell_ages[later])  # the extra loss at age 0 is 0 by definition
    at, index, counts = np.unique(ages_with_0, return_inverse=True, return_counts=True)
    means = np.bincount(index, np.append(0.0, residuals[later])) / counts
    freedom = max(1, len(residuals) - used.any(0).sum() - 3)
    noise = residuals @ residuals / freedom / counts
    spread = max(0.0, float(np.average(means**2 - noise, weights=counts)))
    means *= spread / np.maximum(spread + noise, 1e-30)
    return at.tolist(), (means - means[0]).tolist()


def find_event(axes: Axes, values: Array, used: Any, plain: FittedLaw, year: float) -> Event | None:
    """The break or season that explains most of the residuals of the `plain` law.

    None if none explains enough (_MOST_LEFT).
    """
    inner = (axes.periods > axes.until[1]) & (axes.periods <= axes.until[-1])
    events: list[Event] = [Break(period) for period in thinned(axes.periods[inner])]
    oldest = axes.ages[used].max()
    if len(axes.until) >= _LEAST_MODELS and oldest >= _LEAST_YEAR * year:
        events.append(Season(year))
    if not events:
        return None
    exponents = (plain.law.c,)
    learning = (plain.law.k,)
    residuals = []
    for event in events:
        residuals.append(fit_laws(axes, values, used, event, exponents, learning)[0].residual)
    residual = min(residuals)
    event = events[residuals.index(residual)]
    return event if residual < _MOST_LEFT[type(event)] * plain.residual else None


class Laws:
    """The law fitted to a matrix, and the further fits from which intervals are computed.

    These are fits without each period (jackknife), to each seed, and with other exponents.
    """

    def __init__(
        self,
        losses: Losses,
        year: float = math.inf,
        limits: tuple[float, float] = (-math.inf, math.inf),
    ):
        """Fit the laws.

        year    length of a year on the axis of the losses; inf: no seasons
        limits  lowest and highest loss that a model can have

        UserError: fewer than three models share periods, or too few are tested after their
        training (`tells_age`).
        """
        too_few = (
            f"{losses.label}: fewer than 3 models share periods that are after their training, "
            f"or fewer than {LEAST_CELLS} cells of age above 0 of several models and periods: "
            "test each model on the periods after its training"
        )
        if len(losses.until) < 3:
            raise UserError(too_few)
        self.losses = losses
        self.axes = Axes(np.array(losses.until), np.array(losses.periods))
        self.until = self.axes.until
        self.ages = self.axes.ages
        self.values = np.mean(losses.seeds, axis=0)  # (models, periods), NaN where a seed has none
        measured = np.isfinite(self.values)
        compared = measured & (measured.sum(0) > 1)
        if compared.any(1).sum() < 3 or not tells_age(self.axes, compared):
            raise UserError(too_few)
        plain = fit_laws(self.axes, self.values, measured)[0]
        test = DriftTest(self.axes, self.values, measured)
        self.event: Event | None = test.event(year)
        if not self.event:
            self.event = find_event(self.axes, self.values, measured, plain, year)
        self.newest_fit = True
        if not isinstance(self.event, Change):
            self.newest_fit = test.newest_fit()
        best, *alternatives = fit_laws(self.axes, self.values, measured, self.event)
        self.whole = best.law
        freedom = measured.sum() - measured.any(0).sum() - 3
        self.scatter = best.residual / math.sqrt(max(1, freedom))  # residual deviation of a cell
        self.alternatives = self._weighed(best, alternatives)
        self._cells_without = cells_without(self.axes)
        self.without = [self._law(self.values, measured & cells) for cells in self._cells_without]
        self.of_seeds = [self._law(np.array(seed), measured) for seed in losses.seeds]
        self.level = self._level(measured)  # mean loss of new models
        lowest, highest = limits
        self.limits = (min(0.0, lowest - self.level), max(0.0, highest - self.level))

    def _level(self, measured: Any) -> float:
        """The mean over periods of the loss of the model that is nearest to the period."""
        distances = np.where(measured, np.abs(self.ages), np.inf)
        nearest = distances.argmin(0)
        values = self.values[nearest, np.arange(len(self.axes.periods))]
        return float(values[measured.any(0)].mean())

    def extra(self, law: Law, ages: Any, ahead: Any = 0.0) -> Array:
        """`Law.extra` within the limits: a forecast leaves no model worse than the worst one."""
        return np.clip(law.extra(ages, ahead), *self.limits)

    def _law(self, values: Array, used: Any) -> Law:
        return fit_laws(self.axes, values, used, self.event)[0].law

    def _weighed(
        self,
        best: FittedLaw,
        alternatives: Sequence[FittedLaw],
    ) -> list[tuple[float, Law]]:
        """The alternatives to the best law, each with its share of the total likelihood."""
        power = len(self.until) - 1
        ratios = [(best.residual / max(fit.residual, 1e-9)) ** power for fit in alternatives]
        total = 1 + sum(ratios)
        return [(ratio / total, fit.law) for ratio, fit in zip(ratios, alternatives, strict=True)]

    def estimate(self, of: Callable[[Law], Any], cell: bool = False) -> MeanOverSeeds:
        """The value of `of`, a function of the law, with its 90% interval.

        The interval is NaN with fewer than 3 models. `cell`: the value is a difference of two
        single losses, so that their scatter widens the interval.
        """
        value = float(of(self.whole))
        without = [float(of(law)) for law in self.without]
        seeds = [float(of(law)) for law in self.of_seeds]
        variance = sum(share * (float(of(law)) - value) ** 2 for share, law in self.alternatives)
        if cell:
            variance += 2 * self.scatter**2
        return _jackknife(value, without, seeds, variance)

    @property
    def freedom(self) -> int:
        """Degrees of freedom of the intervals of `estimate`."""
        return len(self.without) - 1

    @property
    def too_little_since_change(self) -> bool:
        """Whether too few models came since the stream changed to know how it drifts now."""
        if not isinstance(self.event, Change):
            return False
        return int((self.until > self.event.first).sum()) < _LEAST_SINCE

    @property
    def just_changed(self) -> bool:
        """Whether the stream changed so recently that how it drifts now is not known."""
        return self.too_little_since_change or not self.newest_fit

    def effect_of_age(self) -> MeanOverSeeds:
        """`age_effect` with its 90% interval; NaN without losses on the past.

        The amount of training cancels in it, whatever its law. After a change of the drift only
        models and periods since then count, if they are enough for an interval.
        """
        if isinstance(self.event, Change):
            since = self._cells_since(self.event.first)
            recent = self._effect_in(replace(self.losses, seeds=since))
            if math.isfinite(recent.low):
                return recent
        return self._effect_in(self.losses)

    def _cells_since(self, first: float) -> Any:
        """The losses (seeds, models, periods) of models and periods from `first` on, else NaN."""
        recent = (self.until >= first)[:, None] & (self.axes.periods >= first)
        return np.where(recent, self.losses.seeds, np.nan).tolist()

    def _effect_in(self, losses: Losses) -> MeanOverSeeds:
        """`age_effect` of losses on these axes, with its interval."""
        values = age_effect(losses)
        without = []
        tested = np.isin(self.axes.periods, self.until)
        for cells in self._cells_without:
            if not cells.any(0)[tested].all():  # a period with a model of its own is left out
                seeds = np.where(cells, losses.seeds, np.nan).tolist()
                effects = age_effect(replace(losses, seeds=seeds))
                without.append(statistics.fmean(effects))
        return _jackknife(statistics.fmean(values), without, values)


def _jackknife(
    value: float, without: Sequence[float], seeds: Sequence[float], variance: float = 0.0
) -> MeanOverSeeds:
    """A value with its 90% jackknife interval (Tukey, 1958); NaN with fewer than 3 periods.

    without    the values computed without each period
    seeds      the values computed from each seed
    variance   further variance to add
    """
    count = len(without)
    if count < 3 or not np.isfinite([value, *without]).all():
        return MeanOverSeeds(value, math.nan, math.nan)
    variance += (count - 1) * float(np.var(without))
    if len(seeds) > 1:
        variance += statistics.variance(seeds) / len(seeds)
    return t_interval(value, math.sqrt(variance), count - 1)
