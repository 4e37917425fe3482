"""When to retrain, given the price of a training.

The chosen plan has the least expected total cost over the periods to come: the extra loss of the
deployed models plus the price of all trainings.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from scipy.special import ndtr, stdtrit

from alma.report.advice.law import Array, Change, Law
from alma.report.advice.staleness import Laws
from alma.report.losses import MeanOverSeeds

_MOST_STARTS = 40  # most values of the first training, and of the cadence, that are tried
_SURPRISE = 4.0  # standard errors above the usual loss at which a deployed model counts as stale
_USUAL_LOSSES = 4  # fewest losses from which their usual variation is estimated
NEVER = "never"
"""The name of the plan without trainings in `RetrainingPlan.savings`."""


class RetrainingPlan(NamedTuple):
    """The plan of least expected total cost at a price."""

    first: int | None
    """Periods from now to the next training; None: none."""
    every: int
    """Cadence from then on, in periods."""
    trainings: int
    total: float
    """Expected cost, in units of loss summed over the periods to come."""
    savings: dict[str, MeanOverSeeds]
    """By the name of another plan: its total cost minus that of this plan."""
    flips: tuple[float, float]
    """Lowest and highest price at which the best plan has this number of trainings."""

    @property
    def undecided(self) -> list[str]:
        """The other plans that may cost less: the interval of the saving holds zero."""
        return [name for name, saving in self.savings.items() if not saving.low > 0]

    @property
    def evident(self) -> bool:
        """Whether there is evidence for or against retraining at all.

        A plan with trainings must save against never, and never against retraining every period.
        """
        if self.first is None:
            return not self.undecided
        return NEVER not in self.undecided


class Outlook:
    """Forecast of the extra loss of deployed models over the periods to come, by fitted laws."""

    def __init__(self, laws: Laws, size: float, horizon: int):
        """`size`: length of a period on the axis of the losses; `horizon`: number of periods."""
        self.laws = laws
        self.size = size
        self.horizon = horizon

    def totals(self, ages: Any, law: Law) -> Array:
        """The extra loss of plans, (plans,), summed over the periods to come.

        `ages` (plans, periods to come) are integers: how many periods ago the model that is
        deployed in this period was trained; 0 if it is still the present model.
        """
        span = self.size * np.arange(1, self.horizon + 1)
        newest_test = self.laws.losses.periods[-1]
        newest_model = self.laws.losses.until[-1]
        now = max(newest_test, newest_model)  # a model may be newer than all tests
        ahead = span + now - newest_test
        present = law.extra(span + now - newest_model, ahead) + self.excess
        present = np.clip(present, *self.laws.limits)
        retrained = self.laws.extra(law, span[:, None], ahead)  # (age, period to come)
        by_age = np.vstack([present, retrained])
        return np.asarray(by_age[ages, np.arange(self.horizon)].sum(1))

    @cached_property
    def hopeful(self) -> Law:
        """The law by which plans are chosen: the fitted one with a coefficient b >= 0.

        The estimate of b, what age adds, is uncertain and may be negative. Its replacement is
        E[max(b, 0)] * P(b > 0), with b normal around the estimate: near the estimate if drift is
        clear, small but positive if it is merely likely.
        """
        law = self.laws.whole
        age = max(self.size, self.size * (self.horizon // 2) - law.grace)
        mean, _, high = self.laws.estimate(lambda law: law.b * age**law.c)
        error = max((high - mean) / float(stdtrit(self.laws.freedom, 0.95)), 1e-12)
        above_0 = ndtr(mean / error)
        bell = math.exp(-((mean / error) ** 2) / 2)
        hoped = mean * above_0 + error * bell / math.sqrt(2 * math.pi)
        return law._replace(b=float(hoped * above_0) / age**law.c)

    @cached_property
    def excess(self) -> float:
        """By how much the present model's last losses exceed the usual loss of deployed models.

        The part that the law explains by age is subtracted. 0 unless the excess is above _SURPRISE
        standard errors: ordinary variation is no reason to retrain.
        """
        if not self.has_usual_losses:
            return 0.0
        before, since = self._served
        rises = []
        for start in range(len(since)):
            rise = float(since[start:].mean() - before.mean())
            rises.append((rise, math.sqrt(len(since) - start)))
        rise, root = max(rises, key=lambda candidate: candidate[0] * candidate[1])
        return rise if rise * root > _SURPRISE * before.std(ddof=1) else 0.0

    @property
    def has_usual_losses(self) -> bool:
        """Whether the present model's losses can be compared with those of earlier models."""
        before, since = self._served
        return len(since) > 0 and len(before) >= _USUAL_LOSSES

    @cached_property
    def _served(self) -> tuple[Array, Array]:
        """Losses of the model deployed in each past period, minus the extra loss by the law.

        Returns those of earlier models, then those of the present model.
        """
        until = self.laws.until
        periods = np.array(self.laws.losses.periods)
        ages = self.laws.ages
        if isinstance(self.laws.event, Change):  # drift at the old rate is not part of the law
            ages = self.laws.axes.counted_ages(self.laws.event)
        before: list[float] = []
        since: list[float] = []
        for j in np.flatnonzero(periods > until[0]):
            i = int((until < periods[j]).sum()) - 1  # the newest model before the period
            loss = self.laws.values[i, j] - float(self.laws.whole.extra(ages[i, j]))
            if not np.isfinite(loss):
                continue
            if i == len(until) - 1:
                since.append(loss)
            else:
                before.append(loss)
        return np.array(before), np.array(since)


@dataclass(frozen=True)
class Plans:
    """The plans to choose from: a first training, then one every k periods."""

    rhythms: list[tuple[int, int]]
    """Of each plan: periods from now to the first training, and between trainings."""
    ages: Any
    """Ages of the deployed models, integers (plans, periods to come), see `Outlook.totals`."""
    trainings: Any
    """Number of trainings of each plan, integers (plans,)."""


@dataclass(frozen=True)
class PricedPlans:
    """Plans with their costs at a given price of a training."""

    plans: Plans
    price: float
    losses: Array
    """Extra loss (plans,) over the periods to come."""

    @cached_property
    def totals(self) -> Array:
        """Total costs, (plans,): extra loss plus the price of all trainings."""
        return self.losses + self.price * self.plans.trainings


def best_plan(outlook: Outlook, price: float, noun: str = "period") -> RetrainingPlan:
    """The plan of least expected total cost at a price of a training.

    `price` is in units of loss summed over periods, `noun` names a period.
    """
    plans = enumerate_plans(outlook.horizon)
    priced = PricedPlans(plans, price, outlook.totals(plans.ages, outlook.hopeful))
    best = cheapest(priced)
    trainings = int(plans.trainings[best])
    first, every = plans.rhythms[best]
    return RetrainingPlan(
        first if trainings else None,
        every,
        trainings,
        float(priced.totals[best]),
        savings_of(outlook, priced, best, noun),
        price_limits(priced, trainings),
    )


def enumerate_plans(horizon: int) -> Plans:
    """Plans for `horizon` periods to come, the first of them without any training."""
    never = (horizon, 1)
    periods = np.unique(np.round(np.geomspace(1, horizon, _MOST_STARTS)).astype(int)).tolist()
    rhythms = [never]
    for period in periods:
        rhythms += [(period - 1, every) for every in periods]
    first = np.array([rhythm[0] for rhythm in rhythms])[:, None]
    every = np.array([rhythm[1] for rhythm in rhythms])[:, None]
    span = np.arange(1, horizon + 1)
    ages = np.where(span > first, (span - first - 1) % every + 1, 0)
    return Plans(rhythms, ages, (ages == 1).sum(1))


def cheapest(priced: PricedPlans) -> int:
    """The index of the plan of least total cost.

    Of equal ones that of the fewest trainings, and then of the latest first one: asked again a
    period later, with nothing new known, it is the same plan.
    """
    totals = priced.totals.round(9).tolist()
    trainings = priced.plans.trainings.tolist()
    firsts = [first for first, _ in priced.plans.rhythms]
    return min(range(len(totals)), key=lambda i: (totals[i], trainings[i], -firsts[i]))


def savings_of(
    outlook: Outlook,
    priced: PricedPlans,
    best: int,
    noun: str,
) -> dict[str, MeanOverSeeds]:
    """How much more two other plans cost than the best one, with 90% intervals.

    The two are retraining every period and never retraining. Means are by `Outlook.hopeful`, by
    which the plan was chosen; the widths of the intervals are by the fitted laws.
    """
    losses = outlook.laws.losses
    trained_now = int(losses.until[-1] >= losses.periods[-1])
    alternatives = {
        f"retraining every {noun}": priced.plans.rhythms.index((trained_now, 1)),
        NEVER: 0,
    }
    savings = {}
    for name, index in alternatives.items():
        if index != best:
            estimate = outlook.laws.estimate(saving_by_law(outlook, priced, index, best))
            shift = float(priced.totals[index] - priced.totals[best]) - estimate.mean
            saving = MeanOverSeeds(*(end + shift for end in estimate))
            savings[name] = saving.within(*saving_limits(outlook, priced, index, best))
    return savings


def saving_limits(
    outlook: Outlook, priced: PricedPlans, index: int, best: int
) -> tuple[float, float]:
    """The least and the most that the plan `best` can save against the plan `index`."""
    least, most = outlook.laws.limits
    widest = (most - least) * outlook.horizon
    trainings = priced.plans.trainings
    further = priced.price * float(trainings[index] - trainings[best])
    return further - widest, further + widest


def saving_by_law(
    outlook: Outlook,
    priced: PricedPlans,
    index: int,
    best: int,
) -> Callable[[Law], float]:
    """A function of a law: how much more the plan `index` costs than the plan `best`."""
    plans = priced.plans
    further_trainings = plans.trainings[index] - plans.trainings[best]

    def saving(law: Law) -> float:
        losses = outlook.totals(plans.ages[[index, best]], law)
        return float(losses[0] - losses[1] + priced.price * further_trainings)

    return saving


def price_limits(priced: PricedPlans, trainings: int) -> tuple[float, float]:
    """Lowest and highest price at which a plan with this number of trainings is the best."""
    counts = priced.plans.trainings
    least = {n: priced.losses[counts == n].min() for n in np.unique(counts).tolist()}
    lowest = 0.0
    highest = math.inf
    for count, loss in least.items():
        if count == trainings:
            continue
        price = float((loss - least[trainings]) / (trainings - count))
        if count > trainings:
            lowest = max(lowest, price)
        else:
            highest = min(highest, price)
    return lowest, highest
