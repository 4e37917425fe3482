"""Forecasts and choices of `alma advise` at earlier mega-batches, against what came.

python -m benchmarks backtest runs/advice_mnist                 of runs on one stream
python -m benchmarks backtest --matrix losses.csv --groups 1b   of losses from elsewhere
"""

import contextlib
import math
from collections.abc import Callable, Sequence
from datetime import date
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from alma.dates import label
from alma.errors import Parser, UserError
from alma.report.advice.backtest import RULES, look_back, naive_rule_won, regrets_of
from alma.report.advice.candidates import Candidate, one_section
from alma.report.advice.forecast import interval
from alma.report.advice.law import Array, Law
from alma.report.advice.matrix import read_groups
from alma.report.advice.period import Period
from alma.report.advice.staleness import Laws, known_at
from alma.report.age import losses_of
from alma.report.age_table import unit
from alma.report.losses import Losses
from alma.report.results import Section, find_runs, left_out
from alma.report.tables import TitledTable
from alma.tables import Table, number

_NOTE = """\
At each t only rows up to t are read, by the same code as for advice. Forecasts are of the test \
metric after each stage to come; they are off by the mean absolute log ratio. Regret: how much the \
mean over the mega-batches to come of the chosen configuration exceeds that of the best one, over \
all limits of compute that separate configurations. "lowest so far" chooses the lowest mean since \
a configuration's first stage, "lowest now" the lowest present value."""
_STAGE_MEASURES = ("90% interval held", "forecast off by", "as last time")
_REGRET_MEASURES = tuple(f"regret: {rule}" for rule in RULES)
_STALENESS_RULES = ("forecast", "no staleness", "as last time")
_STALENESS = """\
At each period only models and held-out parts up to there are read. Forecasts are of the extra \
loss of the models at hand on each period to come, above the model that is trained until that \
period; they are off by the mean absolute difference. "No staleness" expects 0, "as last time" the \
extra loss on the last period."""


class OriginScores(NamedTuple):
    """How the advice of mega-batch `now` turned out."""

    now: int
    stages: Array
    """(stages to come, _STAGE_MEASURES): the errors are of logs."""
    regrets: Array
    """(limits of compute, rules)"""


def means(origins: Sequence[OriginScores]) -> dict[str, float]:
    """The number of stages to come, and means over some origins, by name; NaN of nothing."""
    stages = np.concatenate([origin.stages for origin in origins])
    regrets = np.concatenate([origin.regrets for origin in origins])
    by_name: dict[str, float] = {"stages": len(stages)}
    for names, values in ((_STAGE_MEASURES, stages), (_REGRET_MEASURES, regrets)):
        mean = values.mean(0).tolist() if len(values) else [math.nan] * len(names)
        by_name |= dict(zip(names, mean, strict=True))
    return by_name


def origins_of(section: Section, until: int) -> list[OriginScores]:
    """Origins before `until`; [] if no configuration is that far."""
    origins = []
    for now, candidates, actual in look_back(section, until):
        stages = [np.empty((0, len(_STAGE_MEASURES)))]
        for candidate in candidates:
            stages.append(_stages_of(candidate, actual[candidate.label]))
        origins.append(OriginScores(now, np.concatenate(stages), regrets_of(candidates, actual)))
    return origins


def _stages_of(candidate: Candidate, actual: Candidate) -> Array:
    """Scores of a forecast, (stages to come, _STAGE_MEASURES); `actual`: the candidate later."""
    values = np.maximum([actual.values[t] for t in candidate.to_come], 1e-9)
    draws, _ = candidate.draws
    low, high = interval(draws)
    inside = (low <= values) & (values <= high)
    error = abs(np.log(np.median(draws, 0) / values))
    naive_error = abs(np.log(candidate.curve.values[:, -1].mean() / values))
    return np.column_stack([inside, error, naive_error])


def backtest(section: Section) -> list[TitledTable]:
    """The backtest of a stream, and that of staleness if it drifts.

    UserError: no configuration has seen the whole stream in at least two stages.
    """
    end = section.results[0].megabatches
    origins = origins_of(section, end)
    if not origins:
        raise UserError("no configuration has seen the whole stream in at least two stages")
    below = [_NOTE, *left_out(section.results)]
    complete = []
    for result in section.results:
        if result.progress == end:
            complete.append(result)
        else:
            below.append(f"left out: {result.label}, at t={result.progress} of {end}")
    title = f"Backtest: {section.title}"
    above = naive_rule_won(section, end)
    parts = [TitledTable(title, _table(origins), "\n".join(below), above)]
    row = complete[0].repeats[0][end]
    year = Period.of(row["extra"].get("matrix_periods", [])).year
    matrices = [losses for losses in map(losses_of, complete) if losses]
    with contextlib.suppress(UserError):  # no evaluation matrices, or few periods
        scores = look_back_on(matrices, "t={:g}".format, year)
        parts.append(staleness_table(section.title, unit(complete[0]), scores))
    return parts


def _table(origins: Sequence[OriginScores]) -> Table:
    """A row for each origin, and one for all."""
    table = [["t", "stages to come", *_STAGE_MEASURES, *_REGRET_MEASURES]]
    groups = [(str(origin.now), [origin]) for origin in origins]
    for name, group in [*groups, ("all", origins)]:
        stages, *shares = means(group).values()
        cells = ["" if math.isnan(share) else f"{share:.1%}" for share in shares]
        table.append([name, str(stages), *cells])
    return table


Scores = dict[str, Array]
"""By period, and of all: (cells, 4), whether in the interval, and errors by _STALENESS_RULES."""


def staleness_table(title: str, unit: str, scores: Scores) -> TitledTable:
    """How forecasts of extra loss turned out."""
    rules = [f"{rule} off by" for rule in _STALENESS_RULES]
    table = [["period", "cells", "90% interval held", *rules]]
    for name, cells in scores.items():
        held, *errors = cells.mean(0).tolist()
        table.append([name, str(len(cells)), f"{held:.0%}", *map(number, errors)])
    return TitledTable(f"Backtest of staleness ({unit}): {title}", table, _STALENESS)


def look_back_on(
    group: Sequence[Losses],
    name: Callable[[float], str],
    year: float = math.inf,
) -> Scores:
    """Scores of forecasts at each period at which a model of `group` was trained.

    Of more than ten such periods the tenths count. `name` names a period, `year` is the length of
    one. UserError: no model is old enough at a period before the last one.
    """
    scores: dict[float, list[list[float]]] = {}
    for losses in group:
        for now in _origins_on(losses.until):
            cells = _scores_at(losses, now, year)
            if cells:
                scores.setdefault(now, []).extend(cells)
    if not scores:
        raise UserError("too few models with a loss on their own period")
    by_name = {name(now): np.array(cells) for now, cells in sorted(scores.items())}
    return by_name | {"all": np.concatenate(list(by_name.values()))}


def _origins_on(until: Sequence[float]) -> list[float]:
    """All times of training, or their tenths."""
    counts = {round(len(until) * tenth / 10) for tenth in range(1, 11)} - {0}
    return [until[count - 1] for count in sorted(counts)]


def _scores_at(losses: Losses, now: float, year: float) -> list[list[float]]:
    """Scores of the cells to come after `now`; [] of too few models."""
    known_losses = known_at(losses, now)
    try:
        laws = Laws(known_losses, year)
    except UserError:
        return []
    extra = _extra_losses(losses)
    last = len(known_losses.periods) - 1
    scores = []
    for i, j in np.ndindex(len(known_losses.until), len(losses.periods)):
        actual = extra[i, j]
        last_time = extra[i, last]
        if j > last and np.isfinite(actual + last_time):
            age = losses.periods[j] - losses.until[i]
            ahead = losses.periods[j] - losses.periods[last]
            law = partial(Law.extra, ages=age, ahead=ahead)
            expected, low, high = laws.estimate(law, cell=True)
            errors = [abs(forecast - actual) for forecast in (expected, 0.0, last_time)]
            scores.append([low <= actual <= high, *errors])
    return scores


def _extra_losses(losses: Losses) -> Array:
    """Losses, mean over seeds, above the model that is trained until the period; (models, periods).

    NaN on periods without such a model.
    """
    mean = np.mean(losses.seeds, axis=0)
    fresh = np.full(len(losses.periods), math.nan)
    for j, period in enumerate(losses.periods):
        if period in losses.until:
            fresh[j] = mean[losses.until.index(period), j]
    return np.asarray(mean - fresh)


def label_of(time: float, period: Period) -> str:
    """A time of a matrix, as its file writes it."""
    named_by_day = period.noun != "period" and period.size > 1
    if period.noun == "day" or named_by_day:
        return date.fromordinal(int(time) + 1).isoformat()
    if period.noun in ("week", "month", "quarter"):
        return label(period.noun, int(time))
    return f"{time:g}"


def main(arguments: Sequence[str]) -> None:
    """Print the backtest of runs, or of each group of losses."""
    parser = Parser(prog="python -m benchmarks backtest", description=__doc__)
    add = parser.add_argument
    runs = "a run directory, or a folder that contains run directories"
    add("runs", nargs="*", metavar="RUN", help=runs)
    add("--matrix", type=Path, action="append", metavar="FILE", help="as of `alma advise`")
    groups = "as of `alma advise`"
    add("--groups", type=lambda text: text.split(","), metavar="LIST", help=groups)
    options = parser.parse_args(arguments)
    if options.matrix:
        parts = backtest_matrix(options.matrix, options.groups or ())
    else:
        parts = backtest(one_section(find_runs(options.runs)))
    print("\n\n".join(part.as_text() for part in parts))


def backtest_matrix(paths: Sequence[Path], patterns: Sequence[str]) -> list[TitledTable]:
    """The backtest of staleness of each group of losses from elsewhere."""
    parts = []
    for group in read_groups(paths, patterns):
        label = partial(label_of, period=group.period)
        scores = look_back_on([group.losses], label, group.period.year)
        parts.append(staleness_table(group.losses.label, group.metric.unit, scores))
    return parts
