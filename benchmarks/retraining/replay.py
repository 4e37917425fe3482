"""What a strategy with a parameter would have cost on the warm-up: how rules tune themselves."""

from collections.abc import Callable, Sequence

import numpy as np

from alma.report.advice.law import Array

Decision = Callable[[int, int], bool]
"""Whether to train at a period (second), where the model of a period (first) serves."""


def cost_on(losses: Array, decide: Decision, price: float) -> float:
    """The cost of a strategy on a whole matrix, from its first model on.

    losses  (models, periods) of the warm-up
    decide  asked at the end of each period but the last one
    price   of a training, in units of loss
    """
    model = 0
    total = 0.0
    last = len(losses) - 1
    for at in range(1, last + 1):
        total += float(losses[model, at])
        if at < last and decide(model, at):
            model = at
            total += price
    return total


def least_cost(losses: Array, decisions: Sequence[Decision], price: float) -> int:
    """The index of the strategy that costs least; the first of those that cost the same."""
    costs = [cost_on(losses, decide, price) for decide in decisions]
    return int(np.argmin(costs))
