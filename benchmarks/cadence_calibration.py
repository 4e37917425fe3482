"""How often to retrain: made-up evaluation matrices, and simulated deployments at a price.

    python -m benchmarks cadence_calibration --count 60 --worlds 20     a few minutes of one core

The loss of a model is the difficulty of the period (deviation 0.1 nats), less what its training gains, plus
drift (half as much of the past). Models differ by 0.02 nats, cells by 0.005. A deployment has models of the
first 8 of 36 periods; then each rule says after each period whether to train. Its cost is the extra loss of
the model that serves, summed over periods, and ratio * UNIT for each training. ADWIN takes `river`.
"""

import importlib.util
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from alma.errors import Parser
from alma.report.advice.law import Array
from alma.report.advice.period import Period
from alma.report.advice.retraining import Retraining
from alma.report.losses import Losses
from alma.tables import as_text

SIZES = [(6, 1), (6, 3), (12, 1), (12, 3), (24, 1), (24, 3)]  # periods, seeds
RATIOS = (0.1, 0.3, 0.5, 0.7, 0.9)
UNIT = 0.3  # nats summed over periods: what a model loses in four periods at 0.03 nats a period
WARM, PERIODS = 8, 36
MONTH = Period("month")
_MODEL, _CELL, _HARD = 0.02, 0.005, 0.1  # deviations, in nats


class Drift(NamedTuple):
    """A kind of drift."""

    name: str
    slope: float = 0.0  # nats a period of age
    exponent: float = 1.0  # of age
    jump: float = 0.0  # nats between both sides of the middle of the stream
    season: float = 0.0  # nats between opposite times of a year of 12 periods
    gain: float = 0.0  # nats of a training with e times the data
    level: float = 0.0  # nats that a model loses in its first periods and no more
    grace: int = 0  # periods without any loss

    def extra(self, until: Array, at: Array, periods: int) -> Array:
        """Expected loss above that of a new model, (models, periods)."""
        ages, middle = at - until[:, None], periods // 2
        stale = self.slope * np.maximum(np.abs(ages) - self.grace, 0) ** self.exponent
        stale += self.level * -np.expm1(-np.abs(ages)) + self.season * np.sin(np.pi * ages / 12) ** 2
        stale += self.jump * ((until[:, None] <= middle) != (at <= middle))
        return np.asarray(np.where(ages < 0, 0.5, 1.0) * stale + self.gain * np.log(at / until[:, None]))


STREAMS = [
    Drift("no drift"),
    Drift("no drift, learner improves", gain=0.2),
    Drift("0.005 a period", 0.005),
    Drift("0.03 a period", 0.03),
    Drift("0.03 a period, learner improves", 0.03, gain=0.2),
    Drift("0.05 age^0.5", 0.05, 0.5),
    Drift("one break of 0.3", jump=0.3),
    Drift("season of 0.2", season=0.2),
    Drift("0.1 (1 - e^-age)", level=0.1),
    Drift("0 for 4 periods, then 0.05", 0.05, grace=4),
]


def make_losses(kind: Drift, periods: int, seeds: int, random: np.random.Generator) -> Losses:
    """A made-up evaluation matrix."""
    at = np.arange(1.0, periods + 1)
    level = 3 + random.normal(0, _HARD, periods) - kind.gain * np.log(at)
    common = level + kind.extra(at, at, periods) + random.normal(0, _CELL, (periods, periods))
    made = common + random.normal(0, _MODEL, (seeds, periods, 1))
    return Losses(kind.name, tuple(at), tuple(at), tuple(tuple(map(tuple, each)) for each in made))


def outcome(kind: Drift, periods: int, seeds: int, count: int, seed: int = 0) -> tuple[float, float, float]:
    """Shares: more often than the rarest cadence is advised; that it is enough; the true gain of every period
    over every 4th one over 12 periods to come is in the 90% interval."""
    random, more, enough, held = np.random.default_rng(seed), 0, 0, 0
    at, true = np.arange(periods + 1.0, periods + 13), 0.0
    for age in range(1, 5):  # a new break is not known of
        extra = float(np.diag(kind._replace(jump=0.0).extra(at - age, at, 0)).mean())
        true += extra / 4 if age > 1 else extra / 4 - extra
    for _ in range(count):
        made, cadences = make_losses(kind, periods, seeds, random), [k for k in (1, 2, 4, 8) if k < periods]
        answer = Retraining(made, "nats a token", MONTH, every=cadences)
        (chosen, maybe), gain = answer.choice, answer.gain(1, 4)
        more += chosen != answer.cadences[-1]
        enough += chosen == answer.cadences[-1] and not maybe
        held += gain.low <= true <= gain.high
    return more / count, enough / count, held / count


class World(NamedTuple):
    """A stream with a model for each period that could have been trained, and the price of a training."""

    losses: Array  # (models, periods)
    extra: Array  # expected, (models, periods)
    price: float

    def answer(self, trained: Sequence[int], now: int) -> Retraining:
        """Of what a deployment knows after period `now`."""
        kept, axis = self.losses[np.array(trained) - 1, :now], tuple(np.arange(1.0, now + 1))
        known = Losses("", tuple(map(float, trained)), axis, (tuple(map(tuple, kept)),))
        return Retraining(known, "nats a token", MONTH, price=self.price, periods_to_come=PERIODS - now)

    def served(self, trained: Sequence[int], now: int) -> Array:
        """Losses of the models that were deployed, on periods 2 to now."""
        return np.array([self.losses[max(u for u in trained if u < p) - 1, p - 1] for p in range(2, now + 1)])


Rule = Callable[[World, list[int], int], bool]


def last_time(world: World, trained: list[int], now: int) -> bool:
    """Whether the cadence is over that would be best by the extra losses on the last period with a model."""
    newest, *older = reversed(trained)
    extra = [world.losses[u - 1, newest - 1] - world.losses[newest - 1, newest - 1] for u in older]
    by_age = np.interp(range(1, PERIODS), [newest - u for u in older], extra)
    return now - newest > int(((world.price + by_age.cumsum()) / np.arange(1, PERIODS)).argmin())


def cusum(world: World, trained: list[int], now: int) -> bool:
    """Page (1954), of the losses since training above those of the warm-up: h = 4, k = 0.5."""
    usual, total = world.served(trained, WARM), 0.0
    for loss in world.served(trained, now)[trained[-1] - 1 :]:
        total = max(0.0, total + (loss - usual.mean()) / usual.std(ddof=1) - 0.5)
    return total > 4


def adwin(world: World, trained: list[int], now: int) -> bool:
    """Bifet and Gavalda (2007) by river, with a look at each loss and short windows."""
    from river.drift import ADWIN  # optional

    detector = ADWIN(clock=1, grace_period=5, min_window_length=3)
    for loss in world.served(trained, now):
        detector.update(float(loss))
    return bool(detector.drift_detected)


def at_price(world: World, trained: list[int], now: int) -> bool:
    """What `--price` says."""
    return world.answer(trained, now).plan.first == 0


def regular(every: int, world: World, trained: list[int], now: int) -> bool:
    """A fixed cadence."""
    return now - trained[-1] >= every


RULES: dict[str, Rule] = {"--price": at_price}
RULES |= {f"every {k}": partial(regular, k) for k in (1, 3, 6, 12)} | {"never": partial(regular, PERIODS)}
RULES |= {"as last time": last_time, "CUSUM": cusum}


def deploy(world: World, rule: Rule) -> float:
    """Total cost after the warm-up."""
    trained, cost = list(range(1, WARM + 1)), 0.0
    for now in range(WARM, PERIODS):
        if now > WARM and rule(world, trained, now):
            trained.append(now)
            cost += world.price
        cost += world.extra[trained[-1] - 1, now]
    return float(cost)


def oracle(world: World) -> float:
    """The least cost, by dynamic programming."""
    best = dict.fromkeys(range(1, PERIODS + 1), 0.0)
    for now in reversed(range(WARM, PERIODS)):
        stay = {u: best[u] + world.extra[u - 1, now] for u in range(1, now + 1)}
        again = stay[now] + world.price if now > WARM else math.inf
        best = {u: min(cost, again) for u, cost in stay.items()}
    return float(best[WARM])


def main(arguments: Sequence[str]) -> None:
    """Print both tables."""
    parser = Parser(prog="python -m benchmarks cadence_calibration", description=__doc__)
    parser.add_argument("--count", type=int, default=60, metavar="N", help="matrices of a kind and size")
    parser.add_argument(
        "--worlds", type=int, default=20, metavar="N", help="deployments of a stream and ratio"
    )
    options = parser.parse_args(arguments)
    table = [["stream", *(f"{periods} periods, {seeds} seeds" for periods, seeds in SIZES)]]
    for kind in STREAMS:
        cells = [outcome(kind, *size, options.count) for size in SIZES]
        table.append([kind.name, *(f"{a:.0%} / {b:.0%} ({c:.0%})" for a, b, c in cells)])
    print(f"Retrain more often / the rarest is enough (true gain in 90% interval)\n{as_text(table)}\n")
    rules = RULES | ({"ADWIN": adwin} if importlib.util.find_spec("river") else {})
    print("Mean total cost (two standard errors of --price)" + "" * len(rules))
    print("No ADWIN: river is not installed" if "ADWIN" not in rules else "")
    table, at = [["stream", "ratio", *rules, "oracle"]], np.arange(1.0, PERIODS + 1)
    for kind in STREAMS:
        for ratio in RATIOS:
            worlds = []
            for seed in range(options.worlds):
                made = make_losses(kind, PERIODS, 1, np.random.default_rng(seed))
                worlds.append(World(np.array(made.seeds[0]), kind.extra(at, at, PERIODS), ratio * UNIT))
            costs = {name: [deploy(world, rule) for world in worlds] for name, rule in rules.items()}
            costs["oracle"] = list(map(oracle, worlds))
            means = [f"{np.mean(each):.2f}" for each in costs.values()]
            means[0] += f" ({2 * np.std(costs['--price']) / math.sqrt(len(worlds)):.2f})"
            table.append([kind.name, f"{ratio:g}", *means])
    print(as_text(table))
