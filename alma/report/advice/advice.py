"""The advice of one mega-batch: the choice, what each decision is worth, how often to retrain."""

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from alma.report.advice.backtest import naive_rule_won
from alma.report.advice.candidates import Candidate, choose, find_candidates, within
from alma.report.advice.comparison import Comparison, Field, compare
from alma.report.advice.forecast import turns_up
from alma.report.advice.questions import QUESTIONS
from alma.report.advice.retraining import Retraining
from alma.report.advice.retraining_of_runs import retraining_beside_twin, shortage_of_choice
from alma.report.advice.retraining_table import QUESTION, record, titled
from alma.report.advice.shortage import Shortage
from alma.report.losses import MeanOverSeeds
from alma.report.metric import OF_RECORDS, Metric
from alma.report.newest import NewestPart, compared_at, models_of, newest_part_at
from alma.report.periods import holes, span_of_test_set
from alma.report.results import Display, Section, left_out, matrix, non_dominated, rounded
from alma.report.tables import TitledTable
from alma.tables import Table, number

_MOST_LABELS = 2  # most labels that a remark names
# Waiting time and length of a short run that tells whether waiting pays; chosen by
# `python -m benchmarks waiting_rule`.
_SHORT_WAIT = 10
_SHORT_RUN = 20
NOTE = (
    "Difference: the other configuration less the choice; positive values are worse. Intervals are "
    "so wide that equal configurations show any evidence in a tenth of reports. The two answer the "
    "other questions alike; further settings may differ. Seeds: so many a side would settle it, if "
    "the difference stays."
)
FRONT = """\
Configurations that no other one beats in both the expected measure and training compute to come."""
_DRIFTS = """\
Forecasts assume an i.i.d. stream. If only new data count, go by "regret, next" of alma report."""
_DRIFTS_ON_PART = "Forecasts assume that data to come are like {part}."


class Advice(NamedTuple):
    """Forecasts of a stream's candidates, and the decisions based on them."""

    title: str
    budget: float | None
    """Limit of future training compute, in TFLOPs; None: no limit."""
    candidates: list[Candidate]
    choice: Candidate | None
    """The recommended candidate; None: no candidate stays within the budget."""
    comparisons: list[Comparison]
    remarks: list[str]
    """Sentences about what weakens the advice."""
    retraining: Retraining | None
    """How often to retrain the choice; None without a large enough evaluation matrix."""
    shortage: Shortage | None = None
    """What the evaluation matrix of the choice lacks, if it is too small."""
    newest: NewestPart | None = None
    """What the models lose on the newest held-out part of a stream with periods."""
    asks_how_often: bool = False
    """Whether options ask how often to retrain: --every or --price."""

    @property
    def display(self) -> Display:
        """How the metric is named and scaled."""
        return self.candidates[0].result.display

    @property
    def metric(self) -> Metric:
        """The metric of the records, and how sentences name it."""
        return OF_RECORDS[self.candidates[0].result.metric]

    @property
    def measured(self) -> str:
        """What is forecast, such as "mean error (%) over t=21..100"."""
        first = self.candidates[0].start + 1
        last = self.candidates[0].until
        times = f"over t={first}..{last}" if first < last else f"at t={last}"
        return f"mean {self.display.name} {times}{self.tested_on}"

    @property
    def tested_on(self) -> str:
        """The held-out part or the periods of the test set; "" of a stream without periods."""
        result = self.candidates[0].result
        if result.part:
            return f" on {result.part}"
        span = span_of_test_set(result)
        return f" on the test set of {span.text}" if span else ""

    def difference(self, comparison: Comparison) -> MeanOverSeeds:
        """A difference with interval: percentage points, or percent of the choice's perplexity."""
        level = comparison.choice.expected
        scale = self.metric.scale_of_differences(level, self.display.factor)
        values = (comparison.difference, comparison.low, comparison.high)
        return MeanOverSeeds(*(scale * value for value in values))

    @property
    def parts(self) -> list[TitledTable]:
        """The parts of the printed document."""
        tables = [TitledTable(f"Advice: {self.title}", [], above=self._scope())]
        if self.newest:
            tables.append(self.newest.table)
        if self.choice:
            tables.append(self._decisions(self.choice))
        if self.retraining:
            tables.append(titled(self.retraining))
        if self.shortage:
            title = f"{QUESTION.capitalize()} {self.shortage.label}"
            tables.append(TitledTable(title, [], above=[self.shortage.text]))
        tables.append(TitledTable("Front", front_table(self), "\n".join(self.remarks), [FRONT]))
        return tables

    def _scope(self) -> list[str]:
        """Sentences: the rows read, the mega-batches forecast, and whether there is no choice."""
        first = self.candidates[0]
        text = f"Rows up to t={first.start} of {len(self.candidates)} configurations; "
        text += f"forecast to t={first.until}"
        if self.budget is not None:
            text += f" within {self.budget:.3g} TFLOPs of training to come"
        return [f"{text}."] if self.choice else [f"{text}.", self.summary]

    def _decisions(self, choice: Candidate) -> TitledTable:
        """The choice and the answers to the questions."""
        above = [self.summary]
        if choice.command:
            above.append(f"Command: {choice.command}")
        below = [NOTE] if self.comparisons else []
        answered = {comparison.question for comparison in self.comparisons}
        unanswered = " ".join(question for question in QUESTIONS if question not in answered)
        if unanswered:
            differs = "No run within the budget differs from the choice in this question alone"
            below.append(f"{differs}: {unanswered}")
        cells = decision_table(self) if self.comparisons else []
        return TitledTable(f"Choice by {self.measured}", cells, "\n".join(below), above)

    @property
    def summary(self) -> str:
        """The choice in a sentence, or that there is none."""
        if not self.choice:
            least = min(candidate.compute for candidate in self.candidates)
            limit = f"the least is {least:.3g} TFLOPs to come"
            return f"No configuration stays within the budget: {limit}."
        value = self.choice.forecast.text(self.display.factor)
        return f"Use {self.choice.label}: lowest expected {self.measured}, {value}."

    def record(self) -> dict[str, Any]:
        """For JSON. Values of the metric are unscaled: errors are fractions."""
        values = {
            "from": self.candidates[0].start,
            "until": self.candidates[0].until,
            "measure": self.measured,
            "budget": self.budget,
            "choice": self.choice.label if self.choice else None,
            "decisions": [_record_of_decision(comparison) for comparison in self.comparisons],
            "configurations": [_record_of_candidate(candidate) for candidate in self.candidates],
            "newest": self.newest.record() if self.newest else None,
            "retraining": record(self.retraining) if self.retraining else None,
            "no_retraining": self.shortage.record() if self.shortage else None,
            "remarks": self.remarks,
        }
        return dict(rounded(values))


def _record_of_decision(comparison: Comparison) -> dict[str, Any]:
    return comparison._asdict() | {
        "advice": comparison.advice,
        "evidence": comparison.evidence,
        "choice": comparison.choice.label,
        "other": comparison.other.label,
    }


def _record_of_candidate(candidate: Candidate) -> dict[str, Any]:
    return {
        "label": candidate.label,
        "command": candidate.command,
        "seeds": len(candidate.seeds),
        "from": candidate.now,
        "expected": candidate.forecast,
        "compute": candidate.compute,
        "hours": candidate.hours,
        "law": candidate.fit.law,
    }


def advise(
    section: Section,
    now: int | None = None,
    budget: float | None = None,
    **options: Any,
) -> Advice:
    """The advice of mega-batch `now`, from the rows up to there.

    Configurations are compared on the test set or, if that lacks periods of the stream, on the
    newest held-out part.

    section    the results to compare
    now        the mega-batch at which to advise; None: the last one with a row
    budget     limit of future training compute, in TFLOPs; None: no limit
    options    fields of `Retraining`: `every`, `worth`, `price`, `money`

    UserError: no stage is complete by then, or the stream has no such mega-batch.
    """
    of_newest = newest_part_at(section.results, now)
    on_test_set = section.results
    section = section._replace(results=compared_at(on_test_set, now))
    candidates = find_candidates(section, now)
    allowed = within(candidates, budget)
    choice = choose(allowed) if allowed else None
    comparisons = compare(Field(candidates), choice, allowed) if choice else []
    retraining = None
    shortage = None
    if choice:
        retraining = retraining_beside_twin(choice, candidates, options, now)
        if not retraining:
            shortage = shortage_of_choice(choice, now)
    remarks = [
        *left_out(on_test_set),
        *holes(on_test_set),
        *_without_stage(section, candidates),
        *naive_rule_won(section, candidates[0].start),
        *_single_seeds(comparisons),
        *_drift(section),
        *_better_on_newest(of_newest, choice, allowed),
        *_few_stages(candidates),
        *_turned_up(candidates),
        *_short_run(section, candidates, choice),
    ]
    price = options.get("price", math.nan)
    return Advice(
        section.title,
        budget,
        candidates,
        choice,
        comparisons,
        remarks,
        retraining,
        shortage,
        of_newest,
        asks_how_often=bool(options.get("every")) or not math.isnan(price),
    )


def _better_on_newest(
    of_newest: NewestPart | None, choice: Candidate | None, allowed: Sequence[Candidate]
) -> list[str]:
    """A remark on a configuration that is better than the choice on the newest held-out part."""
    if not of_newest or not choice or choice.result.part:
        return []
    means = {}
    for result in of_newest.results:
        newest_model = models_of(result, of_newest.part)[-1]
        if newest_model.tested:
            means[result.label] = result.display.factor * fmean(newest_model.values)
    rivals = [candidate.label for candidate in allowed if candidate.label in means]
    if choice.label not in means:
        return []
    best = min(rivals, key=lambda label: means[label])
    if means[best] >= means[choice.label]:
        return []
    values = f"{number(means[best])} against {number(means[choice.label])}"
    return [
        f"On {of_newest.name}, the newest held-out part, the newest model of {best} is better than "
        f"that of the choice: {choice.result.display.name} {values}, means over seeds."
    ]


def _without_stage(section: Section, candidates: Sequence[Candidate]) -> list[str]:
    """A remark naming configurations that have no complete stage yet; [] if there are none."""
    ready = {candidate.label for candidate in candidates}
    waiting = [result.label for result in section.results if result.label not in ready]
    return [f"No complete stage yet, left out: {_first_of(waiting)}."] if waiting else []


def _single_seeds(comparisons: Sequence[Comparison]) -> list[str]:
    """A remark on comparisons in which a side has only one seed, so that they have no interval."""
    single = []
    for comparison in comparisons:
        if min(len(comparison.choice.seeds), len(comparison.other.seeds)) < 2:
            single.append(comparison)
    if not single:
        return []
    seeds = max(comparison.seeds or 3 for comparison in single)
    labels = _first_of([comparison.other.label for comparison in single])
    return [
        "One seed says nothing about how far runs differ, so there is no evidence: "
        f"run {seeds} seeds of {labels} and of the choice."
    ]


def _drift(section: Section) -> list[str]:
    """A remark on forecasts of a stream that has an evaluation matrix, so that it may drift."""
    first = section.results[0]
    if first.part:
        return [_DRIFTS_ON_PART.format(part=first.part)]
    repeats = [rows for result in section.results for rows in result.repeats]
    return [_DRIFTS] if any(matrix(rows) for rows in repeats) else []


def _turned_up(candidates: Sequence[Candidate]) -> list[str]:
    """A remark on candidates whose newest values rise."""
    rising = []
    for candidate in candidates:
        repeats = candidate.result.repeats
        values = []
        for t in candidate.ends:
            values.append(fmean(repeat[t]["value"] for repeat in repeats))
        if turns_up(values):
            rising.append(candidate.label)
    if not rising:
        return []
    return [
        "The newest errors rise, which no law of a forecast does, so its interval is too low: "
        f"{_first_of(rising)}."
    ]


def _few_stages(candidates: Sequence[Candidate]) -> list[str]:
    """A remark on candidates with few stages."""
    few = [candidate.label for candidate in candidates if len(candidate.ends) < 3]
    if not few:
        return []
    return [f"Fewer than 3 stages, so that the law is mostly assumed: {_first_of(few)}."]


def _short_run(
    section: Section,
    candidates: Sequence[Candidate],
    choice: Candidate | None,
) -> list[str]:
    """If no candidate waits, a remark that suggests the cheapest run to learn whether to wait."""
    end = section.results[0].megabatches
    all_at_once = all(candidate.result.waiting_time == 1 for candidate in candidates)
    if not choice or end <= _SHORT_RUN or not all_at_once:
        return []
    rows = choice.result.repeats[0]
    flops = fmean(rows[t]["train_flops"] for t in range(1, choice.now + 1))  # per mega-batch
    return [
        "Runs at w = 1 cannot tell whether to wait. The cheapest run that would: "
        f"w = {_SHORT_WAIT} up to {_SHORT_RUN}, "
        f"about {_SHORT_RUN / end:.0%} of the stream's compute "
        f"({flops * _SHORT_RUN / 1e12:.2g} TFLOPs)."
    ]


def _first_of(labels: Sequence[str]) -> str:
    """The first labels, and how many more there are."""
    text = "; ".join(labels[:_MOST_LABELS])
    hidden = len(labels) - _MOST_LABELS
    return f"{text} and {hidden} more" if hidden > 0 else text


def decision_table(advice: Advice) -> Table:
    """A row for each answered question."""
    unit = advice.metric.unit_of_differences
    header = ["question", "advice", "compared with", f"difference ({unit}), 90%"]
    table = [[*header, "its Comp to come", "seeds"]]
    for comparison in advice.comparisons:
        mean, low, high = advice.difference(comparison)
        interval = f"[{low:+.3g}, {high:+.3g}]" if np.isfinite(high) else "[?]"
        cost = "?"
        if comparison.choice.compute:
            cost = f"{comparison.other.compute / comparison.choice.compute:.3g}x"
        row = [comparison.question, comparison.advice, comparison.other.label]
        table.append([*row, f"{mean:+.3g} {interval}", cost, _seeds_to_settle(comparison)])
    return table


def _seeds_to_settle(comparison: Comparison) -> str:
    """Seeds per side that would give evidence, as a cell of the table.

    "" if there is evidence already, "?" if the number is unknown.
    """
    if comparison.seeds:
        return str(comparison.seeds)
    return "" if comparison.evidence else "?"


def front_table(advice: Advice) -> Table:
    """The candidates on the front, by ascending compute."""
    display = advice.display
    start = advice.candidates[0].start
    header = ["configuration", "seeds", f"{display.name} at t={start}", f"{advice.measured}, 90%"]
    table = [[*header, "law", "TFLOPs to come", "hours to come"]]
    points = []
    for candidate in advice.candidates:
        points.append((float(f"{candidate.compute:.3g}"), candidate.expected))
    for i in non_dominated(points):
        candidate = advice.candidates[i]
        present = number(display.factor * candidate.values[candidate.now])
        if candidate.now < start:
            present += f" (t={candidate.now})"
        row = [candidate.label, str(len(candidate.seeds)), present]
        row += [candidate.forecast.text(display.factor), candidate.fit.law]
        table.append([*row, f"{candidate.compute:,.3g}", f"{candidate.hours:,.2g}"])
    return table
