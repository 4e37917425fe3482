"""The axes of an evaluation matrix: ages and amounts of training, and the shapes of events."""

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


def event_shapes(axes: Axes, event: Event | None) -> list[Array]:
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
