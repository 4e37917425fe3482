"""Differences of configurations from a baseline, paired by seed: `alma report RUNS --baseline`."""

import itertools
import math
import operator
import statistics
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import NamedTuple

from alma import metrics
from alma.errors import UserError
from alma.records import Run
from alma.report import age, age_table, compare, newest
from alma.report.age_table import AGES, shown, unit
from alma.report.losses import MeanOverSeeds
from alma.report.results import Result, column, compute
from alma.report.tables import TitledTable

_NOTE = """\
Each configuration minus {baseline}; below 0 it is better. In brackets: 90% intervals, of \
differences paired by the n seeds that both have (Student's t) or, without common seeds, of the n \
of each (Welch). Comp is a multiple of the baseline's. Last: at the last t up to which all these \
runs have rows (column t, if it is not B); later rows are ignored. \
Trained: the average from the first t on at which both have trained; the untrained model of a \
learner that waits counts in average and {total}."""
_BY_AGE = """
Newest, next, past: {unit} on the newest mega-batch of the training data, on the next one and on \
all before, means over the stages of both. End: on all held-out parts, after the last of these \
stages."""
_NONE = MeanOverSeeds(math.nan, math.nan, math.nan)


def find_baselines(groups: Sequence[Sequence[Result]], name: str | None) -> list[Result | None]:
    """Find the baseline of each group: the result whose label or learner is `name`.

    None for a group without such a result, or with no other result. Raises UserError if no group
    has a baseline and another result, or if several results of a group have this name, such as one
    for each waiting time.
    """
    if name is None:
        return [None for _ in groups]
    baselines: list[Result | None] = []
    for results in groups:
        fitting = [result for result in results if result.label == name]
        fitting = fitting or [result for result in results if result.method == name]
        if len(fitting) > 1:
            labels = _labels(fitting)
            raise UserError(
                f"--baseline {name!r} fits several configurations: give one of {labels}"
            )
        baselines += fitting or [None]
    if not any(baselines):
        labels = _labels(list(itertools.chain(*groups)))
        raise UserError(
            f"--baseline {name!r} is no configuration of these runs: give one of {labels}"
        )
    compared = []
    for baseline, results in zip(baselines, groups, strict=True):
        compared.append(baseline if len(results) > 1 else None)
    if not any(compared):
        raise UserError(f"--baseline {name!r}: no other configuration of these runs is on its data")
    return compared


def tables(
    results: Sequence[Result], baseline: Result | None, general: bool = True
) -> list[TitledTable]:
    """The tables of results of one metric, B and data.

    The newest held-out part of a stream with periods, the `general` table unless it is left out,
    loss against age if runs have it, and differences from a baseline.
    """
    of_group = []
    of_newest = newest.titled(results)
    if of_newest:
        of_group.append(of_newest)
    if general:
        of_group.append(compare.titled(results))
    aged = age_table.aged(results)
    if aged:
        of_group.append(age_table.titled(aged))
    if baseline:
        of_group.append(titled(baseline, results))
    return of_group


def _labels(results: Sequence[Result]) -> str:
    return ", ".join(dict.fromkeys(repr(result.label) for result in results))


def titled(baseline: Result, results: Sequence[Result]) -> TitledTable:
    """The table of differences from `baseline`, a row for each other configuration."""
    candidates = [result for result in results if result is not baseline]
    pairs = [_paired(candidate, baseline) for candidate in candidates]
    columns = compare.configurations(candidates) | {"n": []}
    for candidate, of_baseline in pairs:
        seeds = str(len(candidate.repeats))
        if _seeds(candidate) != _seeds(of_baseline):
            seeds += f", {len(of_baseline.repeats)}"
        columns["n"].append(seeds)
    if any(candidate.repeats and not candidate.finished for candidate, _ in pairs):
        columns["t"] = [
            str(candidate.progress) if candidate.repeats else "" for candidate, _ in pairs
        ]
    columns["Comp"] = [_compute_ratio(candidate, of_baseline) for candidate, of_baseline in pairs]
    differences = [_differences(candidate, of_baseline) for candidate, of_baseline in pairs]
    for name in dict.fromkeys(itertools.chain(*differences)):
        of_metric = name in ("last", "trained", "average", baseline.display.total)
        digits = 2 if of_metric or baseline.metric == "error" else 3
        columns[name] = [shown(of_pair.get(name, _NONE), digits, "+") for of_pair in differences]
    note = _NOTE
    if age.losses_of(baseline) is not None:
        note += _BY_AGE
    note = note.format(baseline=baseline.label, total=baseline.display.total, unit=unit(baseline))
    cells = [list(columns), *map(list, zip(*columns.values(), strict=True))]
    title = f"Differences from {baseline.label}, 90% intervals, {baseline.stream}"
    return TitledTable(title, cells, note, compare.lacking(results))


def _seeds(result: Result) -> list[int]:
    return [run.config["seed"] for run in result.runs]


def _compute_ratio(candidate: Result, baseline: Result) -> str:
    """Training compute of the candidate as a multiple of the baseline's; "" if that is 0."""
    if not baseline.repeats:
        return ""
    of_baseline = baseline.over_seeds(compute)[0]
    if not of_baseline:
        return ""
    of_candidate = candidate.over_seeds(compute)[0] if candidate.repeats else 0
    return f"{of_candidate / of_baseline:.3g}x"


def _paired(candidate: Result, baseline: Result) -> tuple[Result, Result]:
    """Restrict two results to what can be compared.

    Their runs are those with the seeds that both have, or all if they share none. Their rows are
    those of t = 0..last, where `last` is the progress of the run that is least far.
    """
    runs_of_candidate = _by_seed(candidate)
    runs_of_baseline = _by_seed(baseline)
    common = runs_of_candidate.keys() & runs_of_baseline.keys()
    if common:
        runs_of_candidate = {seed: runs_of_candidate[seed] for seed in common}
        runs_of_baseline = {seed: runs_of_baseline[seed] for seed in common}
    both = [*runs_of_candidate.values(), *runs_of_baseline.values()]
    shared = set.intersection(*map(_times, both))
    last = next(t for t in itertools.count() if t + 1 not in shared)
    times = [t for t in shared if t <= last]
    return (
        _cut(candidate, runs_of_candidate, times),
        _cut(baseline, runs_of_baseline, times),
    )


def _times(run: Run) -> set[int]:
    return {row["t"] for row in run.rows}


def _by_seed(result: Result) -> dict[int, Run]:
    return {run.config["seed"]: run for run in result.runs}


def _cut(result: Result, runs: dict[int, Run], times: Sequence[int]) -> Result:
    """A copy of the result with only these runs (by seed), and only their rows at `times`."""
    ascending = [runs[seed] for seed in sorted(runs)]
    repeats = []
    for run in ascending:
        rows = {row["t"]: row for row in run.rows}
        repeats.append({t: rows[t] for t in times})
    return replace(result, repeats=tuple(repeats), runs=tuple(ascending))


class Cell(NamedTuple):
    """A cell of an evaluation matrix."""

    until: float  # the newest period that its model was trained on
    period: float  # of the held-out part


def _cells(result: Result) -> dict[Cell, list[float]]:
    """The losses per seed of each cell that all seeds have; {} without an evaluation matrix."""
    losses = age.losses_of(result)
    if not losses:
        return {}
    cells = {}
    for i, j in itertools.chain(*losses.by_age.values()):
        cells[Cell(losses.until[i], losses.periods[j])] = [seed[i][j] for seed in losses.seeds]
    return cells


def _parts(common: Collection[Cell]) -> dict[str, list[Cell]]:
    """Group the cells by the age of the model; also "end", the cells of the last model.

    Returns the groups over which means are taken, by name, without empty ones.
    """
    last = max((cell.until for cell in common), default=0)
    parts = {}
    for name, fits in AGES.items():
        parts[name] = [cell for cell in common if fits(cell.period - cell.until)]
    parts["end"] = [cell for cell in common if cell.until == last]
    return {name: cells for name, cells in parts.items() if cells}


def _measures(result: Result, begun: Sequence[int]) -> dict[str, list[float]]:
    """Measures over the stream by name, a value per seed.

    `begun` are the t at which both results of the comparison have completed a stage.
    """
    factor = result.display.factor
    measures: dict[str, list[float]] = {"last": [], "trained": [], "average": []}
    totals = []
    for rows in result.repeats:
        values = column(rows, "value")
        measures["last"].append(factor * values[max(values)])
        if begun:
            measures["trained"].append(factor * statistics.fmean(values[t] for t in begun))
        measures["average"].append(factor * metrics.average(values))
        totals.append(metrics.cumulative_error_rate(values))
    return measures | {result.display.total: totals}


def _differences(candidate: Result, baseline: Result) -> dict[str, MeanOverSeeds]:
    """The differences candidate - baseline, with 90% intervals, by name of the measure.

    First the measures over the stream, then means over groups of cells of the evaluation matrix
    that both have. Paired by seed if the seeds are equal, else by Welch's interval. {} if the two
    share no t from 1 on.
    """
    if 1 not in candidate.times:
        return {}
    begun = []
    for t in candidate.times:
        if t and not candidate.waiting(t) and not baseline.waiting(t):
            begun.append(t)
    cells_of_candidate = _cells(candidate)
    cells_of_baseline = _cells(baseline)
    of_candidate = _measures(candidate, begun)
    of_baseline = _measures(baseline, begun)
    for name, cells in _parts(cells_of_candidate.keys() & cells_of_baseline.keys()).items():
        of_candidate[name] = _mean_per_seed(cells_of_candidate, cells)
        of_baseline[name] = _mean_per_seed(cells_of_baseline, cells)
    differences = {}
    for name, values in of_candidate.items():
        if _seeds(candidate) == _seeds(baseline):
            paired = list(map(operator.sub, values, of_baseline[name]))
            differences[name] = age.over_seeds(paired)
        else:
            differences[name] = age.welch(values, of_baseline[name])
    return differences


def _mean_per_seed(losses: dict[Cell, list[float]], cells: Sequence[Cell]) -> list[float]:
    by_seed = zip(*(losses[cell] for cell in cells), strict=True)
    return list(map(statistics.fmean, by_seed))
