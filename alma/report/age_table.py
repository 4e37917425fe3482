"""Loss against age in reports: staleness and regret of each configuration."""

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

from alma.report import age
from alma.report.compare import configurations
from alma.report.losses import (
    LEAST_CELLS,
    Losses,
    MeanOverSeeds,
    age_effect,
    staleness,
    staleness_curve,
)
from alma.report.results import Result
from alma.report.tables import TitledTable

NOTE = """\
Age: from the newest mega-batch that a model was trained on to that of the held-out part. \
Staleness: {loss} that a mega-batch of age adds, against the model whose newest training data are \
of that part; it includes what less training costs. Effect of age: the mean of the slopes to data \
to come and to the past, in which the amount of training cancels; where the past is kept, as \
little as half the effect on data to come. Regret: {loss} above the best model of these \
configurations on that part: newest (age 0), next (age 1), past (ages below 0)."""

AGES: dict[str, Callable[[float], bool]] = {
    "newest": lambda age: age == 0,
    "next": lambda age: age == 1,
    "past": lambda age: age < 0,
}
"""Groups of held-out parts, by the age of the model on them."""


@dataclass(frozen=True)
class Aged:
    """The loss against age of a configuration; values per seed, in the unit of `Losses`."""

    result: Result
    losses: Losses
    best: dict[float, float]  # by period, of all configurations of the table

    @cached_property
    def columns(self) -> dict[str, list[float]]:
        """The numbers of the table by name, one value per seed."""
        slopes = {"staleness": staleness(self.losses), "effect of age": age_effect(self.losses)}
        regrets = {
            f"regret, {name}": age.regret(self.losses, self.best, fits)
            for name, fits in AGES.items()
        }
        return slopes | regrets

    @cached_property
    def curves(self) -> dict[str, dict[float, list[float]]]:
        """Extra loss and regret by age, one value per seed."""
        ages = self.losses.by_age
        regret = {at: age.regret(self.losses, self.best, partial(operator.eq, at)) for at in ages}
        return {"extra loss": staleness_curve(self.losses), "regret": regret}


def aged(results: Sequence[Result]) -> list[Aged]:
    """Loss against age for the trained results of one table that have an evaluation matrix.

    Regret is against the best of their models. [] for a stream of one mega-batch, which has no
    ages.
    """
    with_losses = []
    for result in results:
        losses = age.losses_of(result) if result.megabatches > 1 else None
        if losses and losses.by_age:
            with_losses.append((result, losses))
    best = age.best_by_period(losses for _, losses in with_losses)
    return [Aged(result, losses, best) for result, losses in with_losses]


def unit(result: Result) -> str:
    """The unit of extra loss and regret."""
    return "nats a token" if result.metric == "perplexity" else "percentage points"


def titled(rows: Sequence[Aged]) -> TitledTable:
    """A row per configuration; columns without any number are left out."""
    first = rows[0].result
    columns = configurations([row.result for row in rows])
    columns["n"] = [str(len(row.result.repeats)) for row in rows]
    least = 3 if first.metric == "perplexity" else 2  # digits after the point
    for name in rows[0].columns:
        cells = []
        for row in rows:
            over_seeds = age.over_seeds(row.columns[name])
            cells.append(shown(over_seeds, _digits(over_seeds.mean, least)))
        if any(cells):
            columns[name] = cells
    loss = "loss (nats a token)" if first.metric == "perplexity" else "error (percentage points)"
    note = NOTE.format(loss=loss)
    if any(len(row.result.repeats) > 1 for row in rows):
        note += " In brackets: 90% intervals over seeds."
    for row in rows:
        before = age.trained_before_cutoff(row.result)
        if before:
            models = f"model of mega-batch {before[0]}"
            if len(before) > 1:
                models = f"{len(before)} models until mega-batch {before[-1]}"
            note += f" {row.result.label}: without the {models}, trained before the cutoff of the "
            note += "model that began the run."
        count = sum(len(cells) for at, cells in row.losses.by_age.items() if at > 0)
        if count < LEAST_CELLS:
            note += f" {row.result.label}: {count} of the {LEAST_CELLS} cells of age above 0 "
            note += "that staleness takes: no evidence."
    cells_by_row = [list(columns), *map(list, zip(*columns.values(), strict=True))]
    return TitledTable(f"Loss against age ({unit(first)}), {first.stream}", cells_by_row, note)


def _digits(mean: float, least: int) -> int:
    """Decimals that show at least two significant digits of the mean; from `least` to 6."""
    if mean == 0 or not math.isfinite(mean):
        return least
    return max(least, min(6, 1 - math.floor(math.log10(abs(mean)))))


def shown(over_seeds: MeanOverSeeds, digits: int, sign: str = "-") -> str:
    """Mean and 90% interval, such as "0.051 [0.043, 0.060]"; "" without a finite mean.

    `sign` "+" shows the sign of positive numbers, too.
    """
    if not math.isfinite(over_seeds.mean):
        return ""
    mean, low, high = (f"{number:{sign}.{digits}f}" for number in over_seeds)
    return mean if math.isnan(over_seeds.low) else f"{mean} [{low}, {high}]"
