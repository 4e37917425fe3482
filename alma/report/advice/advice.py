"""The advice of one mega-batch: the choice, what each decision is worth, the front, how often to retrain."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from alma.errors import UserError
from alma.report.advice.backtest import naive_rule_won
from alma.report.advice.cadence import Period, Retraining, TrainingCost
from alma.report.advice.candidates import Candidate, choose, find_candidates, within
from alma.report.advice.comparison import Comparison, Field, compare
from alma.report.advice.questions import QUESTIONS
from alma.report.advice.staleness import known_at
from alma.report.age import losses_of
from alma.report.age_table import unit
from alma.report.losses import MeanOverSeeds
from alma.report.results import Display, Section, left_out, matrix, non_dominated, rounded
from alma.report.tables import TitledTable
from alma.tables import Table, number

_MOST_LABELS = 2  # of a remark
_SHORT_WAIT, _SHORT_RUN = 10, 20  # w and t of the run that tells: `python -m benchmarks waiting_rule`
NOTE = (
    "Difference: the other configuration less the choice; positive values are worse. Intervals are so "
    "wide that equal configurations show any evidence in a tenth of reports. The two answer the other "
    "questions alike; further settings may differ. Seeds: so many a side would settle it, if the difference "
    "stays."
)
FRONT = "Configurations that no other one beats in both the expected measure and training compute to come."
_DRIFTS = 'Forecasts assume an i.i.d. stream. If only new data count, go by "regret, next" of alma report.'
FEW = "How often to retrain takes three models, each tested on the mega-batches after it."


class Advice(NamedTuple):
    """Forecasts of a stream's candidates, and the decisions based on them."""

    title: str
    budget: float | None  # TFLOPs of training to come
    found: list[Candidate]
    choice: Candidate | None  # None: nothing stays within the budget
    comparisons: list[Comparison]
    remarks: list[str]  # what weakens the advice
    retraining: Retraining | None  # how often to train the choice; None: no evaluation matrix, or a small one

    @property
    def display(self) -> Display:
        return self.found[0].result.display

    @property
    def measured(self) -> str:
        """What is forecast, such as "mean error (%) over t=21..100"."""
        first, last = self.found[0].start + 1, self.found[0].until
        return f"mean {self.display.name} " + (f"over t={first}..{last}" if first < last else f"at t={last}")

    def difference(self, each: Comparison) -> MeanOverSeeds:
        """A difference and its interval: in percentage points, or in percent of the choice's perplexity."""
        scale = 100 / each.choice.expected if self.display.factor == 1 else self.display.factor
        return MeanOverSeeds(*(scale * value for value in (each.difference, each.low, each.high)))

    @property
    def parts(self) -> list[TitledTable]:
        """The document."""
        first, limit = self.found[0], self.budget
        read = f"Rows up to t={first.start} of {len(self.found)} configurations; forecast to t={first.until}"
        read += "." if limit is None else f" within {limit:.3g} TFLOPs of training to come."
        above = [read] if self.choice else [read, self.summary]
        found = [TitledTable(f"Advice: {self.title}", [], above=above)]
        if self.choice:
            lines = [self.summary] + [f"Command: {self.choice.command}"] * bool(self.choice.command)
            decisions = decision_table(self) if self.comparisons else []
            below = [NOTE] * bool(self.comparisons)
            answered = {each.question for each in self.comparisons}
            if rest := " ".join(question for question in QUESTIONS if question not in answered):
                below += [f"No run within the budget differs from the choice in this question alone: {rest}"]
            found.append(TitledTable(f"Choice by {self.measured}", decisions, "\n".join(below), lines))
        found += self.retraining.parts if self.retraining else []
        return [*found, TitledTable("Front", front_table(self), "\n".join(self.remarks), [FRONT])]

    @property
    def summary(self) -> str:
        """The choice in a sentence, or that there is none."""
        if not self.choice:
            least = min(each.compute for each in self.found)
            return f"No configuration stays within the budget: the least is {least:.3g} TFLOPs to come."
        value = self.choice.forecast.text(self.display.factor)
        return f"Use {self.choice.label}: lowest expected {self.measured}, {value}."

    def record(self) -> dict[str, Any]:
        """For JSON. Values of the metric are unscaled: errors are fractions."""
        decisions = [
            each._asdict()
            | {"advice": each.advice, "evidence": each.evidence}
            | {"choice": each.choice.label, "other": each.other.label}
            for each in self.comparisons
        ]
        configurations = [
            {"label": each.label, "command": each.command, "seeds": len(each.seeds), "from": each.now}
            | {"expected": each.forecast, "compute": each.compute, "hours": each.hours, "law": each.fit.law}
            for each in self.found
        ]
        found = {
            "from": self.found[0].start,
            "until": self.found[0].until,
            "measure": self.measured,
            "budget": self.budget,
            "choice": self.choice.label if self.choice else None,
            "decisions": decisions,
            "configurations": configurations,
            "retraining": self.retraining.record() if self.retraining else None,
            "remarks": self.remarks,
        }
        return dict(rounded(found))


def advise(section: Section, now: int | None = None, budget: float | None = None, **asked: Any) -> Advice:
    """The advice of mega-batch `now` (None: the last one), from rows up to there, within a `budget` of
    training compute to come (TFLOPs). `asked`: `every`, `worth` and `price` of `Retraining`.

    UserError: no stage is complete by then, or the stream has no such mega-batch.
    """
    found = find_candidates(section, now)
    allowed = within(found, budget)
    choice = choose(allowed) if allowed else None
    comparisons = compare(Field(found), choice, allowed) if choice else []
    often = _retraining(choice, asked) if choice else None
    if choice and often:
        same = {"from_scratch": None, "seed": None}  # a twin differs in `--from-scratch` alone
        config = choice.result.config | same
        twins = [each for each in found if each is not choice and each.result.config | same == config]
        if twins and (other := _retraining(twins[0], asked)):
            other.price *= (other.cost.flops or 1) / (often.cost.flops or 1)
            often.other = other
    remarks = left_out(section.results)  # what weakens the advice
    ready = {each.label for each in found}
    waiting = [result.label for result in section.results if result.label not in ready]
    remarks += [f"No complete stage yet, left out: {_some(waiting)}."] if waiting else []
    remarks += naive_rule_won(section, found[0].start)
    single = [each for each in comparisons if min(len(each.choice.seeds), len(each.other.seeds)) < 2]
    if single:
        many = max(each.seeds or 3 for each in single)
        remarks.append(
            f"One seed says nothing about how far runs differ, so there is no evidence: run {many} "
            f"seeds of {_some([each.other.label for each in single])} and of the choice."
        )
    if any(matrix(rows) for result in section.results for rows in result.repeats):
        remarks.append(f"{_DRIFTS} {FEW}" if choice and not often else _DRIFTS)
    few = [each.label for each in found if len(each.ends) < 3]
    remarks += [f"Fewer than 3 stages, so that the law is mostly assumed: {_some(few)}."] if few else []
    until, end = _SHORT_RUN, section.results[0].megabatches
    if choice and until < end and all(each.result.waiting_time == 1 for each in found):
        spent = fmean(choice.result.repeats[0][t]["train_flops"] for t in range(1, choice.now + 1))
        remarks.append(
            "Runs at w = 1 cannot tell whether to wait. The cheapest run that would: "
            f"w = {_SHORT_WAIT} up to {until}, about {until / end:.0%} of the stream's compute "
            f"({spent * until / 1e12:.2g} TFLOPs)."
        )
    return Advice(section.title, budget, found, choice, comparisons, remarks, often)


def _retraining(choice: Candidate, asked: dict[str, Any]) -> Retraining | None:
    """How often to retrain the choice, from the held-out parts up to the last t that was read."""
    losses, last = losses_of(choice.result), choice.ends[-1]
    if not losses:
        return None
    rows, info = [repeat[last] for repeat in choice.result.repeats], choice.result.runs[0].info
    hours = fmean(row["seconds"] for row in rows) / 3600 * (info.get("gpus") or info.get("processes") or 1)
    machine = "GPU-hours" if info.get("gpus") else "core-hours"
    cost = TrainingCost(fmean(row["train_flops"] for row in rows) / 1e12, hours, machine)
    period = Period.of(rows[0]["extra"].get("matrix_periods", []))
    rest = choice.result.megabatches - choice.now
    try:
        return Retraining(known_at(losses, choice.now), unit(choice.result), period, cost, rest=rest, **asked)
    except UserError:  # too few models
        return None


def _some(labels: Sequence[str]) -> str:
    """The first labels, and how many there are more."""
    more = len(labels) - _MOST_LABELS
    return "; ".join(labels[:_MOST_LABELS]) + f" and {more} more" * (more > 0)


def decision_table(advice: Advice) -> Table:
    """A row for each answered question."""
    what = "percentage points" if advice.display.factor > 1 else "% of perplexity"
    header = ["question", "advice", "compared with", f"difference ({what}), 90%", "its Comp to come"]
    table = [[*header, "seeds"]]
    for each in advice.comparisons:
        mean, low, high = advice.difference(each)
        shown = f"{mean:+.3g} " + (f"[{low:+.3g}, {high:+.3g}]" if np.isfinite(high) else "[?]")
        cost = f"{each.other.compute / each.choice.compute:.3g}x" if each.choice.compute else "?"
        seeds = str(each.seeds or ("" if each.evidence else "?"))
        table.append([each.question, each.advice, each.other.label, shown, cost, seeds])
    return table


def front_table(advice: Advice) -> Table:
    """The candidates on the front, by ascending compute."""
    display, start = advice.display, advice.found[0].start
    header = ["configuration", "seeds", f"{display.name} at t={start}", f"{advice.measured}, 90%"]
    table = [[*header, "law", "TFLOPs to come", "hours to come"]]
    points = [(float(f"{each.compute:.3g}"), each.expected) for each in advice.found]
    for each in (advice.found[i] for i in non_dominated(points)):
        present = number(display.factor * each.values[each.now]) + f" (t={each.now})" * (each.now < start)
        measure = each.forecast.text(display.factor)
        costs = [f"{each.compute:,.3g}", f"{each.hours:,.2g}"]
        table.append([each.label, str(len(each.seeds)), present, measure, each.fit.law, *costs])
    return table
