"""How often to retrain on a stream that drifts: what cadences cost and gain, and a plan at a price."""

import math
import re
from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
from scipy.special import ndtr, stdtrit

from alma.dates import number_in
from alma.report.advice.questions import NO_EVIDENCE
from alma.report.advice.staleness import SEASON, Array, Law, Laws
from alma.report.losses import Losses, MeanOverSeeds
from alma.report.results import rounded
from alma.report.tables import TitledTable
from alma.tables import number

QUESTION = "how often to retrain?"
_NAMES = {("month", 3): "every quarter", ("day", 7): "every week"}
_SURPRISE = 4.0  # deviations above the usual loss from which a deployed model counts as stale
_UNKNOWN = (
    "No answer: without losses on the periods before a model's training, drift and lack of training cannot "
    "be told apart. Test each model on its own period and earlier ones, too"
)
NOTE = """\
Extra loss: above a model trained until the period that is served, mean over ages up to the next training \
and the periods to come; it includes what less training costs. "As last time": by the extra losses on the \
last period. Gain: what the next rarer cadence loses more. A cadence pays, against each rarer one, if a \
training costs less than its price (as in --price). Costs are of trainings to come."""


class Calendar(NamedTuple):
    """How periods of one kind are named and counted."""

    label: str  # how a stream names one, as a pattern
    year: int = 1  # so many are a year
    cadences: tuple[int, ...] = (1, 2, 4, 8)  # to compare, if none are asked for


CALENDAR = {
    "day": Calendar(r"\d{4}-\d{2}-\d{2}", 365, (1, 7, 30, 365)),
    "week": Calendar(r"\d{4}-W\d{2}", 52, (1, 4, 13, 52)),
    "month": Calendar(r"\d{4}-\d{2}", 12, (1, 3, 6, 12)),
    "quarter": Calendar(r"\d{4}-Q\d", 4),
    "year": Calendar(r"\d{4}"),
}


class Period(NamedTuple):
    """The time between two occasions to retrain."""

    noun: str = "period"  # one of CALENDAR, "mega-batch"
    size: float = 1.0  # on the axis of the losses

    @classmethod
    def of(cls, labels: Sequence[str]) -> "Period":
        """By the labels of a stream's periods; a mega-batch if they are no dates, do not follow one another,
        or there are none. ValueError: there is no such date."""
        for noun, each in CALENDAR.items():
            if labels and all(re.fullmatch(each.label, label) for label in labels):
                numbers = [number_in(noun, label) for label in labels]
                return cls(noun if set(np.diff(numbers)) <= {1} else "mega-batch")
        return cls("mega-batch")

    @property
    def calendar(self) -> Calendar:
        return CALENDAR.get(self.noun, Calendar(""))

    @property
    def year(self) -> float:
        """On the axis of the losses; inf: unknown, or no longer than a period."""
        return self.calendar.year * self.size if self.calendar.year > 1 else math.inf

    def every(self, k: int) -> str:
        """The name of a cadence."""
        if k == 1 or self.noun not in CALENDAR:
            return f"every {'' if k == 1 else {2: '2nd ', 3: '3rd '}.get(k, f'{k}th ')}{self.noun}"
        once = k == self.calendar.year
        return "once a year" if once else _NAMES.get((self.noun, k), f"every {self.span(k)}")

    def span(self, k: float) -> str:
        """Such as "3 months"."""
        return f"{number(k)} {self.noun if k == 1 else self.plural}"

    @property
    def plural(self) -> str:
        return f"{self.noun}es" if self.noun[-2:] == "ch" else f"{self.noun}s"


class TrainingCost(NamedTuple):
    """What one training costs; None: unknown."""

    flops: float | None = None  # TFLOPs
    hours: float | None = None
    machine: str = "GPU-hours"


class RetrainingPlan(NamedTuple):
    """The plan of least expected total cost at a price."""

    first: int | None  # periods from now to the next training; None: none
    every: int  # from then on
    trainings: int
    total: float  # expected, in units of loss summed over the periods to come
    savings: dict[str, MeanOverSeeds]  # loss and price that the other plan costs more
    flips: tuple[float, float]  # the prices between which the plan has as many trainings


class Retraining:
    """How often to retrain one configuration, or one model of a matrix from elsewhere."""

    def __init__(
        self,
        losses: Losses,
        unit: str,
        period: Period = Period(),  # noqa: B008
        cost: TrainingCost = TrainingCost(),  # noqa: B008
        every: Sequence[int] = (),
        worth: tuple[float, bool] = (1.0, True),
        price: float = math.nan,
        money: float = 0.0,
        rest: int = 0,
    ):
        """From `losses` in a `unit`. UserError: too few models were tested on one period.

        every  cadences in periods (none: those of CALENDAR, or 1, 2, 4, 8, up to the oldest age at hand)
        worth  a gain below it is a tie: in the unit, or (True) percent of perplexity or points of error
        price  of a training, in the unit summed over periods
        money  that one unit costs in one period (0: unknown): the plan is told in it
        rest   periods to come (0: a year of days or weeks, or 12)
        """
        self.losses, self.unit, self.period, self.cost = losses, unit, period, cost
        self.price, self.money = price, money
        self.rest = rest or max(12, period.calendar.year)
        self.laws = Laws(losses, period.year)
        self.effect = self.laws.effect_of_age()
        self.unknown = math.isnan(self.effect.mean)  # without losses on the past
        reached = sum(k <= max(losses.by_age) / period.size for k in period.calendar.cadences)
        self.cadences = sorted(set(every)) or list(period.calendar.cadences[: max(2, reached)])
        self.worth = math.log1p(worth[0] / 100) if worth[1] and unit.startswith("nats") else worth[0]
        self.other: Retraining | None = None  # the same but for `--from-scratch`

    def extra(self, every: int) -> MeanOverSeeds:
        """Mean extra loss at ages of 1 to `every` periods, on the periods to come."""
        return self.laws.estimate(lambda law: self._extra(every, law))

    def gain(self, every: int, rarer: int) -> MeanOverSeeds:
        """Loss that a rarer cadence has more."""
        return self.laws.estimate(lambda law: self._extra(rarer, law) - self._extra(every, law))

    def _extra(self, every: int, law: Law) -> float:
        ahead = self.period.size * np.arange(1, self.rest + 1)
        return float(np.mean(law.extra(self.period.size * np.arange(1, every + 1)[:, None], ahead)))

    def aged(self, age: int) -> MeanOverSeeds:
        """Largest extra loss at ages of 1 to `age` periods, without what less training costs."""
        return self.laws.estimate(lambda law: law.aged(self.period.size * np.arange(1, age + 1)).max())

    @property
    def slope(self) -> MeanOverSeeds:
        """Loss that b adds a period of age, up to the oldest age at hand."""
        oldest = max(self.losses.by_age)
        return self.laws.estimate(lambda law: law.b * oldest**law.c * self.period.size / oldest)

    @cached_property
    def drifts(self) -> bool:
        """Whether there is evidence that age adds loss, by the law and whatever training gains."""
        oldest = int(max(self.losses.by_age) / self.period.size)
        return self.aged(max(1, min(oldest, self.cadences[-1]))).low > 0 and self.effect.low > 0

    @cached_property
    def found(self) -> tuple[int, bool]:
        """The rarest cadence over which the most frequent one does not gain what it is worth; whether it may
        gain that."""
        most = self.cadences[0]
        gains = {k: self.gain(most, k) for k in reversed(self.cadences)}
        more = {k: self.drifts and gain.low > 0 and gain.mean >= self.worth for k, gain in gains.items()}
        chosen = next((k for k in gains if not more[k]), most)
        return chosen, chosen != most and not gains[chosen].high < self.worth

    @property
    def advice(self) -> str:
        """The cadence to use, or that there is no evidence."""
        if self.unknown or (self.found[1] and self.found[0] == self.cadences[-1]):
            return NO_EVIDENCE
        return self.period.every(self.found[0])

    @property
    def answer(self) -> str:
        """The advice in a sentence: what it gains and costs, how sure it is."""
        if self.unknown:
            return _UNKNOWN
        if not math.isnan(self.price):
            return self._of_plan
        (chosen, maybe), rarest = self.found, self.cadences[-1]
        name, rare, costs = self.period.every(chosen), self.period.every(rarest), self._costs(chosen)
        if chosen != rarest:
            gain = self._points(self.gain(chosen, rarest))
            more = "; whether more often is worth it is open" * maybe
            return f"{name.capitalize()}, {costs}: {gain} better than {rare}{more}"
        if maybe:
            alone = self.gain(self.cadences[0], rarest).low > 0 and not self.drifts
            more = ". More training gains, whether age matters or not" * alone
            cheaper = f"until more models are tested, {name} is cheaper, {costs}"
            return f"{NO_EVIDENCE.capitalize()}: {cheaper}{more}"
        most = self._percent(max(0.0, self.gain(self.cadences[0], rarest).high))
        limit = f"more often gains {most} at most, and {self._percent(self.worth)} would be worth it"
        return f"{name.capitalize()} is enough, {costs}: {limit}"

    def _costs(self, every: int) -> str:
        """Of the trainings to come, such as "12 trainings a year, 3 GPU-hours"."""
        dated = self.period.noun in CALENDAR
        count = (self.period.calendar.year if dated else self.rest) / every
        span = "a year" if dated else f"in {self.period.span(self.rest)}"
        costs = [(self.cost.flops, "TFLOPs"), (self.cost.hours, self.cost.machine)]
        paid = [f"{number(count * each)} {name}" for each, name in costs if each]
        return ", ".join([f"{count:.3g} training{'s' * (count != 1)} {span}", *paid])

    def _percent(self, loss: float) -> str:
        """A loss for readers who know no nats: percent of perplexity, or points of error."""
        if not self.unit.startswith("nats"):
            return f"{number(loss)} points"
        percent = 100 * math.expm1(min(loss, 9.0))
        more = "over " * (loss > 9)
        return f"{percent:.2g}%" if abs(percent) < 99.5 else f"{more}{percent:,.0f}%"

    def _points(self, loss: MeanOverSeeds) -> str:
        """In percent or points with the interval, such as "4.1% [3%, 5.2%]"."""
        mean, *ends = map(self._percent, loss)
        shown = ", ".join(end.removesuffix(" points") for end in ends)
        return f"{mean} [{shown if loss.low <= loss.high else '?'}]"

    @property
    def lines(self) -> list[str]:
        """The answer, the loss of old models, a break or a season if there is one, and what this rests on."""
        if self.unknown:
            return [f"{self.answer}."]
        size, span = self.period.size, self.period.span
        at = dict.fromkeys([self.cadences[0], *(k for k in self.cadences if k == 3), self.cadences[-1]])
        olds = {k: self.laws.estimate(partial(Law.extra, ages=k * size, ahead=size)) for k in at}
        worse = ", one ".join(f"{span(k)} old is {self._points(each)} worse" for k, each in olds.items())
        ages, slope = [age / size for age in self.losses.by_age if age > 0], self.slope
        rises = f"Loss rises by {slope.text()} {self.unit} a {self.period.noun} of age on average"
        drift = "the stream drifts" if self.drifts else "no evidence that the stream drifts"
        drift += ", though not along this line" * (self.drifts and slope.low <= 0)
        lines = [
            f"{self.answer}.",
            f"A model {worse} than a new one.{' Percent: of perplexity.' * self.unit.startswith('nats')}",
            f"{rises}, amount of training taken out: {drift}. Ages from {span(min(ages))} to "
            f"{span(max(ages))} were measured; others follow the law age^{self.laws.whole.c:g}.",
        ]
        if self.laws.event == SEASON:
            wave = self._points(self.laws.estimate(lambda law: law.s))
            event = f"The stream has a season: a model half a year old is {wave} worse for that alone, "
            lines.insert(2, f"{event}one a year old not at all.")
        elif self.laws.event:
            when = span((self.losses.periods[-1] - self.laws.event) / size)
            lines.insert(2, f"The stream broke {when} before the last period; no other break is expected.")
        return lines

    @property
    def parts(self) -> list[TitledTable]:
        """The document."""
        header = ["training", f"extra loss ({self.unit}), 90%", "as last time", "gain, 90%"]
        table = [[*header, "pays below a price of", "cost of trainings to come"]]
        for i, k in enumerate(self.cadences):
            last, gains, rarer = self._last_time(k), ["", ""], self.cadences[i + 1 :]
            if rarer:
                pays = min(self.gain(k, r).mean / (1 / k - 1 / r) for r in rarer)
                gains = [self.gain(k, rarer[0]).text(), number((self.money or 1) * max(0.0, pays))]
            cells = [self.extra(k).text(), "" if math.isnan(last) else number(last), *gains]
            table.append([self.period.every(k), *cells, self._costs(k)])
        if self.unknown:  # neither extra losses nor gains
            table = [[row[0], row[2], row[5]] for row in table]
        return [TitledTable(f"{QUESTION.capitalize()} {self.losses.label}", table, NOTE, self.lines)]

    def _last_time(self, every: int) -> float:
        """Mean extra loss at ages of 1 to `every` periods on the last period that has a model of its own; NaN
        if none has, or if no model on it is so old."""
        values, ages = self.laws.values, self.laws.ages
        for j in reversed(range(len(self.losses.periods))):
            known = {a: v for a, v in zip(ages[:, j], values[:, j], strict=True) if a >= 0 and np.isfinite(v)}
            if 0 in known and len(known) > 1:
                at, wanted = sorted(known), self.period.size * np.arange(1, every + 1)
                return float(np.interp(wanted, at, [known[a] - known[0] for a in at], right=math.nan).mean())
        return math.nan

    @cached_property
    def plan(self) -> RetrainingPlan:
        """The plan of least expected total cost over the periods to come: a first training in 0, 1, ...
        periods, or none, and then one every so many periods."""
        span = np.arange(1, self.rest + 1)
        some = np.unique(np.round(np.geomspace(1, self.rest, 40)).astype(int)).tolist()
        plans = [(self.rest, 1), *((j - 1, k) for j in some for k in some)]
        starts, steps = np.array(plans).T[:, :, None]
        ages = np.where(span > starts, (span - starts - 1) % steps + 1, 0)  # 0: the present model
        count = (ages == 1).sum(1)
        loss = self._totals(ages, self._hopeful)
        total = loss + self.price * count
        best = min(range(len(plans)), key=lambda i: (round(total[i], 9), count[i]))

        def saving(other: int, law: Law) -> float:
            more = self._totals(ages[[other, best]], law)
            return float(more[0] - more[1] + self.price * (count[other] - count[best]))

        fresh = self.losses.until[-1] >= self.losses.periods[-1]
        others = {f"retraining every {self.period.noun}": plans.index((int(fresh), 1)), "never": 0}
        savings: dict[str, MeanOverSeeds] = {}
        for name, other in others.items():
            plain = self.laws.estimate(partial(saving, other))  # its width, around what the plan expects
            more = float(total[other] - total[best]) - plain.mean
            savings |= {name: MeanOverSeeds(*(each + more for each in plain))} if other != best else {}
        own = int(count[best])
        least = {n: loss[count == n].min() for n in np.unique(count).tolist()}
        prices = {n: float((least[n] - least[own]) / (own - n)) for n in least if n != own}
        low = max([0.0, *(price for n, price in prices.items() if n > own)])
        high = min((price for n, price in prices.items() if n < own), default=math.inf)
        first, every = plans[best]
        return RetrainingPlan(first if own else None, every, own, float(total[best]), savings, (low, high))

    def _totals(self, ages: Any, law: Law) -> Array:
        """Extra loss summed over the periods to come, of plans (plans, periods) of ages."""
        span = self.period.size * np.arange(1, self.rest + 1)
        age = max(0.0, self.losses.periods[-1] - self.losses.until[-1])
        old = law.extra(span + age, span) + self._excess
        new = law.extra(span[:, None], span)
        return np.asarray(np.vstack([old, new])[ages, np.arange(self.rest)].sum(1))

    @cached_property
    def _hopeful(self) -> Law:
        """The law with the mean of b by its error, where below 0 counts as 0, times the probability that b is
        above 0: a likely drift favours retraining."""
        law, age = self.laws.whole, self.period.size * max(1, self.rest // 2)
        mean, _, high = self.laws.estimate(lambda law: law.b * age**law.c)
        error = max((high - mean) / float(stdtrit(len(self.losses.until) - 1, 0.95)), 1e-12)
        above = ndtr(mean / error)
        hoped = mean * above + error * math.exp(-((mean / error) ** 2) / 2) / math.sqrt(2 * math.pi)
        return law._replace(b=float(hoped * above) / age**law.c)

    @cached_property
    def _excess(self) -> float:
        """How far the last losses of the present model are above the usual level of those that served, age
        taken out, if by more than _SURPRISE deviations: ordinary variation is no reason to retrain."""
        periods, until, served = np.array(self.losses.periods), self.laws.until, []
        for j in np.flatnonzero(periods > until[0]):
            i = int((until < periods[j]).sum()) - 1
            loss = self.laws.values[i, j] - float(self.laws.whole.extra(periods[j] - until[i]))
            served += [(i == len(until) - 1, loss)] if np.isfinite(loss) else []
        own = sum(newest for newest, _ in served)
        before, since = np.split(np.array([loss for _, loss in served]), [len(served) - own])
        if not own or len(before) < 4:
            return 0.0
        rises = [(float(since[i:].mean() - before.mean()), math.sqrt(own - i)) for i in range(own)]
        rise, root = max(rises, key=lambda each: each[0] * each[1])
        return rise if rise * root > _SURPRISE * before.std(ddof=1) else 0.0

    @property
    def _of_plan(self) -> str:
        """The plan in a sentence."""
        plan, one = self.plan, self.money or 1.0
        low, high = (one * price for price in plan.flips)
        when = "Do not retrain"
        if plan.first is not None:
            when = f"Retrain in {self.period.span(plan.first)}" if plan.first else "Retrain now"
            when += f", then {self.period.every(plan.every)}" if plan.trainings > 1 else ", then not again"
            when += f", since the last losses are {number(self._excess)} above the usual" * (self._excess > 0)
        saved = " and ".join(f"{each.text(one)} against {name}" for name, each in plan.savings.items())
        unit = "the money of --price" if self.money else f"{self.unit} summed over periods"
        ends = f"from {number(low)} to {number(high)}" if high < math.inf else f"above {number(low)}"
        saves = f": it saves {saved}, in {unit}" if saved else ""
        text = f"{when} ({plan.trainings} in {self.period.span(self.rest)}){saves}. So for prices {ends}"
        other = self.other
        if not other or other.laws.values.shape != self.laws.values.shape or other.unknown:
            return text
        gap = (other.laws.values - self.laws.values)[self.laws.ages == 0]
        more = other.plan.total + self.rest * float(gap[np.isfinite(gap)].mean()) - plan.total
        verdict = "keep to this one" if more > 0 else "take that one"
        return f"{text}. {other.losses.label} costs {number(one * more)} more in all: {verdict}"

    def record(self) -> dict[str, Any]:
        """For JSON: losses in nats a token, errors in percent."""
        cadences = [
            {"every": k, "extra": self.extra(k), "as_last_time": self._last_time(k), "cost": self._costs(k)}
            for k in self.cadences
        ]
        found = {
            "label": self.losses.label,
            "answer": self.answer,
            "advice": self.advice,
            "unit": self.unit,
            "period": self.period,
            "slope": None if self.unknown else self.slope,
            "drifts": self.drifts,
            "law": self.laws.whole,
            "cadences": cadences,
            "plan": None if self.unknown or math.isnan(self.price) else self.plan,
        }
        return dict(rounded(found))
