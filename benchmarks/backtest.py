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
from alma.report.advice.candidates import one_section
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
At each t only rows up to t are read, by the same code as for advice. Forecasts are of the test metric after \
each stage to come; they are off by the mean absolute log ratio. Regret: how much the mean over the \
mega-batches to come of the chosen configuration exceeds that of the best one, over all limits of compute \
that separate configurations. "lowest so far" chooses the lowest mean since a configuration's first stage, \
"lowest now" the lowest present value."""
_MEASURES = ("90% interval held", "forecast off by", "as last time", *(f"regret: {rule}" for rule in RULES))
_STALENESS_RULES = ("forecast", "no staleness", "as last time")
_STALENESS = """\
At each period only models and held-out parts up to there are read. Forecasts are of the extra loss of the \
models at hand on each period to come, above the model that is trained until that period; they are off by \
the mean absolute difference. "No staleness" expects 0, "as last time" the extra loss on the last period."""


class Origin(NamedTuple):
    """How the advice of mega-batch `now` turned out."""

    now: int
    stages: Array  # a row for each stage to come: in its interval, |log(forecast / what came)|, as last time
    regrets: Array  # (limits, rules): of the choice of each rule within each limit


def means(origins: Sequence[Origin]) -> dict[str, float]:
    """Stages to come, and shares and means over some origins, by name; NaN of nothing."""
    stages = np.concatenate([each.stages for each in origins])
    regrets = np.concatenate([each.regrets for each in origins])
    found = [x.mean(0) if len(x) else np.full(x.shape[1], math.nan) for x in (stages, regrets)]
    return {"stages": len(stages)} | dict(zip(_MEASURES, np.concatenate(found).tolist(), strict=True))


def origins_of(section: Section, until: int) -> list[Origin]:
    """Origins before `until`; [] if no configuration is that far."""
    origins = []
    for now, found, actual in look_back(section, until):
        rows = [np.empty((0, 3))]
        for each in found:
            came = np.maximum([actual[each.label].values[t] for t in each.to_come], 1e-9)
            low, high = interval(each.draws[0])
            off = [
                abs(np.log(guess / came))
                for guess in (np.median(each.draws[0], 0), each.curve.values[:, -1].mean())
            ]
            rows.append(np.column_stack([(low <= came) & (came <= high), *off]))
        origins.append(Origin(now, np.concatenate(rows), regrets_of(found, actual)))
    return origins


def backtest(section: Section) -> list[TitledTable]:
    """The backtest of a stream, and that of staleness if it drifts. UserError: no configuration has seen it
    all in at least two stages."""
    end = section.results[0].megabatches
    origins = origins_of(section, end)
    if not origins:
        raise UserError("no configuration has seen the whole stream in at least two stages")
    table: Table = [["t", "stages to come", *_MEASURES]]
    for name, some in [*((str(each.now), [each]) for each in origins), ("all", origins)]:
        stages, *shares = means(some).values()
        table.append([name, str(stages), *("" if math.isnan(each) else f"{each:.1%}" for each in shares)])
    behind = [each for each in section.results if each.progress < end]
    below = [_NOTE, *left_out(section.results)]
    below += [f"left out: {each.label}, at t={each.progress} of {end}" for each in behind]
    won = naive_rule_won(section, end)
    parts = [TitledTable(f"Backtest: {section.title}", table, "\n".join(below), won)]
    whole = [each for each in section.results if each.progress == end]
    group = [losses for result in whole if (losses := losses_of(result))]
    last = whole[0].repeats[0][end]
    year = Period.of(last["extra"].get("matrix_periods", [])).year
    with contextlib.suppress(UserError):  # no evaluation matrices, or few periods
        scores = look_back_on(group, "t={:g}".format, year)
        parts.append(staleness_table(section.title, unit(whole[0]), scores))
    return parts


Scores = dict[str, Array]
"""By period, and of all, a row a cell: in the 90% interval, and off by _STALENESS_RULES."""


def staleness_table(title: str, unit: str, scores: Scores) -> TitledTable:
    """How forecasts of extra loss turned out."""
    rules = [f"{rule} off by" for rule in _STALENESS_RULES]
    table = [["period", "cells", "90% interval held", *rules]]
    for name, cells in scores.items():
        held, *off = cells.mean(0).tolist()
        table.append([name, str(len(cells)), f"{held:.0%}", *map(number, off)])
    return TitledTable(f"Backtest of staleness ({unit}): {title}", table, _STALENESS)


def look_back_on(group: Sequence[Losses], name: Callable[[float], str], year: float = math.inf) -> Scores:
    """Forecasts at each period at which a model of `group` was trained (tenths, of more than ten), against
    what came. UserError: no model is old enough at a period before the last one.
    """
    scores: dict[float, list[list[float]]] = {}
    for losses in group:
        mean, until, periods = np.mean(losses.seeds, axis=0), losses.until, losses.periods
        fresh = {p: mean[until.index(p), j] for j, p in enumerate(periods) if p in until}
        tenths = {round(len(until) * tenth / 10) for tenth in range(1, 11)} - {0}
        for now in (until[i - 1] for i in sorted(tenths)):
            known = known_at(losses, now)
            try:
                laws = Laws(known, year)
            except UserError:
                continue
            last = len(known.periods) - 1
            for i, j in np.ndindex(len(known.until), len(periods)):
                came = mean[i, j] - fresh.get(periods[j], math.nan)
                before = mean[i, last] - fresh.get(periods[last], math.nan)
                if j > last and np.isfinite(came + before):
                    law = partial(Law.extra, ages=periods[j] - until[i], ahead=periods[j] - periods[last])
                    expected, low, high = laws.estimate(law, cell=True)
                    off = [abs(each - came) for each in (expected, 0.0, before)]
                    scores.setdefault(now, []).append([low <= came <= high, *off])
    if not scores:
        raise UserError("too few models with a loss on their own period")
    found = {name(now): np.array(off) for now, off in sorted(scores.items())}
    return found | {"all": np.concatenate(list(found.values()))}


def label_of(time: float, period: Period) -> str:
    """A time of a matrix, as its file writes it."""
    if period.noun == "day" or (period.noun != "period" and period.size > 1):
        return date.fromordinal(int(time) + 1).isoformat()
    dated = period.noun in ("week", "month", "quarter")
    return label(period.noun, int(time)) if dated else f"{time:g}"


def main(arguments: Sequence[str]) -> None:
    """Print the backtest of runs, or of each group of losses."""
    parser = Parser(prog="python -m benchmarks backtest", description=__doc__)
    add = parser.add_argument
    add("runs", nargs="*", metavar="RUN", help="a run directory, or a folder that contains run directories")
    add("--matrix", type=Path, action="append", metavar="FILE", help="as of `alma advise`")
    add("--groups", type=lambda text: text.split(","), metavar="LIST", help="as of `alma advise`")
    options = parser.parse_args(arguments)
    if options.matrix:
        groups = read_groups(options.matrix, options.groups or ())
        found = []
        for losses, period, _ in groups:
            name = partial(label_of, period=period)
            found.append(staleness_table(losses.label, "nats", look_back_on([losses], name, period.year)))
    else:
        found = backtest(one_section(find_runs(options.runs)))
    print("\n\n".join(part.as_text() for part in found))
