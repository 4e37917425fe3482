"""The front, the choice within the limits, and what each decision is worth."""

from collections.abc import Sequence
from typing import NamedTuple

from alma.report.advice.candidates import Forecast
from alma.report.advice.forecast import interval
from alma.report.html.sections import model_size
from alma.report.labels import replay
from alma.report.results import Result

GROWING, SEVERAL = ("gmoe", "ff"), ("ens", "umix", "gens")


def _wait(result: Result) -> str:
    return "train now (w=1)" if result.waiting_time == 1 else f"wait (w={result.waiting_time})"


QUESTIONS = {
    "train now or wait?": _wait,
    "grow the model?": lambda result: "grow" if result.learner in GROWING else "keep the size",
    "one model or several?": lambda result: "several" if result.learner in SEVERAL else "one",
    "average the weights?": lambda result: "average" if "average" in result.config else "raw weights",
    "replay?": lambda result: f"replay: {replay(result.config)}",
    "one schedule?": lambda result: f"schedule: {result.config.get('schedule', 'each stage')}",
    "which size?": lambda result: f"size {model_size(result)}",
}
"""Decisions, and the side of each that a result stands for."""
OF_THE_LEARNER = ("grow the model?", "one model or several?")


class Limits(NamedTuple):
    """What a candidate may cost up to the end of the forecast."""

    compute: float | None = None  # TFLOPs
    parameters: float | None = None

    def allow(self, forecast: Forecast) -> bool:
        """Whether a candidate stays within the limits up to the end of the forecast."""
        return self.hold(forecast.candidate.compute_until, forecast.candidate.parameters_until)

    def hold(self, *costs: float) -> bool:
        """Whether compute and parameters are within the limits. 1% more counts as equal: stages differ in
        size."""
        return all(most is None or cost <= 1.01 * most for cost, most in zip(costs, self, strict=True))


class Comparison(NamedTuple):
    """The choice against the best candidate that differs in one decision."""

    question: str
    choice: Forecast
    other: Forecast
    difference: float  # expected measure of the other less that of the choice
    low: float  # of the 90% interval
    high: float

    @property
    def evidence(self) -> bool:
        """Whether the interval leaves out zero."""
        return not self.low <= 0 <= self.high

    @property
    def advice(self) -> str:
        """The better side, or that there is no evidence."""
        better = self.choice if self.difference >= 0 else self.other
        side = QUESTIONS[self.question](better.candidate.result)
        return side if self.evidence else "no evidence either way"


def choose(found: Sequence[Forecast], limits: Limits) -> Forecast | None:
    """The candidate with the lowest expected measure within the limits, if there is one."""
    return min(filter(limits.allow, found), key=lambda each: each.expected, default=None)


def compare(choice: Forecast, found: Sequence[Forecast], limits: Limits) -> list[Comparison]:
    """A comparison for each question that some candidate within the limits decides otherwise, all else
    equal: with the best of these."""
    comparisons = []
    for question in QUESTIONS:
        others = [f for f in found if limits.allow(f) and _differs_in(question, choice, f)]
        if others:
            other = min(others, key=lambda each: each.expected)
            difference = other.totals - choice.totals
            expected = float(difference.mean())
            comparisons.append(Comparison(question, choice, other, expected, *interval(difference)))
    return comparisons


def _differs_in(question: str, choice: Forecast, other: Forecast) -> bool:
    """Whether a candidate decides this question differently and no other one; the learner is the same, unless
    the question is about it."""
    one, two = choice.candidate.result, other.candidate.result
    differences = {each for each, side in QUESTIONS.items() if side(one) != side(two)}
    return differences == {question} and (question in OF_THE_LEARNER or one.learner == two.learner)


def front(found: Sequence[Forecast]) -> list[Forecast]:
    """The candidates that no other matches in expected measure, compute and parameters and beats in one of
    them; by ascending compute. Costs are compared with three digits: how stages end is not a saving."""

    def costs(each: Forecast) -> tuple[float, ...]:
        spent = each.candidate.compute_until, each.candidate.parameters_until
        return each.expected, *(float(f"{cost:.3g}") for cost in spent)

    def beats(one: Forecast, other: Forecast) -> bool:
        pairs = list(zip(costs(one), costs(other), strict=True))
        return all(a <= b for a, b in pairs) and any(a < b for a, b in pairs)

    kept = [each for each in found if not any(beats(other, each) for other in found)]
    return sorted(kept, key=lambda each: (each.candidate.compute_until, each.expected))
