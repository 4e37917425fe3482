"""Made-up streams for `benchmarks.cadence_table`: how much worse an old model is, and its losses.

A stream travels by `DriftingStream.rate` in each period. A model trained until period u loses
`distance^exponent` on period p, where the distance is what the stream travelled between them. With
rates of one number the loss is linear in age; a rate that begins late is drift that has just begun.
"""

import math
from dataclasses import dataclass

import numpy as np

from alma.report.advice.law import Array
from alma.report.losses import Losses

HORIZON = 12
"""Periods to come, on which rules are judged."""


@dataclass(frozen=True)
class DriftingStream:
    """A kind of stream, in nats and months."""

    name: str
    rate: float = 0.0
    """Distance that the stream travels in a month."""
    change: int = 0
    """Last month of `rate`; 0: it holds for all months."""
    later_rate: float = 0.0
    """Distance in a month after `change`."""
    exponent: float = 1.0
    """Of distance."""
    level: float = 0.0
    """Loss that a model reaches with age and does not exceed."""
    grace: int = 0
    """Months in which a model loses nothing."""
    steps: float = 0.0
    """Size of a step every 6 months; its month differs between worlds."""
    jump: float = 0.0
    """Size of one break, in the middle of the history."""
    season: float = 0.0
    """Loss between opposite times of the year."""
    gain: float = 0.0
    """What training on e times the data gains."""
    past: float = 0.5
    """Loss on the past, as a share of that on periods to come."""
    months: int = 12
    """Of history."""
    models_every: int = 1
    """Months between two models of the history."""
    missing: float = 0.0
    """Share of cells off the diagonal that were not measured."""
    model_noise: float = 0.02
    hardness: float = 0.0
    """Correlation of the difficulty of a month with that of the month before."""
    irregular: bool = False
    """Whether models and tests are up to 10 days early or late."""
    seeds: int = 1


STREAMS = (
    DriftingStream("linear .01", 0.01),
    DriftingStream("linear .003", 0.003),
    DriftingStream("linear .04", 0.04),
    DriftingStream("sqrt", 0.03**2, exponent=0.5),
    DriftingStream("saturating", level=0.1),
    DriftingStream("hard months (AR .8)", 0.01, hardness=0.8),
    DriftingStream("4 models", 0.01, models_every=3),
    DriftingStream("24 models", 0.01, months=24),
    DriftingStream("40% missing", 0.01, missing=0.4),
    DriftingStream("irregular days", 0.01, irregular=True),
    DriftingStream("season", 0.005, season=0.05),
    DriftingStream("learner that improves", 0.01, gain=0.2),
    DriftingStream("models differ by .04", 0.01, model_noise=0.04),
    DriftingStream("3 seeds", 0.01, seeds=3),
    DriftingStream("nothing forgotten", 0.01, past=0.0),
    DriftingStream("no drift"),
    DriftingStream("no drift, 24 models", months=24),
    DriftingStream("no drift, learner improves", gain=0.2),
    DriftingStream("one break", jump=0.3),
    DriftingStream("2 months of grace", 0.02, grace=2),
    DriftingStream("onset at month 8 of 12", change=8, later_rate=0.02),
    DriftingStream(".005, from month 8 on .02", 0.005, change=8, later_rate=0.02),
    DriftingStream(".03, from month 8 on .01", 0.03, change=8, later_rate=0.01),
    DriftingStream("onset at month 18 of 24", change=18, later_rate=0.02, months=24),
    DriftingStream("drift ends at month 6", 0.02, change=6),
    DriftingStream("a step every 6 months", steps=0.1),
)


@dataclass(frozen=True)
class KnownWorld:
    """One history of a stream, with all that comes after it."""

    months: int
    """Of history."""
    losses: Array
    """Of each model on each month, (months + HORIZON, same), with what comes later."""
    extra: Array
    """Expected loss above that of a new model, of the same shape."""
    history: Losses
    """The history as it was measured."""

    def cost(self, trainings: list[int], price: float) -> float:
        """Extra loss over the months to come, and the price of `trainings`, months from now."""
        served = [self.months] * HORIZON
        for training in sorted(trainings):
            served[training:] = [self.months + training] * (HORIZON - training)
        rows = np.array(served) - 1
        columns = self.months + np.arange(HORIZON)
        return float(self.extra[rows, columns].sum()) + price * len(trainings)


def make_world(stream: DriftingStream, seed: int) -> KnownWorld:
    """The world of a stream with this seed."""
    random = np.random.default_rng([seed, *stream.name.encode()])
    count = stream.months + HORIZON
    at = np.arange(1.0, count + 1)
    if stream.irregular:
        at = at + random.uniform(-0.33, 0.33, count)
    extra = _extra(stream, at, phase=int(random.integers(6)))
    hard = _difficulty(stream, random, count) - stream.gain * np.log(at)
    cells = 3 + hard + extra + random.normal(0, 0.005, (count, count))
    losses = cells + random.normal(0, stream.model_noise, (stream.seeds, count, 1))
    measured = losses[:, : stream.months, : stream.months].copy()
    if stream.missing:
        lost = random.random(measured.shape[1:]) < stream.missing
        np.fill_diagonal(lost, False)
        measured[:, lost] = math.nan
    rows = range(stream.models_every - 1, stream.months, stream.models_every)
    seeds = []
    for matrix in measured:
        seeds.append(tuple(tuple(matrix[row].tolist()) for row in rows))
    until = tuple(at[list(rows)].tolist())
    history = Losses(stream.name, until, tuple(at[: stream.months].tolist()), tuple(seeds))
    return KnownWorld(stream.months, losses.mean(0), extra, history)


def _extra(stream: DriftingStream, at: Array, phase: int) -> Array:
    """Expected loss above that of a new model, (models, months).

    at      times of models and tests, in months
    phase   months before the first step
    """
    ages = at - at[:, None]
    travelled = stream.rate * at
    if stream.change:
        travelled = stream.rate * np.minimum(at, stream.change)
        travelled += stream.later_rate * np.maximum(at - stream.change, 0)
    distance = np.abs(travelled - travelled[:, None])
    if stream.grace:
        distance = stream.rate * np.maximum(np.abs(ages) - stream.grace, 0)
    steps = np.floor((at + phase) / 6)
    extra = distance**stream.exponent + stream.steps * np.abs(steps - steps[:, None])
    extra += stream.level * -np.expm1(-np.abs(ages) / 2)
    extra += stream.season * np.sin(np.pi * ages / 12) ** 2
    after = at > stream.months // 2
    extra += stream.jump * (after != after[:, None])
    share = np.where(ages < 0, stream.past, 1.0)
    return np.asarray(share * extra + stream.gain * np.log(at / at[:, None]))


def _difficulty(stream: DriftingStream, random: np.random.Generator, count: int) -> Array:
    """The difficulty of each month, deviation 0.1 nats, (count,)."""
    fresh = random.normal(0, 0.1, count)
    hard = [float(fresh[0])]
    for value in fresh[1:]:
        kept = stream.hardness * hard[-1]
        hard.append(kept + math.sqrt(1 - stream.hardness**2) * float(value))
    return np.array(hard)
