"""Rules of when to retrain, judged on made-up streams (`benchmarks.cadence_streams`).

A rule knows a history and decides on the 12 months to come. Its cost is the extra loss of the model
that serves, summed over months, and the price of each training. It is divided by the cost of the
best fixed cadence, which is known only afterwards; where that is 0, the difference counts.
"""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from alma.files import atomic_write
from alma.report.advice.law import Array
from alma.report.advice.period import Period
from alma.report.advice.retraining import Retraining
from alma.report.metric import NATS_A_TOKEN
from alma.tables import Table
from benchmarks.cadence_streams import HORIZON, STREAMS, DriftingStream, KnownWorld, make_world

PRICES = (0.005, 0.02, 0.1)
_WORSE = 1.05  # loss, as a multiple of that at the last training, at which a simple rule trains

Rule = Callable[[KnownWorld, float], list[int]]
"""Months from now after which to train, of a world and the price of a training."""


def planned(first: int | None, every: int) -> list[int]:
    """The trainings of a plan, in months from now."""
    return [] if first is None else list(range(first, HORIZON, every))


def plan(world: KnownWorld, price: float) -> list[int]:
    """The plan of `alma advise --price`."""
    retraining = Retraining(world.history, NATS_A_TOKEN, Period("month"), price=price)
    return planned(retraining.plan.first, retraining.plan.every)


def cara_like(world: KnownWorld, price: float) -> list[int]:
    """The cadence of least staleness and price on the history, after CARA (arXiv 2310.04216).

    The staleness of a model is its loss above that of the model that was trained on the month.
    """
    values = np.mean(world.history.seeds, axis=0)
    at = np.rint(world.history.until).astype(int)
    fresh = {int(until): row for row, until in enumerate(at)}
    staleness: dict[int, list[float]] = {}
    for row, until in enumerate(at):
        for month in range(until + 1, world.months + 1):
            if month in fresh:
                extra = values[row, month - 1] - values[fresh[month], month - 1]
                staleness.setdefault(month - until, []).append(float(extra))
    ages = np.arange(1, HORIZON + 1)
    measured = [age for age in sorted(staleness) if np.isfinite(staleness[age]).any()]
    means = [float(np.nanmean(staleness[age])) for age in measured]
    by_age = np.interp(ages, [0, *measured], [0.0, *means])
    costs = (by_age.cumsum() + price) / ages
    costs[-1] -= price / HORIZON  # of 12 months without a training
    best = int(costs.argmin()) + 1
    return planned(best, best)


def worse_than_last_time(world: KnownWorld, price: float) -> list[int]:
    """Train when the loss is 5% above that of the first month after the last training."""
    trainings: list[int] = []
    model = world.months
    usual = math.nan
    for month in range(HORIZON):
        loss = float(world.losses[model - 1, world.months + month])
        if math.isnan(usual):
            usual = loss
        elif loss > _WORSE * usual and month + 1 < HORIZON:
            trainings.append(month + 1)
            model = world.months + month + 1
            usual = math.nan
    return trainings


def regular(every: int, world: KnownWorld, price: float) -> list[int]:
    """A fixed cadence."""
    return planned(every, every)


RULES: dict[str, Rule] = {
    "plan": plan,
    "CARA-like": cara_like,
    "every 2nd": partial(regular, 2),
    "every 3rd": partial(regular, 3),
    "every 6th": partial(regular, 6),
    "always": partial(regular, 1),
    "never": partial(regular, HORIZON),
    "5% worse": worse_than_last_time,
}


class RulesOnStream(NamedTuple):
    """The rules on one stream at one price."""

    stream: str
    price: float
    best: float
    """Mean cost of the best fixed cadence."""
    costs: dict[str, float]
    """Mean cost of each rule."""
    errors: dict[str, float]
    """Their standard errors over worlds."""

    def ratio(self, rule: str) -> float:
        """Cost over that of the best fixed cadence; NaN where that is 0."""
        return self.costs[rule] / self.best if self.best > 1e-9 else math.nan

    def text(self, rule: str) -> str:
        """The ratio, or the difference after a plus where the best cost is 0."""
        ratio = self.ratio(rule)
        return f"+{self.costs[rule]:.2f}" if math.isnan(ratio) else f"{ratio:.2f}"


def best_fixed(worlds: Sequence[KnownWorld], price: float) -> float:
    """The mean cost of the fixed cadence that is best for a stream, in hindsight."""
    means = []
    for every in range(1, HORIZON + 1):
        means.append(np.mean([world.cost(planned(every, every), price) for world in worlds]))
    return float(min(means))


def measure(stream: DriftingStream, price: float, count: int, seed: int) -> RulesOnStream:
    """A cell, of `count` worlds from seed `seed` on."""
    worlds = [make_world(stream, seed + i) for i in range(count)]
    costs = {}
    errors = {}
    for name, rule in RULES.items():
        of_worlds = [world.cost(rule(world, price), price) for world in worlds]
        costs[name] = float(np.mean(of_worlds))
        errors[name] = float(np.std(of_worlds) / math.sqrt(count))
    return RulesOnStream(stream.name, price, best_fixed(worlds, price), costs, errors)


def cells(out: Path | None, count: int, seed: int, jobs: int) -> Iterator[RulesOnStream]:
    """All cells in order; those in the folder `out` are read, the others are kept there."""
    places = [(stream, price) for stream in STREAMS for price in PRICES]
    with ProcessPoolExecutor(jobs) as pool:
        futures = []
        for index, (stream, price) in enumerate(places):
            file = out / f"{index}_{count}_{seed}.json" if out else None
            futures.append(pool.submit(_kept, file, stream, price, count, seed))
        for future in futures:
            yield future.result()


def _kept(
    file: Path | None, stream: DriftingStream, price: float, count: int, seed: int
) -> RulesOnStream:
    """A cell from its file if there is one; else it is measured and written."""
    if file and file.exists():
        return RulesOnStream(**json.loads(file.read_text()))
    cell = measure(stream, price, count, seed)
    if file:
        file.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(file) as target:
            json.dump(cell._asdict(), target)
    return cell


def table(measured: Sequence[RulesOnStream]) -> Table:
    """A row for each stream, with the prices in one cell, and the mean of all ratios."""
    rows = [["stream", *RULES]]
    for stream in STREAMS:
        of_stream = [cell for cell in measured if cell.stream == stream.name]
        row = [stream.name]
        for rule in RULES:
            row.append(" / ".join(cell.text(rule) for cell in of_stream))
        rows.append(row)
    means = []
    for rule in RULES:
        ratios: Array = np.array([cell.ratio(rule) for cell in measured])
        means.append(f"{np.nanmean(ratios):.3f}")
    compared = sum(not math.isnan(cell.ratio("plan")) for cell in measured)
    return [*rows, [f"mean of {compared} cells", *means]]
