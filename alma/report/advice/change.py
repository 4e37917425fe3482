"""Whether a stream drifts at another rate since some period, or only beyond some age.

One law for all of history hides drift that has just begun or ended. The test compares, of cells
alone, laws with and without such an event. A free term for each model and each period is taken out
of all losses first: how good a model is and how hard a period is differ far more than the cells do,
and would hide a change of the last few months. What is left is how much two models lose to each
other on their two periods.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from alma.report.advice.axes import Axes, event_shapes
from alma.report.advice.law import Array, Break, Change, Event, Grace, Season

_EXPONENTS = (0.25, 0.5, 1.0)  # of age, as in the law
_MOST_TIMES = 50  # most times of a change, and of a break, that are tried
_MOST_GRACE = 6  # longest time without loss that is tried, in steps between models
_LEAST_RATIO = (0.8, 8.0)
"""Least log-likelihood ratio for an event, where each model counts as one observation: the first
number, or the second over the number of models. Of made-up streams without one, with cells that
differ by .005 to .02 nats, alone or correlated by .8, at most 1 of 100 with 12 models reach it."""


def find_change(axes: Axes, values: Array, used: Any, year: float) -> Change | Grace | None:
    """Since when the stream drifts at another rate, or up to which age it adds nothing.

    None without evidence for either.

    values  losses (models, periods)
    used    cells that were measured, bool (models, periods)
    year    length of a year on the axis of the losses; inf: no season explains the losses instead
    """
    cells = _Cells(axes, values, used)
    if len(axes.until) < 4 or cells.freedom < len(axes.until):
        return None
    unchanging: list[Event | None] = [None]
    inner = (axes.periods > axes.until[1]) & (axes.periods <= axes.until[-1])
    unchanging += [Break(period) for period in _thinned(axes.periods[inner])]
    if math.isfinite(year):
        unchanging.append(Season(year))
    changes: list[Change | Grace] = [Change(first) for first in _thinned(axes.until[1:-1])]
    longest = min(_MOST_GRACE, float(axes.ages[used].max() / axes.step) - 2)
    changes += [Grace(length * axes.step) for length in range(1, int(longest) + 1)]
    unchanged = min(cells.residual(event) for event in unchanging)
    residuals = [cells.residual(change) for change in changes]
    least = max(min(residuals), 1e-9)
    count = len(axes.until)
    ratio = (count - 1) * math.log(max(unchanged, 1e-9) / least)
    constant, of_few = _LEAST_RATIO
    if ratio <= max(constant, of_few / count):
        return None
    return changes[residuals.index(min(residuals))]


def _thinned(times: Array) -> list[float]:
    """At most _MOST_TIMES of these times, evenly."""
    index = np.linspace(0, len(times) - 1, min(len(times), _MOST_TIMES)).round().astype(int)
    return [float(time) for time in times[index]]


class _Cells:
    """The measured cells, without what models and periods add to them."""

    def __init__(self, axes: Axes, values: Array, used: Any):
        self.axes = axes
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
        self.freedom = len(self._rows) - int(np.linalg.matrix_rank(products, hermitian=True))
        """Cells minus free terms."""
        self._target = self._remaining(values)

    def _remaining(self, values: Array) -> Array:
        """The used cells, (cells,), without the terms of models and periods."""
        cells = np.asarray(values, dtype=float)[self.used]
        of_models = np.bincount(self._rows, cells, self._models)
        of_periods = np.bincount(self._columns, cells, self._periods)
        terms = self._inverse @ np.concatenate([of_models, of_periods])
        return np.asarray(
            cells - terms[: self._models][self._rows] - terms[self._models :][self._columns]
        )

    def residual(self, event: Event | None) -> float:
        """The least norm of residuals over exponents of age, of laws with this event."""
        ages = self.axes.counted_ages(event)
        shapes = event_shapes(self.axes, event)
        residuals = []
        for exponent in _EXPONENTS:
            later = np.maximum(ages, 0.0) ** exponent
            past = np.maximum(-ages, 0.0) ** exponent
            residuals.append(self._residual_of([later, past, *shapes]))
        return min(residuals)

    def _residual_of(self, shapes: Sequence[Array]) -> float:
        design = np.column_stack([self._remaining(shape) for shape in shapes])
        solution = np.linalg.lstsq(design, self._target, rcond=1e-9)[0]
        return float(np.linalg.norm(self._target - design @ solution))
