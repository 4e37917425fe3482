"""How often to retrain on a stream that drifts: the loss that each cadence costs, and what is known of it."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from alma.report.advice.decisions import NO_EVIDENCE
from alma.report.advice.forecast import Array, interval
from alma.report.advice.staleness import StalenessFit, effect_of_age
from alma.report.advice.text import DocumentPart, expected, number
from alma.report.age import Losses, MeanOverSeeds
from alma.report.results import rounded
from alma.report.tables import Table

QUESTION = "how often to retrain?"
_EVERY = (1, 2, 4, 8)
NOTE = """\
Extra loss: above a model trained until the period that is served, mean over the periods up to the next \
training; it includes what less training costs. Naive rules: "as last time" takes the extra losses on the \
last period, interpolated in age; "no staleness" expects none, so that the rarest training is the best."""


class Cadence(NamedTuple):
    """A training every so many periods."""

    every: int
    extra: Array  # draws of the mean extra loss of the models that serve, (DRAWS,)
    last_time: float  # the same by the extra losses on the last period; NaN if there are none
    compute: float | None  # TFLOPs up to the end of the stream; None: unknown

    @property
    def middle(self) -> float:
        """The median of the extra loss: over two seeds, draws have no mean."""
        return float(np.median(self.extra))

    @property
    def name(self) -> str:
        """Such as "every 2nd period"."""
        if self.every == 1:
            return "every period"
        return f"every {self.every}{'nd' if self.every == 2 else 'th'} period"


class Compute(NamedTuple):
    """Training compute in TFLOPs, from which that of a cadence follows."""

    spent: float
    training: float  # of the last stage
    periods: int  # to come

    def of(self, every: int) -> float:
        """Up to the end of the forecast."""
        return self.spent + self.training * self.periods / every


class Retraining(NamedTuple):
    """The answer for one configuration, or for one model of a matrix from elsewhere."""

    label: str
    unit: str  # of losses; "": that of the file
    period: str  # what a period is
    drift: MeanOverSeeds  # effect of age, for a period
    cadences: list[Cadence]  # within the budget, the most frequent one first
    law: tuple[float, float]  # exponent, probability

    @property
    def drifts(self) -> bool:
        """Whether nothing speaks against a drift: the interval of the effect of age, if known, is above 0."""
        return not self.drift.low <= 0

    def against_first(self, cadence: Cadence) -> tuple[float, float, float]:
        """Extra loss less that of the most frequent cadence, with its 90% interval."""
        draws = cadence.extra - self.cadences[0].extra
        low, high = interval(draws)
        return float(np.median(draws)), float(low), float(high)

    @property
    def advice(self) -> str:
        """The better of the two most frequent cadences, or that there is no evidence."""
        if len(self.cadences) < 2 or not self.drifts:
            return NO_EVIDENCE
        _, low, high = self.against_first(self.cadences[1])
        return NO_EVIDENCE if low <= 0 <= high else self.cadences[0 if low > 0 else 1].name

    @property
    def lines(self) -> list[str]:
        """The answer in sentences."""
        mean, low, high = self.drift
        shown = f"{number(mean)} [{number(low)}, {number(high)}]" if low <= high else f"{number(mean)} [?]"
        found = "the stream drifts" if low > 0 else "no evidence that the stream drifts"
        if math.isnan(mean):
            effect = "Effect of age: unknown without losses on periods before a model was trained."
        else:
            shown += self.unit and f" {self.unit}"
            effect = f"Effect of age, amount of training taken out: {shown} a period: {found}."
        exponent, probability = self.law
        law = f"The law of extra loss is age^{exponent:g} ({probability:.0%}). A period is {self.period}."
        return [f"{self.answer}.", effect, law]

    @property
    def answer(self) -> str:
        """The advice, and what it gains."""
        if self.advice == NO_EVIDENCE:
            return NO_EVIDENCE.capitalize()
        first, second = self.cadences[:2]
        mean, low, high = self.against_first(second)
        better, other = (first, second) if low > 0 else (second, first)
        least, most = sorted(map(abs, (low, high)))
        gain = f"the loss is {abs(mean):.3g} [{least:.3g}, {most:.3g}] lower than {other.name}"
        return f"{better.name.capitalize()}: {gain}"

    @property
    def parts(self) -> list[DocumentPart]:
        """The document."""
        return [DocumentPart(f"{QUESTION.capitalize()} {self.label}", self.lines, self._table(), [NOTE])]

    def _table(self) -> Table:
        first = self.cadences[0]
        extra = f"extra loss{self.unit and f' ({self.unit})'}, 90%"
        header = ["training", extra, "as last time", f"against {first.name}, 90%"]
        table = [[*header, "trainings", *(["Comp (TFLOPs)"] if first.compute is not None else [])]]
        for each in self.cadences:
            last = "" if math.isnan(each.last_time) else number(each.last_time)
            mean, low, high = self.against_first(each)
            against = f"{mean:+.3g} [{low:+.3g}, {high:+.3g}]" if each is not first else ""
            compute = [f"{each.compute:.3g}"] if each.compute is not None else []
            share = f"{first.every / each.every:.3g}x"
            table.append([each.name, expected(each.extra, each.middle), last, against, share, *compute])
        return table

    def record(self) -> dict[str, Any]:
        """For JSON: losses in nats a token, errors in percent."""
        return {
            "label": self.label,
            "question": QUESTION,
            "advice": self.advice,
            "evidence": self.advice != NO_EVIDENCE,
            "unit": self.unit,
            "period": self.period,
            "effect_of_age": [rounded(value) for value in self.drift],
            "law": {"exponent": self.law[0], "probability": rounded(self.law[1])},
            "cadences": [
                {
                    "every": each.every,
                    "extra": rounded(each.middle),
                    "interval": [rounded(value) for value in interval(each.extra)],
                    "as_last_time": rounded(each.last_time),
                    "against_first": [rounded(value) for value in self.against_first(each)],
                    "compute": rounded(each.compute),
                }
                for each in self.cadences
            ],
        }


def retraining(
    losses: Losses, unit: str, period: str, compute: Compute | None = None, budget: float | None = None
) -> Retraining:
    """How often to retrain, from `losses` in a `unit`; a `period` is described as "{:g} months".

    Cadences are as long as the oldest model at hand, and two at least; those above the budget (TFLOPs) are
    left out, but for the cheapest. UserError: too few models were tested on one period.
    """
    fit = StalenessFit(losses)
    oldest = max(losses.by_age) / fit.period
    every = [k for k in _EVERY if k <= max(2, oldest)]
    cost = {k: compute.of(k) if compute else None for k in every}
    within = [k for k in every if budget is None or (cost[k] or 0.0) <= 1.01 * budget] or every[-1:]
    cadences = []
    for k in within:
        ages = [fit.period * i for i in range(1, k + 1)]
        last_time = _on_the_last_period(losses, fit.mean, ages)
        cadences.append(Cadence(k, fit.extra(ages).mean(1), last_time, cost[k]))
    drift = MeanOverSeeds(*(fit.period * value for value in effect_of_age(losses)))
    return Retraining(losses.label, unit, period.format(fit.period), drift, cadences, fit.law)


def _on_the_last_period(losses: Losses, mean: Array, ages: Sequence[float]) -> float:
    """Mean extra loss at these ages on the last period that has a model of its own; NaN if none has."""
    for j in reversed(range(len(losses.periods))):
        period = losses.periods[j]
        known = {period - u: mean[i, j] for i, u in enumerate(losses.until) if u <= period}
        known = {a: float(loss) for a, loss in known.items() if np.isfinite(loss)}
        if 0 in known and len(known) > 1:
            at = sorted(known)
            return float(np.mean(np.interp(ages, at, [known[a] - known[0] for a in at])))
    return math.nan
