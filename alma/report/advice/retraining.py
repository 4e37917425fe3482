"""How often to retrain on a stream that drifts: the extra loss of each cadence, and the choice."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from alma.report.advice.law import Change, Law
from alma.report.advice.period import Period
from alma.report.advice.plan import Outlook, RetrainingPlan, best_plan
from alma.report.advice.staleness import Laws
from alma.report.losses import Losses, MeanOverSeeds
from alma.report.metric import Metric

_LEAST_HORIZON = 12  # fewest periods to plan for, unless their number is given


class TrainingCost(NamedTuple):
    """The cost of one training; None: unknown."""

    flops: float | None = None
    """TFLOPs."""
    hours: float | None = None
    machine: str = "GPU-hours"
    """Unit of the hours."""


class CadenceChoice(NamedTuple):
    """The recommended cadence."""

    every: int
    """In periods."""
    open: bool
    """Whether an even higher frequency, which was not compared, may still pay off."""


@dataclass(frozen=True, eq=False)
class Retraining:
    """How often to retrain one configuration, or one model whose losses are known.

    UserError: fewer than three models share periods, or none is tested after its training.
    """

    losses: Losses
    metric: Metric
    """Of the losses."""
    period: Period = field(default_factory=Period)
    cost: TrainingCost = field(default_factory=TrainingCost)
    every: Sequence[int] = ()
    """Cadences to compare, in periods; empty: the calendar's, up to the oldest model's age."""
    worth: tuple[float, bool] = (1.0, True)
    """Least gain that counts; smaller ones are ties. The flag says whether it is percent (as in
    `Metric.least_gain`) instead of in the unit of the losses."""
    price: float = math.nan
    """Price of a training, in the unit of the losses times periods; NaN: unknown, so no plan."""
    money: float = 0.0
    """Money that one unit of loss costs in one period; 0: unknown. If given, the plan's savings are
    stated in money."""
    periods_to_come: int = 0
    """Number of periods to plan for; 0: a year of days or weeks, else 12."""
    counted_from: str = ""
    """The name of the newest period of a model or test, from which plans count; empty: none."""
    twin: "Retraining | None" = None
    """The same for the configuration that differs only in `--from-scratch`."""

    def __post_init__(self) -> None:
        _ = self.laws  # fit at once, so that a UserError is raised here

    @cached_property
    def laws(self) -> Laws:
        """The laws of staleness."""
        return Laws(self.losses, self.period.year, self.metric.limits)

    @cached_property
    def effect(self) -> MeanOverSeeds:
        """Extra loss per unit of age, in which the effect of training cancels (`age_effect`)."""
        return self.laws.effect_of_age()

    @property
    def unknown(self) -> bool:
        """Whether drift and training cannot be told apart: no model is tested on the past."""
        return math.isnan(self.effect.mean)

    @cached_property
    def cadences(self) -> list[int]:
        """The cadences to compare, ascending, in periods."""
        if self.every:
            return sorted(set(self.every))
        usual = self.period.calendar.cadences
        oldest = max(self.ages_measured) / self.period.size
        reached = sum(cadence <= oldest for cadence in usual)
        return list(usual[: max(2, reached)])

    @cached_property
    def ages_measured(self) -> list[float]:
        """Ages above 0 of cells that tell how the stream drifts now, ascending.

        After a change of the drift only models and periods since then do. Without such a cell: the
        ages of all cells.
        """
        since = -math.inf
        if isinstance(self.laws.event, Change):
            since = self.laws.event.first
        until = self.losses.until
        by_age = self.losses.by_age
        ages = [age for age in by_age if age > 0]
        recent = []
        for age in ages:
            newest = max(until[i] for i, _ in by_age[age])
            if newest >= since:
                recent.append(age)
        return recent or ages

    @cached_property
    def horizon(self) -> int:
        """The number of periods to come."""
        return self.periods_to_come or max(_LEAST_HORIZON, self.period.calendar.year)

    @property
    def unit(self) -> str:
        """Unit of the losses."""
        return self.metric.unit

    @property
    def least_gain(self) -> float:
        """`worth` in the unit of the losses: the least gain for which to retrain more often."""
        return self.metric.least_gain(self.worth, self.laws.level)

    def extra(self, every: int) -> MeanOverSeeds:
        """Mean extra loss at ages of 1 to `every` periods, on the periods to come."""
        estimated = self.laws.estimate(lambda law: self._extra(every, law))
        return estimated.within(*self.laws.limits)

    def extra_at(self, age: float) -> MeanOverSeeds:
        """Extra loss of a model `age` periods old, on the next period."""
        size = self.period.size
        estimated = self.laws.estimate(lambda law: self.laws.extra(law, age * size, size))
        return estimated.within(*self.laws.limits)

    def gain(self, every: int, rarer: int) -> MeanOverSeeds:
        """How much larger the mean extra loss is with the rarer cadence."""
        gain = self.laws.estimate(lambda law: self._extra(rarer, law) - self._extra(every, law))
        least, most = self.laws.limits
        return gain.within(least - most, most - least)

    def _extra(self, every: int, law: Law) -> float:
        size = self.period.size
        ages = size * np.arange(1, every + 1)
        ahead = size * np.arange(1, self.horizon + 1)
        return float(np.mean(self.laws.extra(law, ages[:, None], ahead)))

    def last_time(self, every: int) -> float:
        """Mean extra loss at ages of 1 to `every` periods, as measured most recently.

        Measured on the last period that has a new model to compare with. NaN if there is no such
        period, or no model of age `every` was tested on it.
        """
        for j in reversed(range(len(self.losses.periods))):
            extra = self._extra_measured_on(j)
            if len(extra) > 1:
                ages = self.period.size * np.arange(1, every + 1)
                by_age = np.interp(ages, list(extra), list(extra.values()), right=math.nan)
                return float(by_age.mean())
        return math.nan

    def _extra_measured_on(self, j: int) -> dict[float, float]:
        """Extra loss on period j by age, ascending, compared with the model of age 0.

        {} if there is no such model.
        """
        loss_by_age = {}
        for age, loss in zip(self.laws.ages[:, j], self.laws.values[:, j], strict=True):
            if age >= 0 and np.isfinite(loss):
                loss_by_age[age] = loss
        if 0 not in loss_by_age:
            return {}
        return {age: loss_by_age[age] - loss_by_age[0] for age in sorted(loss_by_age)}

    def aged(self, age: int) -> MeanOverSeeds:
        """The largest loss that age alone adds, over ages of 1 to `age` periods."""
        ages = self.period.size * np.arange(1, age + 1)
        return self.laws.estimate(lambda law: law.aged(ages).max())

    @property
    def slope(self) -> MeanOverSeeds:
        """Mean slope of the law's age term b a^c: loss per period, up to the oldest model's age."""
        oldest = max(self.ages_measured)
        size = self.period.size
        return self.laws.estimate(lambda law: law.b * oldest**law.c * size / oldest)

    @cached_property
    def aged_most(self) -> MeanOverSeeds:
        """`aged` up to the rarest cadence, or the oldest model if that is younger."""
        oldest = int(max(self.ages_measured) / self.period.size)
        return self.aged(max(1, min(oldest, self.cadences[-1])))

    @cached_property
    def drifts(self) -> bool:
        """Whether both the law and `effect` give evidence that age adds loss."""
        return self.aged_most.low > 0 and self.effect.low > 0

    @cached_property
    def choice(self) -> CadenceChoice:
        """The rarest cadence that loses less than `least_gain` to the most frequent one."""
        most_frequent, *rarer = self.cadences
        if self.laws.just_changed:
            return CadenceChoice(self.cadences[-1], open=True)
        for every in reversed(rarer):
            gain = self.gain(most_frequent, every)
            if not (self.drifts and gain.low > 0 and gain.mean >= self.least_gain):
                return CadenceChoice(every, open=not gain.high < self.least_gain)
        return CadenceChoice(most_frequent, open=False)

    @cached_property
    def outlook(self) -> Outlook:
        """Forecast of the extra loss of deployed models over the periods to come."""
        return Outlook(self.laws, self.period.size, self.horizon)

    @cached_property
    def plan(self) -> RetrainingPlan:
        """The plan of least expected total cost at the price."""
        return best_plan(self.outlook, self.price, self.period.noun)
