"""The advice of one mega-batch: the choice, what each decision is worth, the front, how often to retrain."""

import re
from collections.abc import Sequence
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from alma.errors import UserError
from alma.report.advice.backtest import look_back, mean_regrets, naive_rule_won
from alma.report.advice.cadence import Period, Retraining, TrainingCost, retraining
from alma.report.advice.candidates import Candidate, choose, find_candidates, within
from alma.report.advice.comparison import Comparison, Field, compare
from alma.report.advice.forecast import Array, interval
from alma.report.advice.questions import QUESTIONS
from alma.report.advice.staleness import known_at
from alma.report.advice.text import DocumentPart, expected, number
from alma.report.advice.waiting import short_run
from alma.report.age import losses_of
from alma.report.age_table import unit
from alma.report.results import Display, Section, left_out, matrix, non_dominated, rounded
from alma.report.tables import Table

_COSTS = ("train_flops", "seconds")
_MOST_LABELS = 6  # of a remark
NOTE = (
    "Difference: the other configuration less the choice; positive values are worse. Intervals are so "
    "wide that equal configurations show any evidence in a tenth of reports. The two answer the other "
    "questions alike; further settings may differ. Seeds: so many a side would settle it, if the difference "
    "stays."
)
FRONT = "Configurations that no other one beats in both the expected measure and training compute to come."
_DRIFTS = "Mega-batches have held-out parts of their own, but these forecasts assume an i.i.d. stream."
_FEW = "How often to retrain takes more models, each tested on the mega-batches after it."


class Advice(NamedTuple):
    """What is expected of the candidates of a stream, and what follows from it."""

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
    def span(self) -> str:
        """The t that the measure covers."""
        return f"t={self.found[0].start + 1}..{self.found[0].until}"

    def shown(self, measure: float | Array) -> Any:
        """Values of the measure as they are shown: errors in percent."""
        return self.display.factor * measure

    def difference(self, each: Comparison) -> tuple[float, float, float]:
        """A difference and its interval: in percentage points, or in percent of the choice's perplexity."""
        scale = 100 / each.choice.expected if self.display.factor == 1 else self.display.factor
        return scale * each.difference, scale * each.low, scale * each.high

    @property
    def parts(self) -> list[DocumentPart]:
        """The document."""
        now, until = self.found[0].start, self.found[0].until
        read = f"Rows up to t={now} of {len(self.found)} configurations; forecast to t={until}"
        read += "." if self.budget is None else f" within {self.budget:.3g} TFLOPs of training to come."
        found = [DocumentPart(f"Advice: {self.title}", [read])]
        if self.choice:
            command = self.choice.command
            lines = [self.summary, *([f"Command: {command}"] if command else [])]
            decisions = decision_table(self) if self.comparisons else None
            below = [NOTE] * bool(self.comparisons) + self._unanswered
            found.append(
                DocumentPart(f"Choice by mean {self.display.name} over {self.span}", lines, decisions, below)
            )
        found += self.retraining.parts if self.retraining else []
        return [*found, DocumentPart("Front", [FRONT], front_table(self), self.remarks)]

    @property
    def summary(self) -> str:
        """The choice in a sentence."""
        assert self.choice
        value = expected(self.shown(self.choice.measure(self.choice.draws)), self.shown(self.choice.expected))
        return f"Lowest expected mean {self.display.name} over {self.span}: {self.choice.label}, {value}."

    @property
    def _unanswered(self) -> list[str]:
        """Questions that no run answers."""
        answered = {each.question for each in self.comparisons}
        missing = " ".join(question for question in QUESTIONS if question not in answered)
        return [f"No run within the budget differs from the choice in this question alone: {missing}"] * bool(
            missing
        )

    def record(self) -> dict[str, Any]:
        """For JSON. Values of the metric are unscaled: errors are fractions."""
        return {
            "from": self.found[0].start,
            "until": self.found[0].until,
            "measure": f"mean {self.display.name} over {self.span}",
            "budget": self.budget,
            "choice": self.choice.label if self.choice else None,
            "decisions": [
                {
                    "question": each.question,
                    "advice": each.advice,
                    "evidence": each.evidence,
                    "other": each.other.label,
                    "difference": rounded(each.difference),
                    "interval": [rounded(each.low), rounded(each.high)],
                    "seeds": each.seeds,
                }
                for each in self.comparisons
            ],
            "configurations": [
                {
                    "label": each.label,
                    "command": each.command,
                    "seeds": len(each.seeds),
                    "from": each.now,
                    "expected": rounded(each.expected),
                    "interval": list(map(rounded, interval(each.measure(each.draws)))),
                    "compute": rounded(each.compute),
                    "hours": rounded(each.hours),
                    "law": each.fit.law,
                }
                for each in self.found
            ],
            "retraining": self.retraining.record() if self.retraining else None,
            "remarks": self.remarks,
        }


def advise(section: Section, now: int | None = None, budget: float | None = None, **asked: Any) -> Advice:
    """The advice of mega-batch `now` (None: the last one), from rows up to there, within a `budget` of
    training compute to come (TFLOPs). `asked`: `every`, `worth` and `price` of `retraining`.

    UserError: no stage is complete by then, or the stream has no such mega-batch.
    """
    found = find_candidates(section, now)
    allowed = within(found, budget)
    choice = choose(allowed)
    comparisons = compare(Field(found), choice, allowed) if choice else []
    often = _retraining(choice, asked) if choice else None
    twin = next((each for each in found if choice and _twins(each, choice)), None)
    if often and twin and (other := _retraining(twin, asked)):
        other.price *= (other.cost.flops or 1) / (often.cost.flops or 1)
        often.other = other
    remarks = _remarks(section, found, choice, comparisons, often)
    return Advice(section.title, budget, found, choice, comparisons, remarks, often)


def _remarks(
    section: Section,
    found: Sequence[Candidate],
    choice: Candidate | None,
    comparisons: Sequence[Comparison],
    often: Retraining | None,
) -> list[str]:
    lines = left_out(section.results)
    ready = {each.label for each in found}
    waiting = [result.label for result in section.results if result.label not in ready]
    lines += [f"No complete stage yet, left out: {_some(waiting)}."] if waiting else []
    lines += naive_rule_won(mean_regrets(look_back(section, found[0].start, stages=False)))
    single = [each for each in comparisons if min(len(each.choice.seeds), len(each.other.seeds)) < 2]
    if single:
        many = max(each.seeds or 3 for each in single)
        lines.append(
            f"One seed says nothing about how far runs differ, so there is no evidence: run {many} "
            f"seeds of {_some([each.other.label for each in single])} and of the choice."
        )
    if any(matrix(rows) for result in section.results for rows in result.repeats):
        lines.append(f"{_DRIFTS} {_FEW}" if choice and not often else _DRIFTS)
    few = [each.label for each in found if len(each.ends) < 3]
    lines += [f"Fewer than 3 stages, so that the law is mostly assumed: {_some(few)}."] if few else []
    if choice is None:
        least = min(each.compute for each in found)
        lines.append(f"No configuration stays within the budget: the least is {least:.3g} TFLOPs to come.")
    return lines + (short_run(found, choice) if choice else [])


def _twins(one: Candidate, other: Candidate) -> bool:
    """Whether they differ in `--from-scratch` alone."""
    same = {"from_scratch": None, "seed": None}
    return one is not other and one.result.config | same == other.result.config | same


def _retraining(choice: Candidate, asked: dict[str, Any]) -> Retraining | None:
    """How often to retrain the choice, from the held-out parts up to the last t that was read."""
    losses, last = losses_of(choice.result), choice.ends[-1]
    if not losses:
        return None
    rows, info = choice.result.repeats[0], choice.result.runs[0].info
    flops, seconds = (fmean(r[last][cost] for r in choice.result.repeats) for cost in _COSTS)
    hours = seconds / 3600 * (info.get("gpus") or info.get("processes") or 1)
    cost = TrainingCost(flops / 1e12, hours, "GPU-hours" if info.get("gpus") else "core-hours")
    names = rows[last]["extra"].get("matrix_periods", [])
    forms = {r"\d{4}-\d{2}": "month", r"\d{4}": "year"}
    nouns = [noun for form, noun in forms.items() if names and all(re.fullmatch(form, n) for n in names)]
    period = Period(nouns[0] if nouns else "mega-batch")
    rest = choice.result.megabatches - choice.now
    try:
        known = known_at(losses, choice.now)
        return retraining(known, unit(choice.result), period, cost, rest=rest, **asked)
    except UserError:  # too few models
        return None


def _some(labels: Sequence[str]) -> str:
    """The first labels, and how many there are more."""
    more = len(labels) - _MOST_LABELS
    return "; ".join(labels[:_MOST_LABELS]) + f" and {more} more" * (more > 0)


def decision_table(advice: Advice) -> Table:
    """A row for each answered question."""
    what = "percentage points" if advice.display.factor > 1 else "% of perplexity"
    table = [
        ["question", "advice", "compared with", f"difference ({what}), 90%", "its Comp to come", "seeds"]
    ]
    for each in advice.comparisons:
        mean, low, high = advice.difference(each)
        shown = f"{mean:+.3g} " + (f"[{low:+.3g}, {high:+.3g}]" if np.isfinite(high) else "[?]")
        cost = f"{each.other.compute / each.choice.compute:.3g}x" if each.choice.compute else "?"
        seeds = str(each.seeds or ("" if each.evidence else "?"))
        table.append([each.question, each.advice, each.other.label, shown, cost, seeds])
    return table


def front_table(advice: Advice) -> Table:
    """The candidates on the front, by ascending compute."""
    header = ["configuration", "seeds", f"{advice.display.name} at t={advice.found[0].start}"]
    table = [[*header, f"mean over {advice.span}, 90%", "law", "TFLOPs to come", "hours to come"]]
    points = [(float(f"{each.compute:.3g}"), each.expected) for each in advice.found]
    for i in non_dominated(points):
        each = advice.found[i]
        behind = f" (t={each.now})" * (each.now < advice.found[0].start)
        present = number(advice.shown(each.values[each.now])) + behind
        measure = expected(advice.shown(each.measure(each.draws)), advice.shown(each.expected))
        costs = [f"{each.compute:,.3g}", f"{each.hours:,.2g}"]
        table.append([each.label, str(len(each.seeds)), present, measure, each.fit.law, *costs])
    return table
