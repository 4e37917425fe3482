"""The law of staleness: what age adds to the loss of a model, with what less training costs apart.

The loss of the model that was trained until period u on the held-out part of a period p is

    R(u, p) = d(p) + b a^c + g h(n(u)) + s w(u, p),   a = p - u > 0   (f |a|^c for b a^c if a < 0)

    d   difficulty of the period: free, so only models on one period are compared
    b   what age adds; f: what the model forgets of the past, 0 or more
    c   exponent of age
    g   what training gains, 0 or more
    n   amount of training until u, in steps between models
    h   h(n) = (n^-k - 1) / k, or -log n for k = 0 (`left_to_gain`)
    s   size of an event beside age, 0 without one; w: its shape, see `Break` and `Season`

`alma.report.advice.staleness` fits the law. No law of a few exponents is true, so a bend is added
to it: at each age the mean residual there, and between ages on a line.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Break:
    """The stream changed once: models from before lose on periods after it, and the reverse."""

    first: float
    """First period after the break, on the axis of the losses."""


@dataclass(frozen=True)
class Season:
    """Loss depends on the time of the year: w = sin^2(pi a / year), lowest at that of training."""

    year: float
    """On the axis of the losses."""


Event = Break | Season


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
    """Loss at the opposite time of the year above that at the same time; 0: no season."""
    year: float = math.inf

    def aged(self, ages: Any) -> Array:
        """Loss that age alone adds, at ages >= 0; a break adds nothing."""
        season = self.s * np.sin(np.pi * ages / self.year) ** 2
        return np.asarray(self.b * ages**self.c + season + np.interp(ages, *self.bend))

    def extra(self, ages: Any, ahead: Any = 0.0) -> Array:
        """Loss of models of such ages >= 0 above that of a new model, less training included.

        `ahead`: how long after the last period of the losses the models are tested; it broadcasts
        with `ages`.
        """
        amount = self.amount + np.asarray(ahead) / self.step
        ages = np.asarray(ages, dtype=float)
        old_amount = np.minimum(np.maximum(amount - ages / self.step, 1.0), amount)
        lost = left_to_gain(old_amount, self.k) - left_to_gain(amount, self.k)
        return self.aged(ages) + self.g * lost


def left_to_gain(amount: Any, k: float) -> Array:
    """h(n): what training beyond such amounts can still gain, up to a constant."""
    return np.asarray((amount**-k - 1) / k if k else -np.log(amount))
