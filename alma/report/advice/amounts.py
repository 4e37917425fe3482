"""Amounts of loss, savings and prices as sentences and tables show them.

What is too small to matter is shown as 0, and a cost below 0 as none.
"""

import math

import numpy as np

from alma.report.advice.retraining import Retraining
from alma.report.losses import MeanOverSeeds
from alma.tables import number

_FEWEST_PERIODS = 12.0
_TIMES_THE_OLDEST = 2.0
"""A price is asked about if the worst model, in place of the best one, would have to serve longer
than both to lose as much: far longer than any model has aged."""
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
    losses = retraining.laws.values
    widest = float(np.nanmax(losses) - np.nanmin(losses))
    oldest = max(retraining.losses.by_age) / retraining.period.size
    periods = max(_FEWEST_PERIODS, _TIMES_THE_OLDEST * oldest)
    if not price > periods * widest:
        return ""
    noun = retraining.period.noun
    unit = "loss" if plain and retraining.metric.in_percent else retraining.unit
    return (
        f"Is --price {price:g} money? It was read as {unit} summed over {retraining.period.plural},"
        f" and the worst value of all is {number(widest)} from the best. If it is money, give "
        f"--price {price:g}/X: X is what one unit costs in one {noun}."
    )


def _without_dust(retraining: Retraining, value: float) -> float:
    """The value, or 0 if it is too small to show."""
    largest = float(np.nanmax(np.abs(retraining.laws.values)))
    return 0.0 if abs(value) < _SMALLEST * largest else value
