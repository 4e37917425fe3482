"""Compare the choice with its rivals, with intervals that hold for all comparisons of a report.

Variance between seeds. Let z_is be the log of the expected measure of run s of configuration i, by
a law fitted to its own curve. It is normal with a variance v_i. A few seeds say little about v_i,
so the variances have a common prior v_i ~ d s^2 / chi^2_d (Lonnstedt and Speed, 2002; Smyth, 2004).
Its scale s and its degrees of freedom d (large if the variances hardly differ) are integrated over
a grid. Runs of two configurations with the same seed are correlated; all pairs that differ in the
same question have the same correlation, also integrated over a grid.

Several comparisons. The choice is the best of many candidates, and a report compares it with
several rivals, so 90% intervals of single pairs would be too narrow. Reports are simulated in which
all configurations are equal: each has a choice, its best rival in each question, and the largest
difference among them in multiples of the half-width of its own 90% interval. A high quantile of
that number, the `widening`, multiplies all half-widths; it is 1 for a single pair. (Hsu, 1984,
treats comparisons with the best.)
"""

import math
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
from scipy.special import gammaln

from alma.report.advice.candidates import DRAWS, Candidate
from alma.report.advice.law import Array
from alma.report.advice.questions import NO_EVIDENCE, QUESTIONS, differ_in

_DEGREES = np.array([1.0, 2.0, 4.0, 8.0, 16.0, 64.0])  # grid of d
_SCALES = np.geomspace(1e-4, 1.0, 41)  # grid of s
_CORRELATIONS = 1 - np.array([1.0, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 1e-3, 1e-4, 1e-5])
_UNCORRELATED = 30.0  # prior odds of a correlation of 0 against each other value
_LEAST = 1e-10  # least variance, since records round values
# Quantile of the simulated reports. It is above 0.9 because a few seeds hardly show that variances
# are unequal.
_REPORTS = 0.94
_MOST_SEEDS = 20


class Comparison(NamedTuple):
    """The choice against the best candidate that differs in one decision."""

    question: str
    choice: Candidate
    other: Candidate
    difference: float
    """Expected measure of the other less that of the choice."""
    low: float
    """Lower end of the 90% interval, simultaneous over the report; -inf: unknown."""
    high: float
    seeds: int | None
    """Seeds per side that would give evidence if the difference stays; None: more than 20."""

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
    """All candidates of a section, with draws of the errors of their forecasts."""

    def __init__(self, candidates: Sequence[Candidate]):
        self.candidates = list(candidates)
        self._logs = [np.log(candidate.of_runs) for candidate in candidates]
        self._counts = np.array([len(logs) for logs in self._logs])
        squares = np.array([((logs - logs.mean()) ** 2).sum() for logs in self._logs])
        self._variances = _draw_variances(squares, self._counts - 1, np.random.default_rng(0))
        # The errors of the laws are sorted; one permutation for all candidates makes them err in
        # the same direction, because learners on one stream level off together.
        order = np.random.default_rng(1).permutation(DRAWS)
        departures = np.column_stack([candidate.departures for candidate in candidates])[order]
        self._departures = departures - departures.mean(0)

    @cached_property
    def partners(self) -> list[dict[str, list[int]]]:
        """For each candidate, by question: indices of those that differ from it only there."""
        partners = []
        for candidate in self.candidates:
            partners_by_question = {}
            for question in QUESTIONS:
                indices = self._differing_in(question, candidate)
                if indices:
                    partners_by_question[question] = indices
            partners.append(partners_by_question)
        return partners

    def _differing_in(self, question: str, candidate: Candidate) -> list[int]:
        """Indices of the candidates that differ from this one only in the question."""
        indices = []
        for j, rival in enumerate(self.candidates):
            if differ_in(question, candidate.sides, rival.sides):
                indices.append(j)
        return indices

    @cached_property
    def widening(self) -> float:
        """The factor by which a report's intervals are wider than that of a single, fixed pair."""
        normal = np.random.default_rng(2).standard_normal(self._variances.shape)
        of_runs = np.sqrt(self._variances / self._counts) * normal
        errors = self._departures + of_runs  # (reports, candidates)
        choices = errors.argmin(1)
        largest = np.zeros(DRAWS)
        for i in np.unique(choices):
            reports = choices == i
            for rivals in self.partners[i].values():
                best = np.array(rivals)[errors[np.ix_(reports, rivals)].argmin(1)]
                differences = errors[reports, best] - errors[reports, i]
                halves = np.zeros(len(self.candidates))
                for j in set(best.tolist()):
                    halves[j] = _half(errors[:, j] - errors[:, i])
                largest[reports] = np.maximum(largest[reports], differences / halves[best])
        return max(1.0, float(np.quantile(largest, _REPORTS)))

    def half_width(self, question: str, i: int, j: int, seeds: int | None = None) -> float:
        """Half-width of the 90% interval of log(measure of j / measure of i), for a fixed pair.

        `seeds`: the half-width to expect with so many seeds per side; None: with those at hand.
        """
        counts = self._counts[[i, j]] if seeds is None else np.array([seeds, seeds])
        variance = (self._variances[:, [i, j]] / counts).sum(1)
        if self._have_equal_seeds(i, j):
            variance = variance * (1 - self._correlation(question))
        of_runs = np.sqrt(variance) * np.random.default_rng(3).standard_normal(DRAWS)
        return _half(self._departures[:, j] - self._departures[:, i] + of_runs)

    def _have_equal_seeds(self, i: int, j: int) -> bool:
        return self.candidates[i].seeds == self.candidates[j].seeds

    def _correlation(self, question: str) -> Array:
        """Posterior draws of the correlation between two runs with the same seed, (DRAWS,).

        Estimated from all pairs of candidates with the same seeds that differ only in `question`.
        """
        weight = np.zeros(len(_CORRELATIONS))
        weight[0] = math.log(_UNCORRELATED)
        ratio = (1 - _CORRELATIONS) / (1 + _CORRELATIONS)
        for i, partners in enumerate(self.partners):
            for j in partners.get(question, []):
                freedom = self._counts[i] - 1
                if j > i and freedom and self._have_equal_seeds(i, j):
                    of_difference = np.var(self._logs[i] - self._logs[j]) + _LEAST
                    of_sum = np.var(self._logs[i] + self._logs[j]) + _LEAST
                    x = of_difference / of_sum / ratio  # has an F distribution
                    # n candidates that differ only in the question form n (n - 1) / 2 dependent
                    # pairs, which count as n - 1.
                    share = 2 / (1 + len(partners[question]))
                    weight += share * freedom * (0.5 * np.log(x) - np.log1p(x))
        probability = np.exp(weight - weight.max())
        probability /= probability.sum()
        return np.random.default_rng(4).choice(_CORRELATIONS, DRAWS, p=probability)

    def interval(self, question: str, i: int, j: int, widening: float = 1.0) -> tuple[float, float]:
        """The 90% interval of the measure of j less that of i; infinite if a side has one seed."""
        if min(self._counts[[i, j]]) < 2:
            return -math.inf, math.inf
        of_i = self.candidates[i].expected
        of_j = self.candidates[j].expected
        half = widening * self.half_width(question, i, j)
        return of_j * math.exp(-half) - of_i, of_j * math.exp(half) - of_i

    def seeds_to_settle(self, question: str, i: int, j: int) -> int | None:
        """The fewest seeds per side with which the present difference would be evidence.

        None if more than 20 are needed, or if no configuration has two seeds, so that the variance
        between seeds is unknown.
        """
        difference = abs(math.log(self.candidates[j].expected / self.candidates[i].expected))
        if max(self._counts) < 2:
            return None
        for seeds in range(2, _MOST_SEEDS + 1):
            if self.widening * self.half_width(question, i, j, seeds) < difference:
                return seeds
        return None


def _half(draws: Array) -> float:
    """Half the width of the 90% interval around 0 of draws, (n,)."""
    return float(np.quantile(abs(draws), 0.9))


def _draw_variances(squares: Array, freedom: Array, random: np.random.Generator) -> Array:
    """Draws of each configuration's variance, (DRAWS, configurations).

    `squares` and `freedom`: sum of squares and degrees of freedom of each, (configurations,).
    """
    # The grid of (d, s), one cell per row.
    d, scale = (axis.ravel() for axis in np.meshgrid(_DEGREES, _SCALES**2, indexing="ij"))
    squares = squares + _LEAST * freedom
    total_squares = d[:, None] * scale[:, None] + squares
    total_freedom = d[:, None] + freedom
    weight = 0.5 * d[:, None] * np.log(d * scale)[:, None]
    weight = weight - 0.5 * total_freedom * np.log(total_squares)
    weight = (weight + gammaln(total_freedom / 2) - gammaln(d / 2)[:, None]).sum(1)
    probability = np.exp(weight - weight.max())
    cell = random.choice(len(d), DRAWS, p=probability / probability.sum())
    return np.asarray(total_squares[cell] / random.chisquare(total_freedom[cell]))


def compare(field: Field, choice: Candidate, allowed: Sequence[Candidate]) -> list[Comparison]:
    """For each question, compare the choice with the best allowed candidate that differs only in
    it.

    Questions without such a candidate are left out.
    """
    index_by_label = {candidate.label: i for i, candidate in enumerate(field.candidates)}
    i = index_by_label[choice.label]
    allowed_indices = {index_by_label[candidate.label] for candidate in allowed}
    comparisons = []
    for question, partners in field.partners[i].items():
        rivals = allowed_indices & set(partners)
        if rivals:
            j = min(rivals, key=lambda rival: field.candidates[rival].expected)
            comparisons.append(_comparison(field, question, i, j))
    return comparisons


def _comparison(field: Field, question: str, i: int, j: int) -> Comparison:
    """The choice i against j."""
    low, high = field.interval(question, i, j, field.widening)
    seeds = field.seeds_to_settle(question, i, j) if low <= 0 <= high else None
    choice = field.candidates[i]
    rival = field.candidates[j]
    difference = rival.expected - choice.expected
    return Comparison(question, choice, rival, difference, low, high, seeds)
