"""How often `alma advise` says to retrain more often: made-up evaluation matrices with and without drift.

    python -m benchmarks cadence_calibration --count 100 --seed 0     half a minute of one core

The loss of a model is the difficulty of the period, less what its training gains, plus drift: a loss in each
period of age (half as much of the past), even, or by a walk. Models differ by 0.02 nats, cells by 0.005.
Without drift the share with evidence should be 10% at most. With drift the interval of the gain of training
in every period over every 2nd one should hold the true gain in 90%; "every period" is the right answer.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from alma.errors import Parser
from alma.report.advice.cadence import NO_EVIDENCE, retraining
from alma.report.age import Losses
from alma.tables import as_text

SIZES = [(6, 1), (6, 3), (12, 1), (12, 3), (24, 1)]
"""Periods, seeds."""
_MODEL, _CELL = 0.02, 0.005  # deviations, in nats


class Drift(NamedTuple):
    """A kind of matrices."""

    name: str
    slope: float = 0.0  # nats a period of age
    exponent: float = 1.0  # of age
    uneven: float = 0.0  # deviation of a step of the walk, in nats
    gain: float = 0.0  # nats of a training with e times the data
    waiting: int = 1  # a model every so many periods


KINDS = [
    Drift("no drift"),
    Drift("no drift, loss falls", gain=0.2),
    Drift("no drift, loss falls, w = 2", gain=0.2, waiting=2),
    Drift("0.01 a period", 0.01),
    Drift("0.03 a period", 0.03),
    Drift("0.03 a period, uneven", 0.03, uneven=0.02),
    Drift("0.05 age^0.5", 0.05, 0.5),
]


def make_losses(kind: Drift, periods: int, seeds: int, random: np.random.Generator) -> Losses:
    """A made-up evaluation matrix."""
    at, trained = np.arange(1.0, periods + 1), np.arange(float(kind.waiting), periods + 1, kind.waiting)
    ages = at - trained[:, None]
    walk = kind.uneven * random.standard_normal(periods).cumsum()
    stale = kind.slope * np.abs(ages) ** kind.exponent + (walk - walk[trained.astype(int) - 1, None])
    stale *= np.where(ages < 0, 0.5, 1.0)
    common = 3 + random.normal(0, 0.1, periods) + stale - kind.gain * np.log(trained)[:, None]
    common += random.normal(0, _CELL, common.shape)
    made = common + random.normal(0, _MODEL, (seeds, len(trained), 1))
    return Losses(kind.name, tuple(trained), tuple(at), tuple(tuple(map(tuple, each)) for each in made))


def outcome(kind: Drift, periods: int, seeds: int, count: int, seed: int = 0) -> tuple[float, float, float]:
    """Shares with the advice to train in every period, to train more rarely, and with the true gain of every
    period over every 2nd one in its interval."""
    random, every, rarely, held = np.random.default_rng(seed), 0, 0, 0
    true = kind.slope * (2**kind.exponent - 1) / 2
    for _ in range(count):
        answer = retraining(make_losses(kind, periods, seeds, random), "nats a token", "a period")
        _, low, high = answer.against_first(answer.cadences[1])
        every += answer.advice == answer.cadences[0].name
        rarely += answer.advice not in (answer.cadences[0].name, NO_EVIDENCE)
        held += low <= true <= high
    return every / count, rarely / count, held / count


def table(count: int, seed: int) -> Iterator[list[str]]:
    """A row for each kind and size."""
    yield ["drift", "periods", "seeds", '"every period"', '"more rarely"', "true gain in 90% interval"]
    for kind in KINDS:
        for periods, seeds in SIZES:
            every, rarely, held = outcome(kind, periods, seeds, count, seed)
            shown = "" if kind.gain else f"{held:.0%}"  # less training counts as age
            yield [kind.name, str(periods), str(seeds), f"{every:.0%}", f"{rarely:.0%}", shown]


def main(arguments: Sequence[str]) -> None:
    """Print the table."""
    parser = Parser(prog="python -m benchmarks cadence_calibration", description=__doc__)
    parser.add_argument("--count", type=int, default=100, metavar="N", help="of a kind (default: 100)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the matrices (default: 0)")
    options = parser.parse_args(arguments)
    print(f"How often to retrain? {options.count} matrices of each kind")
    print(as_text(list(table(options.count, options.seed))))
