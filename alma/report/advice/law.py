"""The law of staleness: how the loss of a model grows with its age.

It separates two reasons why an older model is worse: the stream has moved on (age), and the model
has been trained on less data. The loss of the model that was trained until period u, on the
held-out part of period p, is

    R(u, p) = d(p) + b a^c + g h(n(u)) + s w(u, p),   a = p - u > 0   (f |a|^c for b a^c if a < 0)

    d   difficulty of the period: free, so only models on one period are compared
    b   what age adds; f: what the model forgets of the past, 0 or more
    c   exponent of age
    g   what training gains, 0 or more
    n   amount of training until u, in steps between models
    h   h(n) = (n^-k - 1) / k, or -log n for k = 0 (`left_to_gain`)
    s   size of an event beside age, 0 without one; w: its shape, see the kinds of `Event`

`alma.report.advice.staleness` fits the law. A law with few parameters never fits exactly, so a
*bend* is added to it: the mean residual at each age, interpolated linearly between ages.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float64]]
EXPONENTS = (0.25, 0.5, 1.0)
"""Exponents of age that are tried."""


@dataclass(frozen=True)
class Break:
    """An event: the stream changed once.

    Models trained before the break have a larger loss on periods after it, and the reverse.
    """

    first: float
    """First period after the break, on the axis of the losses."""


@dataclass(frozen=True)
class Season:
    """An event: the stream repeats every year, w = sin^2(pi a / year).

    The loss is lowest at the time of the year at which the model's training ended.
    """

    year: float
    """Length of a year on the axis of the losses."""


@dataclass(frozen=True)
class Change:
    """An event: the stream drifts at another rate since some period.

    b and f are those since then: a counts only the time from `first` on, and w the time before it.
    A further term of cells on the past, of the whole age with an exponent of its own, is what
    models forget at any rate of the drift.
    """

    first: float
    """Last period of the old rate, on the axis of the losses."""


@dataclass(frozen=True)
class Grace:
    """An event: age adds nothing at first; a counts only what is beyond `length`."""

    length: float
    """On the axis of the losses."""


Event = Break | Season | Change | Grace


class Law(NamedTuple):
    """A fitted law; the names of the coefficients are those of the formula above."""

    b: float
    c: float
    f: float
    g: float
    k: float
    amount: float
    """n of the last period."""
    step: float
    """Distance of two models, on the axis of the losses."""
    bend: tuple[list[float], list[float]]
    """Ages, and what the mean residual adds at each."""
    s: float = 0.0
    """How much larger the loss is half a year away from the end of training; 0: no season."""
    year: float = math.inf
    grace: float = 0.0
    """Age up to which nothing is added."""

    def aged(self, ages: Any) -> Array:
        """The loss that age alone adds, at `ages` >= 0, without that of a break."""
        counted = np.maximum(np.asarray(ages, dtype=float) - self.grace, 0.0)
        season = self.s * np.sin(np.pi * ages / self.year) ** 2
        return np.asarray(self.b * counted**self.c + season + np.interp(ages, *self.bend))

    def extra(self, ages: Any, ahead: Any = 0.0) -> Array:
        """The extra loss of models of these `ages` >= 0, compared with a new model.

        It includes what the older model has missed in training. `ahead` is the time from the last
        period of the losses to the test; it broadcasts with `ages`.
        """
        amount = self.amount + np.asarray(ahead) / self.step
        ages = np.asarray(ages, dtype=float)
        old_amount = np.minimum(np.maximum(amount - ages / self.step, 1.0), amount)
        lost = left_to_gain(old_amount, self.k) - left_to_gain(amount, self.k)
        return self.aged(ages) + self.g * lost


def left_to_gain(amount: Any, k: float) -> Array:
    """h(n) of the law: the loss that training beyond the amount n can still gain, up to a
    constant."""
    return np.asarray((amount**-k - 1) / k if k else -np.log(amount))
