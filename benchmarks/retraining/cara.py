"""CARA, cost-aware retraining (Mahadevan and Mathioudakis, arXiv 2310.04216; KBS 293, 2024).

What could be read: the abstract, and summaries that name the parts of the method. They are a cost
of staleness for each model and batch beside a cost of training, in one matrix; three variants,
which train by a threshold of staleness, by one of the staleness added up since the last training,
or by a period; an oracle, which knows the future. The parameter of each variant is the one of
least strategy cost (staleness and trainings) on past batches.

What could not be read is the equation of the staleness cost, which weighs losses on the data by
their similarity to the queries. Data and queries are one set here, so staleness is ours: the loss
on a period minus the loss on the model's own period. Strategies are compared by losses and prices,
as this benchmark counts them. The batches of the past are the warm-up.
"""

import math
from functools import partial

import numpy as np

from alma.report.advice.law import Array
from benchmarks.retraining.history import History
from benchmarks.retraining.replay import least_cost


def cara_threshold(history: History) -> bool:
    """Train when the staleness on the newest period reaches a threshold.

    Thresholds tried are the staleness of all models on all later periods of the warm-up, and
    infinity.
    """
    losses = history.of_warm_up()
    staleness = losses - np.diag(losses)[:, None]
    threshold = _best_threshold(losses, staleness, history.price)
    model = history.trained[-1]
    now = history.loss(model, history.now) - history.loss(model, model)
    return now >= threshold


def cara_cumulative(history: History) -> bool:
    """Train when the staleness since the training, added up, reaches a threshold.

    Thresholds tried are all such sums of the warm-up, and infinity.
    """
    losses = history.of_warm_up()
    staleness = np.triu(losses - np.diag(losses)[:, None])
    threshold = _best_threshold(losses, np.cumsum(staleness, 1), history.price)
    model = history.trained[-1]
    first = history.loss(model, model)
    total = 0.0
    for at in range(model + 1, history.now + 1):
        total += history.loss(model, at) - first
    return total >= threshold


def _best_threshold(losses: Array, signal: Array, price: float) -> float:
    """The threshold of a signal (models, periods) that costs least on the warm-up."""
    later = np.triu_indices(len(losses), 1)
    thresholds = [*np.unique(signal[later]).tolist(), math.inf]
    decisions = [partial(_reaches, signal, threshold) for threshold in thresholds]
    return thresholds[least_cost(losses, decisions, price)]


def _reaches(signal: Array, threshold: float, model: int, at: int) -> bool:
    return bool(signal[model, at] >= threshold)


def cara_periodic(history: History) -> bool:
    """Train after so many periods as cost least on the warm-up, replayed from its first model."""
    losses = history.of_warm_up()
    decisions = [partial(_is_old, periods) for periods in range(1, len(losses))]
    return history.age > least_cost(losses, decisions, history.price)


def _is_old(periods: int, model: int, at: int) -> bool:
    return at - model >= periods
