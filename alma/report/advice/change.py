"""Whether a stream drifts at another rate since some period, or only beyond some age.

One law for all of history hides drift that has just begun or ended. The test of a *change* asks
whether losses depend on more than age, whatever their curves over age are: a law of the wrong
curve would seem to change. The test of a *grace* has a free curve on the past alone, and compares
the law with a time without loss to the law without. Both compete with a break and a season.

A free term for each model and each period is taken out first: how good a model is and how hard a
period is differ far more than the cells do, and would hide a change of the last few months. What
is left is how much two models lose to each other on their two periods.

Cells that are correlated along both tests and models count as fewer ones. If they are by .8 along
both, 2 to 8% of matrices of 12 to 40 models without an event still seem to have one.
"""

import math
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
from scipy.special import fdtrc

from alma.report.advice.axes import AgeColumns, Axes, curve_columns
from alma.report.advice.law import EXPONENTS, Array, Break, Change, Event, Grace, Season

_Candidate = TypeVar("_Candidate", Change, Grace)
_LEAST_RESIDUAL = 1e-9  # of losses without noise
_ROUNDING = 1e-9  # part of a column that counts as none
_LEAST_CHANCE = 0.001  # of the newest losses below which they do not fit those before
_LEAST_MODELS = 4
_MOST_TIMES = 50  # most times of a change, and of a break, that are tried
_MOST_GRACE = 6  # longest time without loss that is tried, in steps between models
_LEAST_RATIO = {Change: 10.0, Grace: 5.5}
"""Least log-likelihood ratio for an event, times the number of models: each counts as one
observation, and chance reaches less the more there are. Measured in docs/results/cadence.md."""
_LEAST_RATIO_OF_MANY = 0.2  # least ratio however many models there are: no law fits exactly


class DriftTest:
    """Tests of one matrix: whether the drift changed, and whether its newest losses fit."""

    def __init__(self, axes: Axes, values: Array, used: Any):
        """Take the free terms and curves out of the cells, once for both tests.

        values  losses (models, periods)
        used    cells that were measured, bool (models, periods)
        """
        self._axes = axes
        self._values = values
        self._used = used
        self._curve_of_past = curve_columns(np.maximum(-axes.ages, 0.0), axes.step)
        self._cells: _Cells | None = None  # None: too few to tell anything
        count = len(axes.until)
        if count >= _LEAST_MODELS:
            later = curve_columns(np.maximum(axes.ages, 0.0), axes.step)
            curves = [*later, *self._curve_of_past]
            cells = _Cells(axes, values, used, curves, exponents=(1.0,))
            if cells.freedom >= 2 * count:
                self._cells = cells

    def event(self, year: float) -> Change | Grace | None:
        """Since when the stream drifts at another rate, or up to which age it adds nothing.

        None without evidence for either. `year`: its length on the axis of the losses; inf: no
        season explains the losses instead.
        """
        if not self._cells:
            return None
        axes = self._axes
        changes = [Change(first) for first in thinned(axes.until[1:-1])]
        change = _least_residual(self._cells, changes, year)
        if change:
            return change
        longest = min(_MOST_GRACE, float(axes.ages[self._used].max() / axes.step) - 2)
        graces = [Grace(length * axes.step) for length in range(1, int(longest) + 1)]
        of_grace = _Cells(axes, self._values, self._used, self._curve_of_past, EXPONENTS)
        return _least_residual(of_grace, graces, year)

    def newest_fit(self) -> bool:
        """Whether the newest one or two models and periods fit those before, as far as cells tell.

        A rate of drift that changed so recently is not known; this says only that it changed. A
        change after the newest model shows in no cell: it makes all models worse by as much.
        """
        if not self._cells:
            return True
        firsts = self._axes.until[-3:-1]
        chances = [self._cells.chance(Change(float(first))) for first in firsts]
        return min(chances) * len(chances) >= _LEAST_CHANCE


def _least_residual(
    cells: "_Cells", candidates: Sequence[_Candidate], year: float
) -> _Candidate | None:
    """The candidate that leaves the least residual; None if it could be chance."""
    if not candidates:
        return None
    axes = cells.axes
    rivals: list[Event | None] = [None]
    inner = (axes.periods > axes.until[1]) & (axes.periods <= axes.until[-1])
    rivals += [Break(period) for period in thinned(axes.periods[inner])]
    if math.isfinite(year):
        rivals.append(Season(year))
    of_rivals = max(min(cells.residual(event) for event in rivals), _LEAST_RESIDUAL)
    residuals = [cells.residual(event) for event in candidates]
    of_best = max(min(residuals), _LEAST_RESIDUAL)
    best = candidates[residuals.index(min(residuals))]
    count = len(axes.until)
    ratio = (count - 1) * math.log(of_rivals / of_best)
    if isinstance(best, Change):
        # Correlation along one axis alone hardly makes up a change; along both it does.
        ratio *= max(cells.shares_alone(cells.residuals(best)))
    least_ratio = max(_LEAST_RATIO[type(best)] / count, _LEAST_RATIO_OF_MANY)
    return best if ratio > least_ratio else None


def thinned(times: Array) -> list[float]:
    """At most _MOST_TIMES of these times of an event, evenly."""
    index = np.linspace(0, len(times) - 1, min(len(times), _MOST_TIMES)).round().astype(int)
    return [float(time) for time in times[index]]


class _Cells:
    """The measured cells, without what models and periods add to them, and free curves over age."""

    def __init__(
        self,
        axes: Axes,
        values: Array,
        used: Any,
        curves: Sequence[Array],
        exponents: Sequence[float],
    ):
        """Take the free terms out of the cells.

        curves     columns (models, periods) that are free, too
        exponents  of age in laws
        """
        self.axes = axes
        self.exponents = exponents
        self.used = used
        self._rows, self._columns = np.nonzero(used)
        self._models = len(axes.until)
        self._periods = len(axes.periods)
        cells = used.astype(float)
        # Sums of products of the free terms: A'A, where A has a column for each model and period.
        of_models = np.diag(cells.sum(1))
        of_periods = np.diag(cells.sum(0))
        products = np.block([[of_models, cells], [cells.T, of_periods]])
        self._inverse = np.linalg.pinv(products, rcond=_ROUNDING, hermitian=True)
        columns = np.zeros((len(self._rows), len(curves)))
        for index, curve in enumerate(curves):
            columns[:, index] = self._without_terms(curve)
        left, sizes, _ = np.linalg.svd(columns, full_matrices=False)
        self._curves = left[:, sizes > _ROUNDING * sizes.max(initial=1.0)]  # orthonormal
        terms = int(np.linalg.matrix_rank(products, hermitian=True))
        self.freedom = len(self._rows) - terms - self._curves.shape[1]
        """Cells minus free terms."""
        self._target = self._remaining(values)
        self._by_exponent: dict[float, list[Array]] = {}

    def _without_terms(self, values: Array) -> Array:
        """The used cells, (cells,), without the terms of models and periods."""
        cells = np.asarray(values, dtype=float)[self.used]
        of_models = np.bincount(self._rows, cells, self._models)
        of_periods = np.bincount(self._columns, cells, self._periods)
        terms = self._inverse @ np.concatenate([of_models, of_periods])
        return np.asarray(
            cells - terms[: self._models][self._rows] - terms[self._models :][self._columns]
        )

    def _remaining(self, values: Array) -> Array:
        """The used cells, (cells,), without all that is free."""
        cells = self._without_terms(values)
        remaining = cells - self._curves @ (self._curves.T @ cells)
        if np.linalg.norm(remaining) <= _ROUNDING * np.linalg.norm(cells):
            return np.zeros_like(cells)
        return np.asarray(remaining)

    def residual(self, event: Event | None) -> float:
        """The norm of `residuals`."""
        return float(np.linalg.norm(self.residuals(event)))

    def residuals(self, event: Event | None) -> Array:
        """The least residuals over `exponents` of age, of laws with this event, (cells,)."""
        columns = AgeColumns(self.axes, event)
        of_event = []
        if not isinstance(event, Change):  # the free curves hold the time before it
            of_event = [self._remaining(shape) for shape in columns.of_event]
        residuals = []
        for exponent in self.exponents:
            if isinstance(event, Change | Grace):
                of_age = self._of_age(columns, exponent)
            else:  # these leave the ages as they are
                of_age = self._of_whole_age(exponent)
            design = np.column_stack([*of_age, *of_event])
            solution = np.linalg.lstsq(design, self._target, rcond=_ROUNDING)[0]
            residuals.append(self._target - design @ solution)
        return min(residuals, key=lambda of_cells: float(np.linalg.norm(of_cells)))

    def chance(self, change: Change) -> float:
        """The probability that chance alone explains as much as the change.

        By an F-test. Correlation between neighbours, models or periods, counts as fewer cells.
        """
        design = np.column_stack(self._of_age(AgeColumns(self.axes, change), exponent=1.0))
        terms = int(np.linalg.matrix_rank(design, rtol=_ROUNDING))
        residuals = self.residuals(change)
        least = float(residuals @ residuals)
        explained = float(self._target @ self._target) - least
        if terms == 0 or explained <= _LEAST_RESIDUAL**2:
            return 1.0
        freedom = (self.freedom - terms) * math.prod(self.shares_alone(residuals))
        ratio = explained / terms / max(least, _LEAST_RESIDUAL**2) * freedom
        return float(fdtrc(terms, freedom, ratio))

    def shares_alone(self, residuals: Array) -> tuple[float, float]:
        """As how many uncorrelated cells one counts, along models and along periods.

        (1 - r) / (1 + r) by the correlation r of neighbours, as of a process of first order.
        """
        table = np.full(self.used.shape, math.nan)
        table[self.used] = residuals
        variance = np.nanmean(table**2)
        shares = []
        for products in (table[1:] * table[:-1], table[:, 1:] * table[:, :-1]):
            pairs = products[np.isfinite(products)]
            correlation = 0.0
            if len(pairs) and variance > 0:
                correlation = max(0.0, float(pairs.mean() / variance))
            shares.append((1 - correlation) / (1 + correlation))
        return shares[0], shares[1]

    def _of_age(self, columns: AgeColumns, exponent: float) -> list[Array]:
        """What remains of the columns of the counted age."""
        return [
            self._remaining(columns.aged(exponent)),
            self._remaining(columns.past(exponent)),
        ]

    def _of_whole_age(self, exponent: float) -> list[Array]:
        """`_of_age` without an event; computed once."""
        if exponent not in self._by_exponent:
            self._by_exponent[exponent] = self._of_age(AgeColumns(self.axes, None), exponent)
        return self._by_exponent[exponent]
