"""Differences of configurations from one of them, paired by seed: `alma report RUNS --baseline LABEL`."""

import itertools
import math
import operator
import statistics
from collections.abc import Sequence
from dataclasses import replace

from alma import metrics
from alma.errors import UserError
from alma.report import age, age_table, compare
from alma.report.age_table import AGES, shown, unit
from alma.report.losses import MeanOverSeeds
from alma.report.results import Result, column, compute
from alma.report.tables import TitledTable

_NOTE = """\
Each configuration minus {baseline}; below 0 it is better. In brackets: 90% intervals, of differences \
paired by the n seeds that both have (Student's t) or, without common seeds, of the n of each (Welch). Comp \
is a multiple of the baseline's. Last: at the last t up to which all these runs have rows (column t, if it \
is not B); later rows are ignored. \
Trained: the average from the first t on at which both have trained; the untrained model of a learner that \
waits counts in average and {total}."""
_BY_AGE = """
Newest, next, past: {unit} on the newest mega-batch of the training data, on the next one and on all before, \
means over the stages of both. End: on all held-out parts, after the last of these stages."""
_NONE = MeanOverSeeds(math.nan, math.nan, math.nan)


def find_baselines(groups: Sequence[Sequence[Result]], name: str | None) -> list[Result | None]:
    """The result of each group whose label, or learner as in tables, is `name`; None where there is none.

    None also where the group has no other result. UserError: no group has it and another one; a group has
    several, such as one for each waiting time.
    """
    if name is None:
        return [None] * len(groups)
    baselines: list[Result | None] = []
    for results in groups:
        fitting = [result for result in results if result.label == name]
        fitting = fitting or [result for result in results if result.method == name]
        if len(fitting) > 1:
            known = _labels(fitting)
            raise UserError(f"--baseline {name!r} fits several configurations: give one of {known}")
        baselines += fitting or [None]
    if not any(baselines):
        known = _labels(list(itertools.chain(*groups)))
        raise UserError(f"--baseline {name!r} is no configuration of these runs: give one of {known}")
    compared = [each if len(results) > 1 else None for each, results in zip(baselines, groups, strict=True)]
    if not any(compared):
        raise UserError(f"--baseline {name!r}: no other configuration of these runs is on its data")
    return compared


def tables(results: Sequence[Result], baseline: Result | None) -> list[TitledTable]:
    """What a report shows of one metric, B and data: the general table, loss against age, the differences."""
    aged = age_table.aged(results)
    found = [compare.titled(results), *([age_table.titled(aged)] if aged else [])]
    return found + ([titled(baseline, results)] if baseline else [])


def _labels(results: Sequence[Result]) -> str:
    return ", ".join(dict.fromkeys(repr(result.label) for result in results))


def titled(baseline: Result, results: Sequence[Result]) -> TitledTable:
    """A row for each other configuration of the table."""
    others = [result for result in results if result is not baseline]
    pairs = [_paired(other, baseline) for other in others]
    columns = compare.configurations(others) | {"n": []}
    for pair in pairs:
        counts = [str(len(each.repeats)) for each in pair]
        columns["n"].append(counts[0] if _seeds(pair[0]) == _seeds(pair[1]) else ", ".join(counts))
    if any(one.repeats and not one.finished for one, _ in pairs):
        columns["t"] = [str(one.progress) if one.repeats else "" for one, _ in pairs]
    columns["Comp"] = []
    for one, other in pairs:
        ours, theirs = (r.over_seeds(compute)[0] if r.repeats else 0 for r in (one, other))
        columns["Comp"].append(f"{ours / theirs:.3g}x" if theirs else "")
    differences = [_differences(one, other) for one, other in pairs]
    for name in dict.fromkeys(itertools.chain(*differences)):
        of_metric = name in ("last", "trained", "average", baseline.display.total)
        digits = 2 if of_metric or baseline.metric == "error" else 3
        columns[name] = [shown(each.get(name, _NONE), digits, "+") for each in differences]
    note = _NOTE + _BY_AGE * (age.losses_of(baseline) is not None)
    note = note.format(baseline=baseline.label, total=baseline.display.total, unit=unit(baseline))
    cells = [list(columns), *map(list, zip(*columns.values(), strict=True))]
    return TitledTable(f"Differences from {baseline.label}, 90% intervals, {baseline.stream}", cells, note)


def _seeds(result: Result) -> list[int]:
    return [run.config["seed"] for run in result.runs]


def _paired(one: Result, other: Result) -> tuple[Result, Result]:
    """Both with the seeds that both have, or all if they share none, and the t up to which all these runs
    have all rows."""
    runs = [{run.config["seed"]: run for run in result.runs} for result in (one, other)]
    common = sorted(runs[0].keys() & runs[1].keys())
    chosen = [[of[seed] for seed in common or sorted(of)] for of in runs]
    rows = [[{row["t"]: row for row in run.rows} for run in of] for of in chosen]
    shared = set.intersection(*map(set, itertools.chain(*rows)))
    last = next(t for t in itertools.count() if t + 1 not in shared)
    cut = [tuple({t: each[t] for t in shared if t <= last} for each in repeats) for repeats in rows]
    return (
        replace(one, repeats=cut[0], runs=tuple(chosen[0])),
        replace(other, repeats=cut[1], runs=tuple(chosen[1])),
    )


def _differences(one: Result, other: Result) -> dict[str, MeanOverSeeds]:
    """Differences of a pair by name; {} if the two share no t from 1 on.

    The measures are those of all rows, then means over the cells of the evaluation matrix that both have.
    """
    if 1 not in one.times:
        return {}
    begun = [t for t in one.times if t and not (one.waiting(t) or other.waiting(t))]
    cells: list[dict[tuple[float, float], list[float]]] = []  # loss by newest and held-out part, per seed
    for result in (one, other):
        cells.append({})
        if losses := age.losses_of(result):
            for i, j in itertools.chain(*losses.by_age.values()):
                cells[-1][losses.until[i], losses.periods[j]] = [seed[i][j] for seed in losses.seeds]
    common = cells[0].keys() & cells[1].keys()
    last = max((until for until, _ in common), default=0)
    parts = {name: [cell for cell in common if fits(cell[1] - cell[0])] for name, fits in AGES.items()}
    parts["end"] = [cell for cell in common if cell[0] == last]
    sides = []
    for result, of_result in zip((one, other), cells, strict=True):
        values, factor = [column(rows, "value") for rows in result.repeats], result.display.factor
        side = {
            "last": [factor * each[max(each)] for each in values],
            "trained": [factor * statistics.fmean(each[t] for t in begun) for each in values if begun],
            "average": [factor * metrics.average(each) for each in values],
            result.display.total: [metrics.cumulative_error_rate(each) for each in values],
        }
        for name, places in parts.items():
            if places:
                by_seed = zip(*(of_result[cell] for cell in places), strict=True)
                side[name] = list(map(statistics.fmean, by_seed))
        sides.append(side)
    ours, theirs = sides
    if _seeds(one) == _seeds(other):
        return {name: age.over_seeds(list(map(operator.sub, ours[name], theirs[name]))) for name in ours}
    return {name: age.welch(ours[name], theirs[name]) for name in ours}
