"""What a rule may see of a stream, and what its decisions cost."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from alma.report.advice.law import Array
from alma.report.advice.period import Period
from alma.report.losses import Losses
from alma.report.metric import Metric

WARM = 12
"""Periods with a model each, before the rules decide."""


class UnknownLossError(Exception):
    """A rule asked for a loss that nobody knows at that time."""


@dataclass(frozen=True)
class RetrainingStream:
    """A stream with a model for each period that could be trained."""

    name: str
    losses: Array
    """(models, periods): model i has seen the periods up to i. Lower is better, all above 0."""
    metric: Metric
    period: Period
    sealed: int = 0
    """Periods at the end that no choice may see."""


class History:
    """The losses that are known at the end of a period; periods count from 0."""

    def __init__(
        self, stream: RetrainingStream, trained: Sequence[int], start: int, now: int, price: float
    ):
        """Copy what is known.

        trained  the periods until which models are trained, ascending; the last one serves
        start    the last period of the warm-up
        now      the newest period whose losses are known
        price    of a training, in units of loss
        """
        self.trained = tuple(trained)
        self.first = start - WARM + 1
        self.start = start
        self.now = now
        self.price = price
        self.metric = stream.metric
        self.period = stream.period
        columns = stream.losses[:, self.first : now + 1]
        self._rows = {until: columns[until].copy() for until in self.trained}

    def loss(self, until: int, at: int) -> float:
        """The loss of the model trained until a period on period `at`.

        UnknownLossError: there is no such model, or the period is before the history or to come.
        """
        if until not in self._rows:
            raise UnknownLossError(f"no model is trained until period {until}")
        if not self.first <= at <= self.now:
            raise UnknownLossError(f"period {at} is not within {self.first} to {self.now}")
        return float(self._rows[until][at - self.first])

    @property
    def age(self) -> int:
        """Periods since the training of the model in service."""
        return self.now - self.trained[-1]

    def served(self) -> list[float]:
        """The loss of the model in service, on each period after the first one."""
        losses = []
        for at in range(self.first + 1, self.now + 1):
            until = max(model for model in self.trained if model < at)
            losses.append(self.loss(until, at))
        return losses

    def of_warm_up(self) -> Array:
        """The losses of all models on all periods of the warm-up, (models, periods)."""
        rows = [self._rows[until][:WARM] for until in range(self.first, self.start + 1)]
        return np.array(rows)

    def matrix(self) -> Losses:
        """All that is known, as `alma advise --matrix` would read it."""
        size = self.period.size
        rows = tuple(tuple(map(float, self._rows[until])) for until in self.trained)
        periods = tuple(size * at for at in range(self.first, self.now + 1))
        return Losses("", tuple(size * until for until in self.trained), periods, (rows,))


Rule = Callable[[History], bool]
"""Whether to train at the end of period `now`; the new model serves from the next one on."""


def cost(stream: RetrainingStream, rule: Rule, start: int, end: int, price: float) -> float:
    """Losses in service on the periods after `start` up to `end`, and the price of all trainings.

    The models of the warm-up are a gift. A rule decides at the end of each period but the last one,
    where a training would serve nothing that is counted.
    """
    trained = list(range(start - WARM + 1, start + 1))
    total = 0.0
    for at in range(start + 1, end + 1):
        total += float(stream.losses[trained[-1], at])
        if at < end and rule(History(stream, trained, start, at, price)):
            trained.append(at)
            total += price
    return total
