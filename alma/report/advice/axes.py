"""The axes of an evaluation matrix, and the columns of the law that depend on age."""

from typing import NamedTuple

import numpy as np

from alma.report.advice.law import Array, Change, Event, Grace, Season


class Axes(NamedTuple):
    """The axes of an evaluation matrix."""

    until: Array  # (models,)
    periods: Array  # (periods,)

    @property
    def ages(self) -> Array:
        """(models, periods)."""
        return self.periods - self.until[:, None]

    def ages_since(self, first: float) -> Array:
        """The part of the ages that is after the period `first`, (models, periods)."""
        return np.maximum(self.periods, first) - np.maximum(self.until, first)[:, None]

    def counted_ages(self, event: Event | None) -> Array:
        """The part of the ages that the law counts with this event, (models, periods)."""
        if isinstance(event, Change):
            return self.ages_since(event.first)
        if isinstance(event, Grace):
            counted = np.maximum(np.abs(self.ages) - event.length, 0.0)
            return np.asarray(np.sign(self.ages) * counted)
        return self.ages

    @property
    def step(self) -> float:
        """The median distance of two models."""
        return float(np.median(np.diff(self.until)))

    @property
    def amounts(self) -> Array:
        """The amount of training n of each model, (models,), in `step`s; the first has 1."""
        return 1 + (self.until - self.until[0]) / self.step

    @property
    def last_amount(self) -> float:
        """The amount of training of a model that is trained until the last period."""
        return 1 + float(self.periods[-1] - self.until[0]) / self.step


class AgeColumns:
    """The columns of the law that depend on age, for coefficients of 1, (models, periods) each.

    Both the test of a change and the fit take theirs from here, so that they know the same laws.
    """

    def __init__(self, axes: Axes, event: Event | None):
        self._ages = axes.ages
        self._counted = axes.counted_ages(event)
        self.of_event = _event_shapes(axes, event)

    def aged(self, exponent: float) -> Array:
        """Of b: the counted age of cells of later periods."""
        return np.asarray(np.maximum(self._counted, 0.0) ** exponent)

    def past(self, exponent: float) -> Array:
        """Of f: the counted age of cells of the past."""
        return np.asarray(np.maximum(-self._counted, 0.0) ** exponent)

    def forgotten(self, exponent: float) -> Array:
        """The whole age of cells of the past: a change of the drift does not end forgetting."""
        return np.asarray(np.maximum(-self._ages, 0.0) ** exponent)


def curve_columns(ages: Array, step: float) -> list[Array]:
    """Columns of a curve over `ages` >= 0 that is 0 at 0, linear between knots and else free.

    Its knots are 1, 2, 3, 5, 8, ... `step`s (Fibonacci): curves over age bend less at larger ages.
    One column, of the shape of `ages`, for each knot up to the largest age.
    """
    largest = float(ages.max())
    if largest == 0:
        return []
    knots = [0.0]
    knot = step
    following = 2 * step
    while knot < largest:
        knots.append(knot)
        knot, following = following, knot + following
    knots.append(largest)
    heights = np.eye(len(knots))[1:]
    return [np.interp(ages, knots, of_knot) for of_knot in heights]


def _event_shapes(axes: Axes, event: Event | None) -> list[Array]:
    """Columns of the design for an event of size 1, (models, periods) each; [] without one.

    For cells of later periods and of the past, which have separate coefficients.
    """
    if event is None or isinstance(event, Grace):
        return []
    if isinstance(event, Season):
        wave = np.sin(np.pi * axes.ages / event.year) ** 2
        return [wave * (axes.ages > 0), wave * (axes.ages <= 0)]
    if isinstance(event, Change):
        before = axes.ages - axes.ages_since(event.first)
        return [np.maximum(before, 0.0), np.maximum(-before, 0.0)]
    trained_before = (axes.until < event.first)[:, None]
    tested_before = axes.periods < event.first
    crossings = [trained_before & ~tested_before, ~trained_before & tested_before]
    return [crossing.astype(float) for crossing in crossings]
