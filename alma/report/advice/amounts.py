"""Amounts of loss, savings and prices as sentences and tables show them.

What is too small to matter is shown as 0, and a cost below 0 as none.
"""

import math

import numpy as np

from alma.report.advice.retraining import Retraining
from alma.report.losses import MeanOverSeeds
from alma.tables import number

_FAR = 2.0  # times what a training saves; such a price can hardly be meant in that unit
_SMALLEST = 1e-6  # of the largest loss; less is rounding error of the fit


def rounded_off(retraining: Retraining, estimate: MeanOverSeeds) -> MeanOverSeeds:
    """The estimate, in the unit of the losses, with 0 for each number that is too small to show."""
    return MeanOverSeeds(*(_without_dust(retraining, value) for value in estimate))


def in_unit_of_price(retraining: Retraining, value: float) -> str:
    """A number in the unit of the losses, in money if a unit has a price."""
    return number((retraining.money or 1.0) * _without_dust(retraining, value))


def total_cost(retraining: Retraining) -> str:
    """What the plan costs in all; nothing if older models were better than new ones.

    In that case the mean residuals at some ages, which the law includes as its bend, are below 0.
    """
    total = _without_dust(retraining, retraining.plan.total)
    if total > 0:
        return in_unit_of_price(retraining, total)
    if total == 0:
        return "nothing"
    gain = in_unit_of_price(retraining, -total)
    return f"nothing (older models were better than new ones, by {gain})"


def question_of_price(retraining: Retraining, plain: bool = False) -> str:
    """A question, if --price can hardly be in the unit of the losses; "" if it can.

    `plain`: without nats.
    """
    price = retraining.price
    if math.isnan(price) or retraining.money:
        return ""
    plan = retraining.plan
    largest_saving = plan.flips[0]  # of a training, in a plan with some
    losses = retraining.laws.values
    widest = float(np.nanmax(losses) - np.nanmin(losses)) * retraining.horizon
    if plan.trainings or not price > max(_FAR * largest_saving, widest):
        return ""
    most = in_unit_of_price(retraining, largest_saving)
    unit = "loss" if plain and retraining.metric.in_percent else retraining.unit
    return (
        f"Is --price {price:g} money? It was read as {unit} summed over periods, of "
        f"which a training saves {most} at most. If it is money, give --price {price:g}/X: X is "
        f"what one unit costs in one {retraining.period.noun}."
    )


def _without_dust(retraining: Retraining, value: float) -> float:
    """The value, or 0 if it is too small to show."""
    largest = float(np.nanmax(np.abs(retraining.laws.values)))
    return 0.0 if abs(value) < _SMALLEST * largest else value
