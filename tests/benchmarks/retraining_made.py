"""Made-up streams and histories for tests of the rules of retraining."""

import numpy as np
import pytest

from alma.report.advice.law import Array
from alma.report.advice.period import Period
from alma.report.metric import Metric
from benchmarks.retraining import rules
from benchmarks.retraining.history import WARM, History, RetrainingStream, Rule

ERROR = Metric("error", "points", bounds=(0.0, 100.0), in_points=True)
START = WARM - 1
OF_RIVER = ("ADWIN", "Page-Hinkley", "KSWIN")


def made(losses: Array) -> RetrainingStream:
    """A stream of months with these losses, (models, periods)."""
    return RetrainingStream("made", losses, ERROR, Period("month"))


def linear(
    slope: float, periods: int = 48, level: float = 1.0, noise: float = 0.0
) -> RetrainingStream:
    """A stream whose models lose `slope` a period of age on periods to come, noise by cell."""
    at = np.arange(periods)
    ages = np.abs(at - at[:, None])
    random = np.random.default_rng(0)
    return made(level + slope * ages + noise * random.normal(size=(periods, periods)))


def broken(at: int, jump: float, periods: int = 48, noise: float = 0.01) -> RetrainingStream:
    """A stream that breaks at a period, with noise by period."""
    random = np.random.default_rng(1)
    until = np.arange(periods)[:, None]
    tested = np.arange(periods)
    stale = jump * ((until < at) != (tested < at))
    return made(1 + stale + noise * random.normal(size=periods))


def fading(seed: int) -> RetrainingStream:
    """Shares of errors of .3, and .02 more by period of age, with noise of .03 by cell."""
    periods = 24
    at = np.arange(periods)
    noise = np.random.default_rng(seed).normal(size=(periods, periods))
    shares = 0.3 + 0.02 * np.maximum(at - at[:, None], 0) + 0.03 * noise
    return made(100 * np.clip(shares, 0.01, 0.99))


def bursts(seed: int) -> RetrainingStream:
    """A world that moves in one or two periods of each 12; models lose by the way it has gone."""
    periods = 36
    random = np.random.default_rng(seed)
    moves = np.zeros(periods)
    for first in range(0, periods, 12):
        for at in random.integers(first + 2, first + 12, 2).tolist():
            moves[at] = random.uniform(0.25, 0.75)
    places = np.cumsum(moves)
    ways = np.abs(places - places[:, None])
    return made(1 + ways + 0.02 * random.normal(size=(periods, periods)))


def circles(seed: int) -> RetrainingStream:
    """Drift of the concept: which points are within a circle that jumps every 6 periods or so."""
    random = np.random.default_rng(seed)
    places = ((0.2, 0.15), (0.4, 0.2), (0.6, 0.25), (0.8, 0.3))  # of x, and radius
    place = int(random.integers(4))
    examples = []
    while len(examples) < 36:
        x, radius = places[place]
        for _ in range(int(random.integers(4, 9))):
            points = random.uniform(size=(400, 2))
            is_within = ((points - (x, 0.5)) ** 2).sum(1) < radius**2
            examples.append((points, is_within))
        place = (place + int(random.integers(1, 4))) % 4
    return _of_classifiers(examples[:36])


def turning_classes(seed: int) -> RetrainingStream:
    """Drift of the inputs: two Gaussian classes that turn about the origin."""
    random = np.random.default_rng(seed)
    examples = []
    for period in range(36):
        angle = 0.12 * period
        centre = 1.2 * np.array([np.cos(angle), np.sin(angle)])
        is_first = random.uniform(size=400) < 0.5
        signs = np.where(is_first, 1, -1)[:, None]
        examples.append((signs * centre + random.normal(size=(400, 2)), is_first))
    return _of_classifiers(examples)


def _of_classifiers(examples: list[tuple[Array, Array]]) -> RetrainingStream:
    """Errors in percent of a logistic regression, on squares too, for each period of examples.

    The first half of the points of a period train, the others test.
    """
    linear_model = pytest.importorskip("sklearn.linear_model")
    rows = []
    features = []
    for points, _ in examples:
        product = points[:, :1] * points[:, 1:]
        features.append(np.column_stack([points, points**2, product]))
    for inputs, (_, classes) in zip(features, examples, strict=True):
        model = linear_model.LogisticRegression(C=10, max_iter=300)
        model.fit(inputs[:200], classes[:200])
        row = []
        for tested, (_, truth) in zip(features, examples, strict=True):
            row.append(100 * float(np.mean(model.predict(tested[200:]) != truth[200:])))
        rows.append(row)
    return made(np.maximum(rows, 0.1))


def least_possible_cost(stream: RetrainingStream, start: int, end: int, price: float) -> float:
    """The cost of the best schedule in hindsight: CARA's oracle, by dynamic programming."""
    least = {}  # by the period of a training, after which the costs are
    for model in reversed(range(start, end)):
        candidates = []
        served = 0.0
        for at in range(model + 1, end + 1):
            served += float(stream.losses[model, at])
            later = price + least[at] if at < end else 0.0
            candidates.append(served + later)
        least[model] = min(candidates)
    return least[start]


def history_at(
    stream: RetrainingStream, now: int, price: float = 0.1, *, trained: tuple = ()
) -> History:
    """The history with the models of the warm-up and those `trained` since."""
    return History(stream, [*range(WARM), *trained], START, now, price)


def rule_named(name: str) -> Rule:
    """A rule; the test is skipped where a package that the rule needs is missing."""
    if name in OF_RIVER:
        pytest.importorskip("river")
    if name == "UPF":
        pytest.importorskip("sklearn")
    return rules.RULES[name]


def decisions(stream: RetrainingStream, rule: Rule, price: float, end: int = 35) -> list[int]:
    """The periods in which a rule trains."""
    trained = list(range(WARM))
    for now in range(WARM, end + 1):
        if rule(History(stream, trained, START, now, price)):
            trained.append(now)
    return trained[WARM:]
