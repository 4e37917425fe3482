"""The choice against the field: differences with intervals that hold for a whole report, over new seeds.

z_is is the log of the measure that run s of configuration i is expected to have, by a law through its own
curve; it is normal with a variance v_i of its own. Few seeds say little about one v_i, so all are drawn
together: v_i ~ d s^2 / chi^2_d, in which the field's d (how alike they are) and s have a grid of values
(Lonnstedt and Speed, 2002; Smyth, 2004). Two configurations with the same seeds share a part of their runs'
deviations: a correlation that all pairs of one question have in common, on a grid, too.

The choice is the least of many, and each report makes several comparisons. So the report is drawn again as it
would be if all configurations were equal: the choice, its best rival in each question, and how far the most
distant of these is in multiples of the half-width of its own 90% interval. A high quantile of that, the
`widening`, multiplies all half-widths. For one pair it is 1; Hsu (1984) treats the comparison with the best.
"""

import math
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
from scipy.special import gammaln

from alma.report.advice.candidates import DRAWS, Candidate
from alma.report.advice.questions import NO_EVIDENCE, QUESTIONS, differ_in
from alma.report.advice.staleness import Array

_DEGREES = np.array([1.0, 2.0, 4.0, 8.0, 16.0, 64.0])  # d
_SCALES = np.geomspace(1e-4, 1.0, 41)  # s
_CORRELATIONS = 1 - np.array([1.0, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 1e-3, 1e-4, 1e-5])
_UNCORRELATED = 30.0  # how much likelier 0 is a priori than each other one
_LEAST = 1e-10  # of a variance: records round values
_REPORTS = 0.94  # quantile of made-up reports: variances of unequal spreads are known from few seeds


class Comparison(NamedTuple):
    """The choice against the best candidate that differs in one decision."""

    question: str
    choice: Candidate
    other: Candidate
    difference: float  # expected measure of the other less that of the choice
    low: float  # of the 90% interval, simultaneous over the report; -inf: unknown
    high: float
    seeds: int | None  # a side that would settle it if the difference stays; None: no number up to 20 would

    @property
    def evidence(self) -> bool:
        """Whether the interval leaves out zero."""
        return not self.low <= 0 <= self.high

    @property
    def advice(self) -> str:
        """The better side, or that there is no evidence."""
        better = self.choice if self.difference >= 0 else self.other
        return better.sides[self.question] if self.evidence else NO_EVIDENCE


class Field:
    """The candidates of one section, and draws of how far each measure may lie from its estimate."""

    def __init__(self, found: Sequence[Candidate]):
        self.found = list(found)
        self._logs = [np.log(each.of_runs) for each in found]
        self._counts = np.array([len(each) for each in self._logs])
        squares = np.array([((each - each.mean()) ** 2).sum() for each in self._logs])
        self._variances = _draw_variances(squares, self._counts - 1, np.random.default_rng(0))
        ranks = np.random.default_rng(1).permutation(DRAWS)  # learners on one stream level off together
        self._laws = np.column_stack([each.departures for each in found])[ranks]
        self._laws -= self._laws.mean(0)

    @cached_property
    def partners(self) -> list[dict[str, list[int]]]:
        """For each candidate and question the candidates that differ from it in this one alone."""
        sides = [each.sides for each in self.found]
        every = range(len(sides))
        return [
            {q: some for q in QUESTIONS if (some := [j for j in every if differ_in(q, sides[i], sides[j])])}
            for i in every
        ]

    @cached_property
    def widening(self) -> float:
        """By how much intervals are wider than those of one pair that is chosen beforehand."""
        normal = np.random.default_rng(2).standard_normal(self._variances.shape)
        runs = np.sqrt(self._variances / self._counts) * normal
        errors = self._laws + runs
        chosen, largest = errors.argmin(1), np.zeros(DRAWS)
        for i in np.unique(chosen):
            at = chosen == i
            for rivals in self.partners[i].values():
                j = np.array(rivals)[errors[np.ix_(at, rivals)].argmin(1)]
                halves = {k: _half(errors[:, k] - errors[:, i]) for k in set(j.tolist())}
                distance = errors[at, j] - errors[at, i]
                largest[at] = np.maximum(largest[at], distance / np.array([halves[k] for k in j.tolist()]))
        return max(1.0, float(np.quantile(largest, _REPORTS)))

    def half_width(self, question: str, i: int, j: int, seeds: int | None = None) -> float:
        """Half of the 90% interval of the log ratio of two measures, for a pair that is chosen beforehand;
        as it would be with so many `seeds` a side."""
        counts = self._counts[[i, j]] if seeds is None else np.array([seeds, seeds])
        variance = (self._variances[:, [i, j]] / counts).sum(1)
        if self.found[i].seeds == self.found[j].seeds:
            variance = variance * (1 - self._correlation(question))
        runs = np.sqrt(variance) * np.random.default_rng(3).standard_normal(DRAWS)
        return _half(self._laws[:, j] - self._laws[:, i] + runs)

    def _correlation(self, question: str) -> Array:
        """Draws of the correlation of runs with one seed, from the pairs that differ in this question."""
        weight = np.zeros(len(_CORRELATIONS))
        weight[0] = math.log(_UNCORRELATED)
        ratio = (1 - _CORRELATIONS) / (1 + _CORRELATIONS)
        for i, partners in enumerate(self.partners):
            for j in partners.get(question, []):
                freedom = self._counts[i] - 1
                if j > i and freedom and self.found[i].seeds == self.found[j].seeds:
                    one, other = self._logs[i], self._logs[j]
                    apart, together = np.var(one - other) + _LEAST, np.var(one + other) + _LEAST
                    x = apart / together / ratio  # has an F distribution
                    share = 2 / (1 + len(partners[question]))  # pairs of one block are not independent
                    weight += share * freedom * (0.5 * np.log(x) - np.log1p(x))
        probability = np.exp(weight - weight.max())
        return np.random.default_rng(4).choice(_CORRELATIONS, DRAWS, p=probability / probability.sum())

    def interval(self, question: str, i: int, j: int, widening: float = 1.0) -> tuple[float, float]:
        """The 90% interval of the measure of j less that of i; without evidence if a side has one seed."""
        if min(self._counts[[i, j]]) < 2:
            return -math.inf, math.inf
        one, other = self.found[i].expected, self.found[j].expected
        half = widening * self.half_width(question, i, j)
        return other * math.exp(-half) - one, other * math.exp(half) - one

    def seeds_to_settle(self, question: str, i: int, j: int) -> int | None:
        """The fewest seeds a side with which a difference as large as this would be evidence; None: no number
        up to 20, or no configuration has two seeds, so that nothing says how far runs differ."""
        apart = abs(math.log(self.found[j].expected / self.found[i].expected))
        if max(self._counts) < 2:
            return None
        enough = (n for n in range(2, 21) if self.widening * self.half_width(question, i, j, n) < apart)
        return next(enough, None)


def _half(draws: Array) -> float:
    return float(np.quantile(abs(draws), 0.9))


def _draw_variances(squares: Array, freedom: Array, random: np.random.Generator) -> Array:
    """Draws of each configuration's variance (DRAWS, configurations), from its sum of squares (...,)."""
    d, scale = (each.ravel() for each in np.meshgrid(_DEGREES, _SCALES**2, indexing="ij"))
    squares = squares + _LEAST * freedom
    total, both = d[:, None] * scale[:, None] + squares, d[:, None] + freedom
    weight = 0.5 * d[:, None] * np.log(d * scale)[:, None] - 0.5 * both * np.log(total)
    weight = (weight + gammaln(both / 2) - gammaln(d / 2)[:, None]).sum(1)
    probability = np.exp(weight - weight.max())
    cell = random.choice(len(d), DRAWS, p=probability / probability.sum())
    return np.asarray(total[cell] / random.chisquare(both[cell]))


def compare(field: Field, choice: Candidate, allowed: Sequence[Candidate]) -> list[Comparison]:
    """A comparison for each question that some allowed candidate decides otherwise, all else equal: with the
    best of these."""
    at = {each.label: k for k, each in enumerate(field.found)}
    i, inside = at[choice.label], {at[each.label] for each in allowed}
    comparisons = []
    for question, partners in field.partners[i].items():
        if rivals := inside & set(partners):
            j = min(rivals, key=lambda j: field.found[j].expected)
            other = field.found[j]
            low, high = field.interval(question, i, j, field.widening)
            settled = field.seeds_to_settle(question, i, j) if low <= 0 <= high else None
            difference = other.expected - choice.expected
            comparisons.append(Comparison(question, choice, other, difference, low, high, settled))
    return comparisons
