"""The advice of one mega-batch: the choice, what each decision is worth, the front, forecasts."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from alma.errors import UserError
from alma.report.advice.backtest import regrets_so_far
from alma.report.advice.cadence import Compute, Retraining, retraining
from alma.report.advice.candidates import Forecast, find_candidates, forecasts
from alma.report.advice.choice import Limits, choose, front
from alma.report.advice.decisions import Comparison, compare
from alma.report.advice.forecast import LEVELS, interval
from alma.report.advice.questions import QUESTIONS
from alma.report.advice.staleness import known_at
from alma.report.advice.text import DocumentPart, expected, number
from alma.report.age import MeanOverSeeds, losses_of
from alma.report.age_table import unit
from alma.report.compare import abbreviated
from alma.report.results import Display, Section, left_out, matrix, rounded
from alma.report.tables import Table

_MOST_TIMES = 4  # columns of forecasts
_MOST_LABELS = 6  # of a remark
DIFFERENCE = (
    "Difference: the other configuration less the choice; positive values are worse. The two answer the "
    "other questions alike; further settings, such as the learning rate, may differ: each is at its best."
)
_CAVEATS = {
    "average": "This mean counts the past, and untrained models while a learner waits.",
    "cer": "This sum counts the past, and untrained models while a learner waits.",
    "final": "This ignores what the models before the last one served.",
}
_DRIFTS = "Mega-batches have held-out parts of their own, but these forecasts assume an i.i.d. stream."
ON_NEXT = "On the next period: so far, in {unit}, on the held-out part of the mega-batch after each stage."
_FEW = "How often to retrain takes more models, each tested on the mega-batches after it."
STEP = "Next step: the cheapest configuration with a lower expected value, for so many times the compute."


class Advice(NamedTuple):
    """Forecasts of the candidates of a stream, and what follows from them."""

    title: str
    by: str
    limits: Limits
    found: list[Forecast]
    front: list[Forecast]
    choice: Forecast | None  # None: nothing stays within the limits
    rule: str  # of the choice: one of RULES
    regrets: dict[str, float]  # of each rule at earlier mega-batches; {}: too few of them
    comparisons: list[Comparison]
    waiting: list[str]  # configurations without a complete stage
    left_out: list[str]  # lines about runs that do not count
    drifts: bool  # whether each mega-batch has a test set of its own
    retraining: Retraining | None  # how often to train the choice; None: no evaluation matrix, or a small one

    @property
    def now(self) -> int:
        """The last t that was read."""
        return self.found[0].candidate.start

    @property
    def until(self) -> int:
        """The last t of the forecast."""
        return self.found[0].candidate.until

    @property
    def display(self) -> Display:
        return self.found[0].candidate.result.display

    @property
    def measure(self) -> str:
        """Such as "mean error (%)" or "CER"."""
        kind = "mean" if self.by == "coming" else self.by
        return self.display.total if self.by == "cer" else f"{kind} {self.display.name}"

    @property
    def span(self) -> str:
        """The t that the measure covers."""
        if self.by == "coming":
            return f"t={self.now + 1}..{self.until}"
        return f"t={self.until}" if self.by == "final" else f"t=1..{self.until}"

    @property
    def factor(self) -> int:
        """Multiplies shown values of the measure: errors are in percent, sums of errors are not."""
        return 1 if self.by == "cer" else self.display.factor

    @property
    def parts(self) -> list[DocumentPart]:
        """The document."""
        compute, parameters = self.limits
        limits = [] if compute is None else [f"{compute:.3g} TFLOPs"]
        limits += [] if parameters is None else [f"{abbreviated(parameters)} parameters"]
        read = f"Rows up to t={self.now} of {len(self.found)} configurations; forecast to t={self.until}"
        read += f" within {' and '.join(limits)}." if limits else "."
        found = [DocumentPart(f"Advice: {self.title}", [read])]
        if self.choice:
            command = self.choice.candidate.command
            lines = [*self.summary, *([f"Command: {command}"] if command else [])]
            decisions = decision_table(self) if self.comparisons else None
            heading = f"Choice by {self.measure} over {self.span}"
            found.append(DocumentPart(heading, lines, decisions, self.unanswered))
        found += self.retraining.parts if self.retraining else []
        heading = f"Front: not beaten in {self.measure} over {self.span}, compute and parameters"
        found.append(DocumentPart(heading, (), front_table(self), [STEP]))
        heading = f"Forecast of the test {self.display.name}"
        return [*found, DocumentPart(heading, (), forecast_table(self), self.remarks)]

    @property
    def summary(self) -> list[str]:
        """The choice in sentences: what it is, by which rule, and what the measure counts."""
        assert self.choice
        value = expected(self.factor * self.choice.totals, self.factor * self.choice.expected)
        kind = "Expected" if self.rule != "forecast" else "Lowest expected"
        lines = [f"{kind} {self.measure} over {self.span}: {self.choice.candidate.label}, {value}."]
        if self.rule != "forecast":
            regret, ours = self.regrets[self.rule], self.regrets["forecast"]
            against = f"regret {regret:.1%} against {ours:.1%} of the forecasts at earlier mega-batches"
            lines.append(f'Chosen by "{self.rule}": {against}.')
        return lines + ([_CAVEATS[self.by]] if self.by in _CAVEATS else [])

    @property
    def unanswered(self) -> list[str]:
        """What the differences mean, and questions that no run answers."""
        answered = {each.question for each in self.comparisons}
        missing = [question for question in QUESTIONS if question not in answered]
        alone = (
            f"No run within the limits differs from the choice in this question alone: {' '.join(missing)}"
        )
        notes = [DIFFERENCE] if answered else []
        if any(each.on_next for each in self.comparisons):
            notes.append(ON_NEXT.format(unit=unit(self.found[0].candidate.result)))
        return [*notes, *([alone] if missing else [])]

    @property
    def remarks(self) -> list[str]:
        """What weakens the advice."""
        lines = list(self.left_out)
        lines += [f"No complete stage yet, left out: {_some(self.waiting)}."] if self.waiting else []
        if all(len(each.candidate.seeds) == 1 for each in self.found):
            lines.append("One seed: how much runs differ is unknown, so no difference is evidence.")
        if self.drifts:
            lines.append(f"{_DRIFTS} {_FEW}" if self.choice and not self.retraining else _DRIFTS)
        few = [each.candidate.label for each in self.found if len(each.candidate.ends) < 3]
        if few:
            lines.append(f"Fewer than 3 stages, so that the law is mostly assumed: {_some(few)}.")
        if self.choice is None:
            compute = min(each.candidate.compute_until for each in self.found)
            parameters = abbreviated(min(each.candidate.parameters_until for each in self.found))
            least = f"the least are {compute:.3g} TFLOPs and {parameters} parameters"
            lines.append(f"No configuration stays within the limits: {least}.")
        return lines

    def record(self) -> dict[str, Any]:
        """For JSON. Values of metric and measure are unscaled: errors are fractions."""
        best = {id(each) for each in self.front}
        return {
            "from": self.now,
            "until": self.until,
            "by": self.by,
            "measure": f"{self.measure} over {self.span}",
            "rule": self.rule,
            "regrets": {rule: rounded(regret) for rule, regret in self.regrets.items()},
            "limits": self.limits._asdict(),
            "choice": self.choice.candidate.label if self.choice else None,
            "decisions": [
                {
                    "question": each.question,
                    "advice": each.advice,
                    "evidence": each.evidence,
                    "other": each.other.candidate.label,
                    "difference": rounded(each.difference),
                    "interval": [rounded(each.low), rounded(each.high)],
                    "on_next": list(map(rounded, each.on_next)) if each.on_next else None,
                }
                for each in self.comparisons
            ],
            "configurations": [
                {"front": id(each) in best, "within_limits": self.limits.allow(each)} | _record(each, self.by)
                for each in self.found
            ],
            "retraining": self.retraining.record() if self.retraining else None,
            "remarks": self.remarks,
        }


def advise(section: Section, by: str, now: int | None = None, limits: Limits | None = None) -> Advice:
    """The advice of mega-batch `now` (None: the last one), from rows up to there.

    UserError: no stage is complete by then, or the stream has no such mega-batch.
    """
    limits = limits or Limits()
    candidates = find_candidates(section, now)
    found = forecasts(candidates, by)
    regrets = regrets_so_far(section, by, list(filter(limits.allow, found)))
    rule = min(regrets, key=regrets.__getitem__, default="forecast")
    choice = choose(found, limits, rule)
    comparisons = compare(choice, found, limits) if choice else []
    ready = {candidate.label for candidate in candidates}
    waiting = [result.label for result in section.results if result.label not in ready]
    drifts = any(matrix(rows) for result in section.results for rows in result.repeats)
    often = _retraining(choice, limits) if choice else None
    answers = comparisons, waiting, left_out(section.results), drifts, often
    return Advice(section.title, by, limits, found, front(found), choice, rule, regrets, *answers)


def _retraining(choice: Forecast, limits: Limits) -> Retraining | None:
    """How often to retrain the choice, from the held-out parts up to the last t that was read."""
    candidate = choice.candidate
    losses = losses_of(candidate.result)
    if not losses:
        return None
    last = candidate.ends[-1]
    training = candidate.result.over_seeds(lambda rows: rows[last]["train_flops"])[0] / 1e12
    compute = Compute(candidate.compute, training, candidate.until - candidate.now)
    try:
        known = known_at(losses, candidate.now)
        return retraining(known, unit(candidate.result), "a mega-batch", compute, limits.compute)
    except UserError:  # too few models
        return None


def _some(labels: Sequence[str]) -> str:
    """The first labels, and how many there are more."""
    more = len(labels) - _MOST_LABELS
    return "; ".join(labels[:_MOST_LABELS]) + f" and {more} more" * (more > 0)


def _ratio(one: Forecast, other: Forecast) -> str:
    """Training compute of one in multiples of the other's."""
    cost, unit = one.candidate.compute_until, other.candidate.compute_until
    return f"{cost / unit:.3g}x" if unit else "?"


def decision_table(advice: Advice) -> Table:
    """A row for each answered question."""
    what = f"difference in {advice.measure} over {advice.span}, 90%"
    header = ["question", "advice", "compared with", what, "its Comp"]
    table = [[*header, *(["on the next period, 90%", "lower now"] if advice.drifts else [])]]
    for each in advice.comparisons:
        difference = MeanOverSeeds(*(advice.factor * x for x in (each.difference, each.low, each.high)))
        label, cost = each.other.candidate.label, _ratio(each.other, each.choice)
        row = [each.question, each.advice, label, _signed(difference), cost]
        drifting = [_signed(each.on_next) if each.on_next else "?", each.lower_now]
        table.append([*row, *(drifting if advice.drifts else [])])
    return table


def _signed(difference: MeanOverSeeds) -> str:
    """A difference with its interval."""
    mean, low, high = difference
    return f"{mean:+.3g} " + (f"[{low:+.3g}, {high:+.3g}]" if np.isfinite(high) else "[?]")


def front_table(advice: Advice) -> Table:
    """The candidates on the front, with the step to the next lower expected measure."""
    at_now = f"{advice.display.name} at t={advice.now}"
    measured = at_now if advice.by == "coming" else f"{advice.measure} so far"
    header = ["configuration", "seeds", measured, f"{advice.measure} over {advice.span}, 90%"]
    table = [[*header, "Comp (TFLOPs)", "parameters", "within limits", "next step"]]
    for each in advice.front:
        candidate, seeds = each.candidate, len(each.candidate.result.repeats)
        so_far, deviation = candidate.so_far(advice.by)
        spread = f" ±{number(advice.factor * deviation)}" * (seeds > 1)
        present = number(advice.factor * so_far) + spread + _shorter(advice, each)
        cells = [candidate.label, str(seeds), present]
        totals = expected(advice.factor * each.totals, advice.factor * each.expected)
        cells += [totals, f"{candidate.compute_until:,.3g}"]
        cells += [abbreviated(candidate.parameters_until), "yes" if advice.limits.allow(each) else "no"]
        table.append([*cells, _step(advice, each)])
    return table


def _shorter(advice: Advice, each: Forecast) -> str:
    """The last t of a candidate whose runs have fewer rows than others; "" otherwise."""
    now = each.candidate.now
    return f" (t={now})" if now < advice.now else ""


def _step(advice: Advice, each: Forecast) -> str:
    """What the next lower expected measure costs in compute; "" for the lowest."""
    lower = [other for other in advice.front if other.expected < each.expected]
    if not lower:
        return ""
    after = min(lower, key=lambda other: other.candidate.compute_until)
    gain = advice.factor * (after.expected - each.expected)
    return f"{gain:+.3g} for {_ratio(after, each)}"


def forecast_table(advice: Advice) -> Table:
    """The metric at mega-batches to come, of the candidates on the front and in comparisons."""
    shown = [*advice.front, *(each.other for each in advice.comparisons)]
    factor, span = advice.display.factor, advice.until - advice.now
    steps = {1, *(max(1, round(span * i / (_MOST_TIMES - 1))) for i in range(1, _MOST_TIMES))}
    times = sorted(advice.now + step for step in steps)
    table = [["configuration", "law", f"t={advice.now}", *(f"t={t}, 90%" for t in times)]]
    for each in {id(each): each for each in shown}.values():
        law, probability = each.fit.law
        present = number(factor * each.candidate.values[each.candidate.now]) + _shorter(advice, each)
        cells = [expected(factor * each.at(t)) if np.ptp(each.at(t)) else present for t in times]
        table.append([each.candidate.label, f"{law} ({probability:.0%})", present, *cells])
    return table


def _record(each: Forecast, by: str) -> dict[str, Any]:
    """A candidate for JSON."""
    candidate = each.candidate
    law, probability = each.fit.law
    bounds = {f"{level:g}": interval(each.draws, level) for level in LEVELS}
    return {
        "label": candidate.label,
        "command": candidate.command,
        "seeds": len(candidate.result.repeats),
        "from": candidate.now,
        "so_far": rounded(candidate.so_far(by)[0]),
        "expected": rounded(each.expected),
        "interval": [rounded(value) for value in interval(each.totals)],
        "compute": rounded(candidate.compute_until),
        "parameters": rounded(candidate.parameters_until),
        "law": {"name": law, "probability": rounded(probability)},
        "forecast": [
            {
                "t": t,
                "mean": rounded(each.draws[:, i].mean()),
                "intervals": {
                    level: [rounded(low[i]), rounded(high[i])] for level, (low, high) in bounds.items()
                },
            }
            for i, t in enumerate(candidate.to_come)
        ],
    }
