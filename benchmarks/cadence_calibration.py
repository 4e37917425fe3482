"""How often to retrain: rules judged on made-up streams, evaluation matrices, and deployments.

    nice -n 10 python -m benchmarks cadence_calibration --out results/cadence
    python -m benchmarks cadence_calibration --count 60 --worlds 20

The first prints the table of `benchmarks.cadence_table`; started again, it goes on where it
stopped. The second prints two more tables in a few minutes of one core. There the loss of a model
is the difficulty of the period (deviation 0.1 nats), less what its training gains, plus drift (half
as much on the past). Models differ by 0.02 nats, cells by 0.005. A deployment has models of the
first 8 of 36 periods; then each rule says after each period whether to train. Its cost is the extra
loss of the model that serves, summed over periods, and ratio * UNIT for each training. The rule
ADWIN needs `river`.
"""

import importlib.util
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from alma.errors import Parser
from alma.report.advice.law import Array
from alma.report.advice.period import Period
from alma.report.advice.retraining import Retraining
from alma.report.losses import Losses
from alma.report.metric import NATS_A_TOKEN
from alma.tables import as_text
from benchmarks.cadence_table import cells, table

SIZES = [(6, 1), (6, 3), (12, 1), (12, 3), (24, 1), (24, 3)]  # periods, seeds
RATIOS = (0.1, 0.3, 0.5, 0.7, 0.9)
UNIT = 0.3
"""Nats summed over periods: what a model loses in four periods at 0.03 nats a period."""
WARM = 8
"""Periods with a model each, before the rules decide."""
PERIODS = 36
MONTH = Period("month")
HORIZON = 12
"""Periods to come over which gains are compared."""
_MODEL = 0.02  # deviation of models, in nats
_CELL = 0.005  # deviation of cells
_HARD = 0.1  # deviation of the difficulty of periods


class Drift(NamedTuple):
    """A kind of drift of a stream."""

    name: str
    slope: float = 0.0
    """Nats a period of age."""
    exponent: float = 1.0
    """Of age."""
    jump: float = 0.0
    """Nats between both sides of the middle of the stream."""
    season: float = 0.0
    """Nats between opposite times of a year of 12 periods."""
    gain: float = 0.0
    """Nats of a training with e times the data."""
    level: float = 0.0
    """Nats that a model loses in its first periods and no more."""
    grace: int = 0
    """Periods without any loss."""

    def extra(self, until: Array, at: Array, periods: int) -> Array:
        """Expected loss above that of a new model, (models, periods)."""
        until = until[:, None]
        ages = at - until
        middle = periods // 2
        stale = self.slope * np.maximum(np.abs(ages) - self.grace, 0) ** self.exponent
        level = self.level * -np.expm1(-np.abs(ages))
        stale += level + self.season * np.sin(np.pi * ages / 12) ** 2
        stale += self.jump * ((until <= middle) != (at <= middle))
        share = np.where(ages < 0, 0.5, 1.0)  # age counts half on the past
        return np.asarray(share * stale + self.gain * np.log(at / until))


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
    difficulty = 3 + random.normal(0, _HARD, periods) - kind.gain * np.log(at)
    common = difficulty + kind.extra(at, at, periods) + random.normal(0, _CELL, (periods, periods))
    losses = common + random.normal(0, _MODEL, (seeds, periods, 1))
    return Losses(kind.name, tuple(at), tuple(at), _as_tuples(losses))


def _as_tuples(losses: Array) -> tuple[tuple[tuple[float, ...], ...], ...]:
    """(seeds, models, periods) in the form of `Losses`."""
    return tuple(tuple(map(tuple, seed)) for seed in losses)


class Outcome(NamedTuple):
    """What `alma advise` says about made-up matrices of one kind, as shares of them."""

    more_often: float
    """It advises a higher frequency than the rarest cadence."""
    rarest: float
    """It says that the rarest cadence is enough."""
    held: float
    """Its interval has the true gain of every period over every 4th one."""


def outcome(kind: Drift, periods: int, seeds: int, count: int, seed: int = 0) -> Outcome:
    """The outcome of `count` made-up matrices."""
    random = np.random.default_rng(seed)
    true_gain = _true_gain(kind, periods)
    cadences = [k for k in (1, 2, 4, 8) if k < periods]
    more_often = 0
    rarest = 0
    held = 0
    for _ in range(count):
        losses = make_losses(kind, periods, seeds, random)
        retraining = Retraining(losses, NATS_A_TOKEN, MONTH, every=cadences)
        every, is_open = retraining.choice
        gain = retraining.gain(1, 4)
        if every != retraining.cadences[-1]:
            more_often += 1
        elif not is_open:
            rarest += 1
        held += gain.low <= true_gain <= gain.high
    return Outcome(more_often / count, rarest / count, held / count)


def _true_gain(kind: Drift, periods: int) -> float:
    """What every period gains over every 4th one, on periods to come without a new break."""
    at = np.arange(periods + 1.0, periods + HORIZON + 1)
    gain = 0.0
    for age in range(1, 5):
        extra = float(np.diag(kind._replace(jump=0.0).extra(at - age, at, 0)).mean())
        difference = extra / 4
        if age == 1:
            difference -= extra
        gain += difference
    return gain


class World(NamedTuple):
    """A stream with a model for each period that could be trained, and the price of a training."""

    losses: Array
    """(models, periods)"""
    extra: Array
    """Expected extra loss, (models, periods)."""
    price: float

    def retraining(self, trained: Sequence[int], now: int) -> Retraining:
        """The advice by what a deployment knows after period `now`."""
        losses = self.losses[np.array(trained) - 1, :now]
        models = tuple(map(float, trained))
        periods = tuple(np.arange(1.0, now + 1))
        return Retraining(
            Losses("", models, periods, _as_tuples(losses[None])),
            NATS_A_TOKEN,
            MONTH,
            price=self.price,
            periods_to_come=PERIODS - now,
        )

    def served(self, trained: Sequence[int], now: int) -> Array:
        """Losses of the models in service on periods 2 to `now`."""
        losses = []
        for period in range(2, now + 1):
            model = max(until for until in trained if until < period)
            losses.append(self.losses[model - 1, period - 1])
        return np.array(losses)


Rule = Callable[[World, list[int], int], bool]
"""Whether to train after period `now`, in a world with models trained until some periods."""


def last_time(world: World, trained: list[int], now: int) -> bool:
    """Whether the cadence is over that would be best by the last period with a model of its own."""
    newest, *older = reversed(trained)
    losses = world.losses[:, newest - 1]
    extra = [losses[until - 1] - losses[newest - 1] for until in older]
    by_age = np.interp(range(1, PERIODS), [newest - until for until in older], extra)
    costs = (world.price + by_age.cumsum()) / np.arange(1, PERIODS)  # per period, by cadence - 1
    return now - newest > int(costs.argmin())


def cusum(world: World, trained: list[int], now: int) -> bool:
    """Page (1954), of losses since training above those of the warm-up: h = 4, k = 0.5."""
    usual = world.served(trained, WARM)
    since_training = world.served(trained, now)[trained[-1] - 1 :]
    total = 0.0
    for loss in since_training:
        total = max(0.0, total + (loss - usual.mean()) / usual.std(ddof=1) - 0.5)
    return total > 4


def adwin(world: World, trained: list[int], now: int) -> bool:
    """Bifet and Gavalda (2007) by river, tested at each loss, with short windows."""
    from river.drift import ADWIN  # optional

    detector = ADWIN(clock=1, grace_period=5, min_window_length=3)
    for loss in world.served(trained, now):
        detector.update(float(loss))
    return bool(detector.drift_detected)


def at_price(world: World, trained: list[int], now: int) -> bool:
    """Whether the plan of `--price` trains now."""
    return world.retraining(trained, now).plan.first == 0


def regular(every: int, world: World, trained: list[int], now: int) -> bool:
    """A fixed cadence."""
    return now - trained[-1] >= every


RULES: dict[str, Rule] = {
    "--price": at_price,
    "every 1": partial(regular, 1),
    "every 3": partial(regular, 3),
    "every 6": partial(regular, 6),
    "every 12": partial(regular, 12),
    "never": partial(regular, PERIODS),
    "as last time": last_time,
    "CUSUM": cusum,
}


def deploy(world: World, rule: Rule) -> float:
    """Total cost after the warm-up."""
    trained = list(range(1, WARM + 1))
    cost = 0.0
    for now in range(WARM, PERIODS):
        if now > WARM and rule(world, trained, now):
            trained.append(now)
            cost += world.price
        cost += world.extra[trained[-1] - 1, now]
    return float(cost)


def oracle(world: World) -> float:
    """The least cost, by dynamic programming."""
    best = dict.fromkeys(range(1, PERIODS + 1), 0.0)  # from a period on, by the serving model
    for now in reversed(range(WARM, PERIODS)):
        stay = {u: best[u] + world.extra[u - 1, now] for u in range(1, now + 1)}
        train = stay[now] + world.price if now > WARM else math.inf
        best = {u: min(cost, train) for u, cost in stay.items()}
    return float(best[WARM])


def main(arguments: Sequence[str]) -> None:
    """Print the table of rules, or with --count or --worlds those of matrices and deployments."""
    parser = Parser(prog="python -m benchmarks cadence_calibration", description=__doc__)
    add = parser.add_argument
    add("--count", type=int, default=0, metavar="N", help="matrices of a kind and size")
    add("--worlds", type=int, default=0, metavar="N", help="deployments of a stream and ratio")
    add("--out", type=Path, metavar="FOLDER", help="keep cells here (default: nowhere)")
    add("--jobs", type=int, default=2, metavar="N", help="processes (default: 2)")
    add("--seed", type=int, default=1000, metavar="N", help="of the first world (default: 1000)")
    add("--per-kind", type=int, default=16, metavar="N", help="worlds of a kind (default: 16)")
    options = parser.parse_args(arguments)
    if options.count:
        _print_outcomes(options.count)
    if options.worlds:
        _print_costs(options.worlds)
    if not options.count and not options.worlds:
        measured = list(cells(options.out, options.per_kind, options.seed, options.jobs))
        print("Cost over that of the best fixed cadence, at prices .005 / .02 / .1 nats")
        print(as_text(table(measured)))


def _print_outcomes(count: int) -> None:
    """The table of evaluation matrices."""
    print("Retrain more often / the rarest is enough (true gain in 90% interval)")
    print(as_text(list(outcomes(count))), end="\n\n")


def _print_costs(worlds: int) -> None:
    """The table of deployments."""
    rules = dict(RULES)
    if importlib.util.find_spec("river"):
        rules["ADWIN"] = adwin
    print("Mean total cost (two standard errors of --price)")
    print("" if "ADWIN" in rules else "No ADWIN: river is not installed")
    print(as_text(list(total_costs(rules, worlds))))


def outcomes(count: int) -> Iterator[list[str]]:
    """The outcomes of each kind of drift and size of matrices."""
    yield ["stream", *(f"{periods} periods, {seeds} seeds" for periods, seeds in SIZES)]
    for kind in STREAMS:
        cells = []
        for periods, seeds in SIZES:
            shares = outcome(kind, periods, seeds, count)
            cells.append(f"{shares.more_often:.0%} / {shares.rarest:.0%} ({shares.held:.0%})")
        yield [kind.name, *cells]


def total_costs(rules: dict[str, Rule], count: int) -> Iterator[list[str]]:
    """The mean cost of each rule, and the least cost, in `count` worlds of each kind and ratio."""
    yield ["stream", "ratio", *rules, "oracle"]
    for kind in STREAMS:
        for ratio in RATIOS:
            worlds = [make_world(kind, ratio, seed) for seed in range(count)]
            costs: dict[str, list[float]] = {}
            for name, rule in rules.items():
                costs[name] = [deploy(world, rule) for world in worlds]
            costs["oracle"] = [oracle(world) for world in worlds]
            means = [f"{np.mean(of_worlds):.2f}" for of_worlds in costs.values()]
            means[0] += f" ({2 * np.std(costs['--price']) / math.sqrt(len(worlds)):.2f})"
            yield [kind.name, f"{ratio:g}", *means]


def make_world(kind: Drift, ratio: float, seed: int) -> World:
    """A world with a price of `ratio` units."""
    losses = make_losses(kind, PERIODS, 1, np.random.default_rng(seed))
    at = np.arange(1.0, PERIODS + 1)
    return World(np.array(losses.seeds[0]), kind.extra(at, at, PERIODS), ratio * UNIT)
