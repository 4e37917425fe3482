"""How often to retrain on a stream that drifts: what cadences lose, and which is enough."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from alma.report.advice.law import Law
from alma.report.advice.period import Period
from alma.report.advice.plan import Outlook, RetrainingPlan, best_plan
from alma.report.advice.staleness import Laws
from alma.report.losses import Losses, MeanOverSeeds, in_unit

_LEAST_HORIZON = 12  # periods to come, unless they are known


class TrainingCost(NamedTuple):
    """What one training costs; None: unknown."""

    flops: float | None = None
    """TFLOPs."""
    hours: float | None = None
    machine: str = "GPU-hours"
    """Unit of the hours."""


class CadenceChoice(NamedTuple):
    """A cadence that is often enough."""

    every: int
    """In periods."""
    open: bool
    """Whether a higher frequency may still gain what it is worth."""


@dataclass(frozen=True, eq=False)
class Retraining:
    """How often to retrain one configuration, or one model whose losses are known.

    UserError: fewer than three models share periods, or none is tested after its training.
    """

    losses: Losses
    unit: str
    """Of the losses; those that begin with "nats" are of text."""
    period: Period = field(default_factory=Period)
    cost: TrainingCost = field(default_factory=TrainingCost)
    every: Sequence[int] = ()
    """Cadences to compare, in periods; none: the calendar's, up to the age of the oldest model."""
    worth: tuple[float, bool] = (1.0, True)
    """A gain below it is a tie: in the unit; if True, percent of perplexity or points of error."""
    price: float = math.nan
    """Of a training, in the unit summed over periods; NaN: unknown, so no plan."""
    money: float = 0.0
    """What one unit costs in one period; 0: unknown. The plan is stated in it."""
    periods_to_come: int = 0
    """0: a year of days or weeks, else 12."""
    twin: "Retraining | None" = None
    """The same configuration with the other value of `--from-scratch`, and its price."""

    def __post_init__(self) -> None:
        _ = self.laws  # raises UserError

    @cached_property
    def laws(self) -> Laws:
        """The laws of staleness."""
        return Laws(self.losses, self.period.year)

    @cached_property
    def effect(self) -> MeanOverSeeds:
        """Extra loss per unit of age, whatever training gains."""
        return self.laws.effect_of_age()

    @property
    def unknown(self) -> bool:
        """Whether there are no losses on the past, so that drift cannot be told from training."""
        return math.isnan(self.effect.mean)

    @cached_property
    def cadences(self) -> list[int]:
        """The cadences to compare, ascending, in periods."""
        if self.every:
            return sorted(set(self.every))
        usual = self.period.calendar.cadences
        oldest = max(self.losses.by_age) / self.period.size
        reached = sum(cadence <= oldest for cadence in usual)
        return list(usual[: max(2, reached)])

    @cached_property
    def horizon(self) -> int:
        """The number of periods to come."""
        return self.periods_to_come or max(_LEAST_HORIZON, self.period.calendar.year)

    @property
    def least_gain(self) -> float:
        """The gain that a higher frequency is worth, in the unit."""
        return in_unit(self.worth, self.unit)

    def extra(self, every: int) -> MeanOverSeeds:
        """Mean extra loss at ages of 1 to `every` periods, on the periods to come."""
        return self.laws.estimate(lambda law: self._extra(every, law))

    def gain(self, every: int, rarer: int) -> MeanOverSeeds:
        """Mean extra loss that a rarer cadence has more."""
        return self.laws.estimate(lambda law: self._extra(rarer, law) - self._extra(every, law))

    def _extra(self, every: int, law: Law) -> float:
        size = self.period.size
        ages = size * np.arange(1, every + 1)
        ahead = size * np.arange(1, self.horizon + 1)
        return float(np.mean(law.extra(ages[:, None], ahead)))

    def last_time(self, every: int) -> float:
        """Mean extra loss at ages of 1 to `every` periods, on the last period with a new model.

        NaN if no period has one, or if no model on it is so old.
        """
        for j in reversed(range(len(self.losses.periods))):
            extra = self._extra_measured_on(j)
            if len(extra) > 1:
                ages = self.period.size * np.arange(1, every + 1)
                by_age = np.interp(ages, list(extra), list(extra.values()), right=math.nan)
                return float(by_age.mean())
        return math.nan

    def _extra_measured_on(self, j: int) -> dict[float, float]:
        """Losses on column j above that at age 0, by age, ascending; {} without that model."""
        loss_by_age = {}
        for age, loss in zip(self.laws.ages[:, j], self.laws.values[:, j], strict=True):
            if age >= 0 and np.isfinite(loss):
                loss_by_age[age] = loss
        if 0 not in loss_by_age:
            return {}
        return {age: loss_by_age[age] - loss_by_age[0] for age in sorted(loss_by_age)}

    def aged(self, age: int) -> MeanOverSeeds:
        """Largest loss that age alone adds, at ages of 1 to `age` periods."""
        ages = self.period.size * np.arange(1, age + 1)
        return self.laws.estimate(lambda law: law.aged(ages).max())

    @property
    def slope(self) -> MeanOverSeeds:
        """Loss that b adds per period of age, up to the oldest model."""
        oldest = max(self.losses.by_age)
        size = self.period.size
        return self.laws.estimate(lambda law: law.b * oldest**law.c * size / oldest)

    @cached_property
    def drifts(self) -> bool:
        """Whether there is evidence that age adds loss, by the law and by the effect of age."""
        oldest = int(max(self.losses.by_age) / self.period.size)
        age = max(1, min(oldest, self.cadences[-1]))
        return self.aged(age).low > 0 and self.effect.low > 0

    @cached_property
    def choice(self) -> CadenceChoice:
        """The rarest cadence over which the most frequent one does not gain what it is worth."""
        most_frequent, *rarer = self.cadences
        for every in reversed(rarer):
            gain = self.gain(most_frequent, every)
            if not (self.drifts and gain.low > 0 and gain.mean >= self.least_gain):
                return CadenceChoice(every, open=not gain.high < self.least_gain)
        return CadenceChoice(most_frequent, open=False)

    @cached_property
    def outlook(self) -> Outlook:
        """What models will lose over the periods to come."""
        return Outlook(self.laws, self.period.size, self.horizon)

    @cached_property
    def plan(self) -> RetrainingPlan:
        """The plan of least expected total cost at the price."""
        return best_plan(self.outlook, self.price, self.period.noun)
