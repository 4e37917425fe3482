"""Loss against age in reports: staleness and regret of each configuration, as a table and as CSV records."""

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from alma.report import age
from alma.report.age import Losses
from alma.report.compare import method
from alma.report.labels import replay
from alma.report.results import Result
from alma.report.tables import Table, for_terminal

NOTE = """\
Age: from the newest mega-batch that a model was trained on to that of the held-out part. Staleness: {loss} \
that a mega-batch of age adds, against the model whose newest training data are of that part; it includes \
what less training costs. Effect of age: the mean of the slopes to data to come and to the past, in which \
the amount of training cancels; where the past is kept, as little as half the effect on data to come. \
Regret: {loss} above the best model of these configurations on that part: newest (age 0), next (age 1), past \
(ages below 0)."""
SEVERAL = " In brackets: 90% intervals over seeds."

AGES: dict[str, Callable[[float], bool]] = {
    "newest": lambda age: age == 0,
    "next": lambda age: age == 1,
    "past": lambda age: age < 0,
}
"""The held-out parts that tables tell apart, by the age of the model on them."""
_REGRETS = {f"regret, {name}": fits for name, fits in AGES.items()}

_FIELDS = {"effect of age": "age_effect", **{name: name.replace(", ", "_") for name in _REGRETS}}
"""Columns of report.csv that are not called as those of the table."""


@dataclass(frozen=True)
class Aged:
    """The loss against age of a configuration; values per seed, in the unit of `Losses`."""

    result: Result
    losses: Losses
    best: dict[float, float]  # by period, of all configurations of the table

    @cached_property
    def columns(self) -> dict[str, list[float]]:
        """The numbers of the table by name, one value per seed."""
        slopes = {"staleness": age.staleness(self.losses), "effect of age": age.age_effect(self.losses)}
        return slopes | {name: age.regret(self.losses, self.best, ages) for name, ages in _REGRETS.items()}

    @cached_property
    def curves(self) -> dict[str, dict[float, list[float]]]:
        """Extra loss and regret by age, one value per seed."""
        ages = self.losses.by_age
        regret = {at: age.regret(self.losses, self.best, partial(operator.eq, at)) for at in ages}
        return {"extra loss": age.staleness_curve(self.losses), "regret": regret}


def aged(results: Sequence[Result]) -> list[Aged]:
    """Loss against age of the results of one table that have an evaluation matrix and are trained.

    Regret is against the best of their models. [] of a stream of one mega-batch, which has no ages.
    """
    known = [(result, losses) for result in results if (losses := _losses(result))]
    best = age.best_by_period(losses for _, losses in known)
    return [Aged(result, losses, best) for result, losses in known]


def _losses(result: Result) -> Losses | None:
    losses = age.losses_of(result) if result.megabatches > 1 else None
    return losses if losses and losses.by_age else None


def unit(result: Result) -> str:
    """The unit of extra loss and regret."""
    return "nats a token" if result.metric == "perplexity" else "percentage points"


def heading(found: Sequence[Aged]) -> str:
    """Title of the table."""
    result = found[0].result
    return f"Loss against age ({unit(result)}), {result.stream}"


def note(found: Sequence[Aged]) -> str:
    """What the columns mean, in a line."""
    loss = "loss (nats a token)" if found[0].result.metric == "perplexity" else "error (percentage points)"
    return NOTE.format(loss=loss) + SEVERAL * any(len(each.result.repeats) > 1 for each in found)


def table(found: Sequence[Aged]) -> Table:
    """A row per configuration; columns without any number are left out."""
    columns = {
        "learner": [method(each.result) for each in found],
        "w": [str(each.result.waiting_time) for each in found],
        "replay": [replay(each.result.config) for each in found],
        "n": [str(len(each.result.repeats)) for each in found],
    }
    least = 3 if found[0].result.metric == "perplexity" else 2
    for name in found[0].columns:
        cells = [_cell(each.columns[name], least) for each in found]
        columns |= {name: cells} if any(cells) else {}
    return [list(columns), *map(list, zip(*columns.values(), strict=True))]


def as_section(results: Sequence[Result]) -> list[str]:
    """Heading, table and note for the terminal; [] without losses against age."""
    found = aged(results)
    return ["\n".join([heading(found), for_terminal(table(found)), note(found)])] if found else []


def _cell(values: Sequence[float], least: int) -> str:
    """`interval` with at least two digits of the mean, and `least` digits after the point."""
    mean = age.over_seeds(values).mean
    small = math.isfinite(mean) and mean
    return interval(values, max(least, min(6, 1 - math.floor(math.log10(abs(mean))))) if small else least)


def interval(values: Sequence[float], digits: int, level: float = 0.9, sign: str = "-") -> str:
    """Mean and interval over seeds, such as "0.051 [0.043, 0.060]"; "" of none, and of an infinite mean.

    `sign` "+" shows the sign of positive numbers, too.
    """
    mean, *ends = age.over_seeds(values, level)
    if not math.isfinite(mean):
        return ""
    told, low, high = (f"{number:{sign}.{digits}f}" for number in (mean, *ends))
    return told if math.isnan(ends[0]) else f"{told} [{low}, {high}]"


def per_run(found: Sequence[Aged]) -> dict[int, dict[str, float | None]]:
    """The numbers of the table of each run, by its id; errors are fractions, None is NaN."""
    return {
        id(run): {
            _FIELDS.get(name, name): _plain(each.result, values[i]) for name, values in each.columns.items()
        }
        for each in found
        for i, run in enumerate(each.result.runs)
    }


def records(found: Sequence[Aged]) -> list[dict[str, Any]]:
    """The lines of age.csv: extra loss and regret of each run at each age; errors are fractions."""
    return [
        {
            "run": str(run.directory),
            "configuration": each.result.label,
            "metric": each.result.metric,
            "megabatches": each.result.megabatches,
            "seed": run.config["seed"],
            "age": at,
            **{
                name.replace(" ", "_"): _plain(each.result, curve[at][i]) if at in curve else None
                for name, curve in each.curves.items()
            },
        }
        for each in found
        for i, run in enumerate(each.result.runs)
        for at in each.losses.by_age
    ]


def _plain(result: Result, value: float) -> float | None:
    return None if math.isnan(value) else value / result.display.factor
