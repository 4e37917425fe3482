"""The cost of each rule on a stream, at several prices and from several start points."""

import csv
import io
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from alma.errors import UserError
from alma.files import atomic_write
from benchmarks.retraining.history import WARM, RetrainingStream, cost
from benchmarks.retraining.rules import RULES, every

RATIOS = (0.05, 0.2, 1.0)
"""Prices of a training, as shares of a typical loss: the mean of new models in the warm-up."""
HORIZON = 24
"""Periods over which costs are summed; half as many on a stream without two such spans."""
_COLUMNS = ("stream", "rule", "ratio", "start", "cost", "best", "cadence")


class RuleCost(NamedTuple):
    """The total cost of a rule."""

    stream: str
    rule: str
    ratio: float
    """Of the price of a training to a typical loss."""
    start: int
    """Last period of the warm-up."""
    cost: float
    best: float
    """Cost of the fixed cadence that is best in hindsight."""
    cadence: int
    """That cadence, in periods; the number of periods to come: never."""

    @property
    def over_best(self) -> float:
        """Total cost, where the best fixed cadence in hindsight has 1."""
        return self.cost / self.best


def horizon_of(periods: int) -> int:
    """Periods over which costs are summed."""
    return HORIZON if periods >= WARM + 2 * HORIZON else HORIZON // 2


def start_points(stream: RetrainingStream, most: int, sealed: bool) -> list[int]:
    """Ends of warm-ups, at most so many, evenly spread; costs of two of them share no period.

    sealed  only those whose costs are of the sealed end; else only those that see nothing of it
    """
    periods = len(stream.losses)
    first_sealed = periods - stream.sealed
    horizon = horizon_of(first_sealed)
    if sealed:
        horizon = min(horizon, stream.sealed)
        starts = list(range(first_sealed - 1, periods - horizon, horizon)) if horizon else []
    else:
        starts = list(range(WARM - 1, first_sealed - horizon, horizon))
    if len(starts) <= most:
        return starts
    chosen = np.linspace(0, len(starts) - 1, most).round().astype(int)
    return [starts[index] for index in chosen]


def costs_of(stream: RetrainingStream, most_starts: int, sealed: bool = False) -> list[RuleCost]:
    """The costs of all rules."""
    horizon = horizon_of(len(stream.losses) - stream.sealed)
    if sealed:
        horizon = min(horizon, stream.sealed)
    rows = []
    for start in start_points(stream, most_starts, sealed):
        end = start + horizon
        typical = float(np.diagonal(stream.losses[: start + 1, : start + 1])[-WARM:].mean())
        for ratio in RATIOS:
            price = ratio * typical
            fixed = []
            for periods in range(1, horizon + 1):
                fixed.append(cost(stream, partial(every, periods), start, end, price))
            cadence = 1 + int(np.argmin(fixed))
            for name, rule in RULES.items():
                total = cost(stream, rule, start, end, price)
                best = min(fixed)
                rows.append(RuleCost(stream.name, name, ratio, start, total, best, cadence))
    return rows


def write_costs(path: Path, rows: list[RuleCost]) -> None:
    """Write a line for each cost."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_COLUMNS)
    writer.writerows(rows)
    with atomic_write(path, "w") as file:
        file.write(text.getvalue())


def read_costs(path: Path) -> list[RuleCost]:
    """The lines of `write_costs`. UserError: the file has other columns or rules."""
    table = csv.DictReader(path.read_text().splitlines())
    rows = []
    if tuple(table.fieldnames or ()) != _COLUMNS:
        raise UserError(f"{path}: not the costs of this version: delete it, or give another --out")
    for row in table:
        ratio = float(row["ratio"])
        start = int(row["start"])
        total = float(row["cost"])
        best = float(row["best"])
        cadence = int(row["cadence"])
        rows.append(RuleCost(row["stream"], row["rule"], ratio, start, total, best, cadence))
    if {row.rule for row in rows} != set(RULES):
        raise UserError(f"{path}: costs of other rules: delete it, or give another --out")
    return rows
