"""What a decision is worth: the difference between two configurations, and what it would be with new seeds.

z_is is the log of the measure that run s of configuration i is expected to have, by a law through its own
curve. Runs differ by a run effect r, and runs of one seed share a part u (order of the data, weights):

    z_is = m_i + u_s + r_is,     r ~ N(0, sd^2)

    unpaired    sd^2 = sum over i, s of (z_is - mean_i)^2 / df,  df = sum over i of (n_i - 1)
                se^2 = sd^2 (1 / n_1 + 1 / n_2);  sd includes u: too wide rather than too narrow
    paired      i: the configurations that differ in one decision alone, with the same n seeds
                sd^2 = sum of (z_is - mean_i - mean_s + mean)^2 / df,  df = (number of i - 1)(n - 1)
                se^2 = 2 sd^2 / n

Both sums run over all configurations of the records (paired: over all blocks of this decision). Pairs are
compared as such if they have the same seeds and that leaves two degrees of freedom. The difference of the log
measures is then d + (x - mean of x) + se * t_df: d is the difference of the expected measures, x that of the
laws and walks drawn for both, in which common laws cancel. Without degrees of freedom there is no evidence.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from alma.report.advice.candidates import DRAWS, Candidate, Forecast
from alma.report.advice.choice import Limits
from alma.report.advice.forecast import Array, interval
from alma.report.advice.questions import QUESTIONS, differ_in
from alma.report.advice.staleness import known_at
from alma.report.age import MeanOverSeeds, difference_on_next, losses_of

NO_EVIDENCE = "no evidence either way"


class Comparison(NamedTuple):
    """The choice against the best candidate that differs in one decision."""

    question: str
    choice: Forecast
    other: Forecast
    difference: float  # expected measure of the other less that of the choice
    low: float  # of the 90% interval; -inf: unknown
    high: float
    on_next: MeanOverSeeds | None  # the difference so far on the period after each stage; None: unknown

    @property
    def evidence(self) -> bool:
        """Whether the interval leaves out zero."""
        return not self.low <= 0 <= self.high

    @property
    def advice(self) -> str:
        """The better side, or that there is no evidence."""
        better = self.choice if self.difference >= 0 else self.other
        return better.candidate.sides[self.question] if self.evidence else NO_EVIDENCE

    @property
    def lower_now(self) -> str:
        """The side with the lower value at the last t of both, as a naive rule has it."""
        both = self.choice, self.other
        t = min(each.candidate.now for each in both)
        best = min(both, key=lambda each: each.candidate.values[t])
        return best.candidate.sides[self.question]


def compare(choice: Forecast, found: Sequence[Forecast], limits: Limits) -> list[Comparison]:
    """A comparison for each question that some candidate within the limits decides otherwise, all else
    equal: with the best of these."""
    comparisons = []
    for question in QUESTIONS:
        others = [f for f in found if limits.allow(f) and _differ_in(question, choice, f)]
        if others:
            other = min(others, key=lambda each: each.expected)
            bounds = difference_interval(question, choice, other, found)
            difference = other.expected - choice.expected
            ahead = _on_next(choice.candidate, other.candidate)
            comparisons.append(Comparison(question, choice, other, difference, *bounds, ahead))
    return comparisons


def _on_next(one: Candidate, other: Candidate) -> MeanOverSeeds | None:
    """In the unit of `losses_of`, with a 90% interval if both have the same seeds."""
    ours, theirs = losses_of(one.result), losses_of(other.result)
    if not ours or not theirs:
        return None
    known = known_at(ours, one.now), known_at(theirs, other.now)
    found = difference_on_next(*known, paired=one.seeds == other.seeds)
    return found if np.isfinite(found.mean) else None


def difference_interval(
    question: str, one: Forecast, other: Forecast, found: Sequence[Forecast]
) -> tuple[float, float]:
    """The 90% interval of the measure of `other` less that of `one`, over new seeds."""
    error, freedom = run_error(question, one, other, found)
    if not freedom:
        return -np.inf, np.inf
    laws = np.random.default_rng(1).permutation(np.log(other.laws / one.laws)) + other.walks - one.walks
    runs = error * np.random.default_rng(0).standard_t(freedom, DRAWS)
    ratio = np.exp(np.log(other.expected / one.expected) + laws - laws.mean() + runs)
    low, high = one.expected * (interval(ratio) - 1)
    return float(low), float(high)


def run_error(question: str, one: Forecast, other: Forecast, found: Sequence[Forecast]) -> tuple[float, int]:
    """Standard error of the log ratio of two measures over new seeds, and its degrees of freedom."""
    if one.candidate.seeds == other.candidate.seeds:
        variance, freedom = _paired_variance(question, found)
        if freedom >= 2:
            return float(np.sqrt(2 * variance / len(one.run_totals))), freedom
    logs = [np.log(each.run_totals) for each in found]
    freedom = sum(len(each) - 1 for each in logs)
    squares = sum(float(((each - each.mean()) ** 2).sum()) for each in logs)
    shares = 1 / len(one.run_totals) + 1 / len(other.run_totals)
    return float(np.sqrt(squares / max(1, freedom) * shares)), freedom


def _paired_variance(question: str, found: Sequence[Forecast]) -> tuple[float, int]:
    """Variance of run effects between configurations that differ in this question alone, pooled."""
    squares, freedom, left = 0.0, 0, list(found)
    while left:
        first = left[0]
        same = [each for each in left if each.candidate.seeds == first.candidate.seeds]
        block = [first, *(each for each in same if _differ_in(question, first, each))]
        left = [each for each in left if not any(each is member for member in block)]
        logs: Array = np.log([each.run_totals for each in block])
        rest = logs - logs.mean(0) - logs.mean(1, keepdims=True) + logs.mean()
        squares += float((rest**2).sum())
        freedom += (logs.shape[0] - 1) * (logs.shape[1] - 1)
    return squares / max(1, freedom), freedom


def _differ_in(question: str, one: Forecast, other: Forecast) -> bool:
    return differ_in(question, one.candidate.sides, other.candidate.sides)
