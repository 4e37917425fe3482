"""Whether a stream drifts at another rate since some period, or only beyond some age.

One law for all of history hides drift that has just begun or ended. The test of a *change* asks
whether losses depend on more than age, whatever their curves over age are: a law of the wrong
curve would seem to change. The test of a *grace* has a free curve on the past alone, and compares
the law with a time without loss to the law without. Both compete with a break and a season.

A free term for each model and each period is taken out first: how good a model is and how hard a
period is differ far more than the cells do, and would hide a change of the last few months. What
is left is how much two models lose to each other on their two periods.

Cells that are correlated along both tests and models by .8 look like a change: 2 of 60 matrices
of 12 models, 10 of 60 of 24.
"""

import math
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from alma.report.advice.axes import AgeColumns, Axes, curve_columns
from alma.report.advice.law import EXPONENTS, Array, Break, Change, Event, Grace, Season

_Candidate = TypeVar("_Candidate", Change, Grace)
_LEAST_RESIDUAL = 1e-9  # of losses without noise
_ROUNDING = 1e-9  # part of a column that counts as none
_MOST_TIMES = 50  # most times of a change, and of a break, that are tried
_MOST_GRACE = 6  # longest time without loss that is tried, in steps between models
_LEAST_RATIO = {Change: 10.0, Grace: 5.5}
"""Least log-likelihood ratio for an event, times the number of models: each counts as one
observation, and chance reaches less the more there are. Measured in docs/results/cadence.md."""
_LEAST_RATIO_OF_MANY = 0.2  # least ratio however many models there are: no law fits exactly


def find_change(axes: Axes, values: Array, used: Any, year: float) -> Change | Grace | None:
    """Since when the stream drifts at another rate, or up to which age it adds nothing.

    None without evidence for either.

    values  losses (models, periods)
    used    cells that were measured, bool (models, periods)
    year    length of a year on the axis of the losses; inf: no season explains the losses instead
    """
    count = len(axes.until)
    if count < 4:
        return None
    later = np.maximum(axes.ages, 0.0)
    past = np.maximum(-axes.ages, 0.0)
    curve_of_past = curve_columns(past, axes.step)
    curves = [*curve_columns(later, axes.step), *curve_of_past]
    of_change = _Cells(axes, values, used, curves, exponents=(1.0,))
    if of_change.freedom < 2 * count:
        return None
    changes = [Change(first) for first in _thinned(axes.until[1:-1])]
    change = _least_residual(of_change, changes, year)
    if change:
        return change
    longest = min(_MOST_GRACE, float(later[used].max() / axes.step) - 2)
    graces = [Grace(length * axes.step) for length in range(1, int(longest) + 1)]
    of_grace = _Cells(axes, values, used, curve_of_past, EXPONENTS)
    return _least_residual(of_grace, graces, year)


def _least_residual(
    cells: "_Cells", candidates: Sequence[_Candidate], year: float
) -> _Candidate | None:
    """The candidate that leaves the least residual; None if it could be chance."""
    if not candidates:
        return None
    axes = cells.axes
    rivals: list[Event | None] = [None]
    inner = (axes.periods > axes.until[1]) & (axes.periods <= axes.until[-1])
    rivals += [Break(period) for period in _thinned(axes.periods[inner])]
    if math.isfinite(year):
        rivals.append(Season(year))
    of_rivals = max(min(cells.residual(event) for event in rivals), _LEAST_RESIDUAL)
    residuals = [cells.residual(event) for event in candidates]
    of_best = max(min(residuals), _LEAST_RESIDUAL)
    best = candidates[residuals.index(min(residuals))]
    count = len(axes.until)
    ratio = (count - 1) * math.log(of_rivals / of_best)
    least_ratio = max(_LEAST_RATIO[type(best)] / count, _LEAST_RATIO_OF_MANY)
    return best if ratio > least_ratio else None


def _thinned(times: Array) -> list[float]:
    """At most _MOST_TIMES of these times, evenly."""
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
        self._inverse = np.linalg.pinv(products, hermitian=True)
        columns = np.zeros((len(self._rows), len(curves)))
        for index, curve in enumerate(curves):
            columns[:, index] = self._without_terms(curve)
        left, sizes, _ = np.linalg.svd(columns, full_matrices=False)
        self._curves = left[:, sizes > _ROUNDING * sizes.max(initial=1.0)]  # orthonormal
        terms = int(np.linalg.matrix_rank(products, hermitian=True))
        self.freedom = len(self._rows) - terms - self._curves.shape[1]
        """Cells minus free terms."""
        self._target = self._remaining(values)

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
        """The least norm of residuals over `exponents` of age, of laws with this event."""
        columns = AgeColumns(self.axes, event)
        of_event = []
        if not isinstance(event, Change):  # the free curves hold the time before it
            of_event = [self._remaining(shape) for shape in columns.of_event]
        residuals = []
        for exponent in self.exponents:
            aged = self._remaining(columns.aged(exponent))
            past = self._remaining(columns.past(exponent))
            design = np.column_stack([aged, past, *of_event])
            solution = np.linalg.lstsq(design, self._target, rcond=_ROUNDING)[0]
            residuals.append(float(np.linalg.norm(self._target - design @ solution)))
        return min(residuals)
