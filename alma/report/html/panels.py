"""Panels of the report page: each is a function of a section that returns data for page.js, or None.

A panel is a dict with `kind`, `title`, `caption` and the data of that kind: `points` (scatter), `lines`
(curves over mega-batches; with `points`, curves through points over any axis), `grids` (matrices) and
`table`. Configurations are indices into the section's results, so that the filters act on every panel. Add
new panels to PANELS.
"""

import bisect
import itertools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from alma.configs import differing, flatten
from alma.errors import UserError
from alma.records import Run
from alma.report import age_table, compare, differences, drift
from alma.report.html.summary import final
from alma.report.labels import ALWAYS_SHOWN, VARIANT, as_setting
from alma.report.results import Measure, Result, Rows, column, compute, mean_and_deviation, memory, validation
from alma.report.sections import Section, rounded
from alma.report.tables import Table

Panel = dict[str, Any]
Values = Callable[[Rows], Mapping[int, Any]]
"""Numbers of a run by t; None, or no entry, where there is none."""
POINTS = 16_000
"""Most points of the curves of a measure; more are decimated."""
TABLE_TIMES = 20
"""Columns after t = 0 of the table of a measure over the stream, as in figures.js."""
NUMBERS = 40_000
"""Most numbers of the experts' panel; further configurations are left out."""
_PART = "held-out part of mega-batch j"


def front(section: Section) -> Panel | None:
    """The average metric, CER or final metric against training compute or memory."""
    name, total = section.results[0].display.name, section.results[0].display.total
    values: dict[str, tuple[Measure, bool]] = {
        **{f"{each} {name}": (measure, True) for each, measure in compare.AVERAGES.items()},
        **{each.format(total=total): (measure, False) for each, measure in compare.TOTALS.items()},
        f"final {name}": (final, True),
    }
    costs = {"training compute, Comp (TFLOPs)": compute, "memory, Mem (parameters)": memory}
    y = [_measure(each, section.results, measure, scaled) for each, (measure, scaled) in values.items()]
    return {
        "kind": "points",
        "title": "Front",
        "caption": "Mean over seeds of each configuration, with its standard deviation as bars and its seeds "
        "as small dots; lower left is better. The dashed line joins the non-dominated configurations among "
        "those shown; faint ones have not finished and do not count. "
        "Averages and sums are over t = 1, 2, ..., final values at the last t." + _marked(section),
        "x": [_measure(each, section.results, measure, False) for each, measure in costs.items()],
        "y": [measure for measure in y if any(mean is not None for mean in measure["mean"])],
    }


def advice(section: Section) -> Panel | None:
    """What each decision is worth at the mega-batches to come; None if no two runs differ in one decision."""
    from alma.report.advice.advice import DIFFERENCE, advise, decision_table  # loads NumPy and SciPy

    try:
        found = advise(section, "coming")
    except UserError:  # no stage is complete, or a value is not finite
        return None
    if not found.comparisons:
        return None
    places = {result.label: i for i, result in enumerate(section.results)}
    of = [places[each.other.candidate.label] for each in found.comparisons]
    caption = " ".join([*found.summary, DIFFERENCE])
    return _table("Advice", caption, decision_table(found), of) | {"note": " ".join(found.remarks)}


def _marked(section: Section) -> str:
    """What the marks of variants mean, if there are any."""
    configs = [result.config for result in section.results]
    ring = " A ring marks an average of weights." * any("average" in config for config in configs)
    return ring + " A dot inside marks one schedule over all stages." * any("schedule" in c for c in configs)


def _measure(name: str, results: Sequence[Result], measure: Measure, scaled: bool) -> dict[str, Any]:
    """Mean, standard deviation and values per seed of each result."""
    found: dict[str, Any] = {"name": name, "mean": [], "deviation": [], "seeds": []}
    for result in results:
        factor = result.display.factor if scaled else 1
        values = [factor * measure(rows) for rows in result.repeats]
        mean, deviation = mean_and_deviation(values)
        found["mean"].append(rounded(mean))
        found["deviation"].append(rounded(deviation))
        found["seeds"].append([rounded(value) for value in values])
    return found


def curves(section: Section) -> Panel | None:
    """The metric and the size of the model over mega-batches."""
    name = section.results[0].display.name
    measures: dict[str, Values] = {
        f"test {name}": lambda rows: column(rows, "value"),
        f"validation {name}": validation,
        "parameters": lambda rows: column(rows, "parameters"),
        "experts": lambda rows: {t: extra.get("experts") for t, extra in column(rows, "extra").items()},
    }
    limit = max(50, POINTS // len(section.results))
    found = []
    for each, measure in measures.items():
        factor = section.results[0].display.factor if each.endswith(name) else 1
        lines = [_line(i, r, measure, factor, limit) for i, r in enumerate(section.results)]
        found.append({"name": each, "lines": [line for line in lines if line]})
    most = max(len(_steps(result)) for result in section.results)
    few = f" Curves of more than {limit} points show {limit} of them." if most > limit else ""
    return {
        "kind": "lines",
        "title": "Over the stream",
        "caption": "After each mega-batch: the mean over seeds, with a band of ±1 standard deviation. A "
        "value is held until the next stage. The untrained model is dotted and pale." + few,
        "x": "mega-batch t",
        "measures": [measure for measure in found if measure["lines"]],
    }


def _line(index: int, result: Result, measure: Values, factor: int, limit: int) -> dict[str, Any] | None:
    """The steps of a result; None if a repeat has no value at all."""
    times, means, deviations = [], [], []
    known, steps = [measure(rows) for rows in result.repeats], _steps(result)
    for t in _thinned(steps, limit, result.megabatches):
        values = [each[t] for each in known if each.get(t) is not None]
        if len(values) < len(known):
            continue
        mean, deviation = mean_and_deviation([factor * value for value in values])
        times.append(t)
        means.append(rounded(mean))
        deviations.append(rounded(deviation))
    if all(mean is None for mean in means):
        return None
    line = {"c": index, "t": times, "y": means, "until": result.times[-1]}
    line |= {"untrained": sum(result.waiting(t) for t in times)}
    line |= {"thinned": True} if len(steps) > limit else {}
    return line | ({"deviation": deviations} if any(deviations) else {})


def _steps(result: Result) -> list[int]:
    """The t at which another model answers, or the metric changes; the first t included."""

    def state(t: int) -> list[Any]:
        return [result.repeats[0][t]["stage"], *(rows[t]["value"] for rows in result.repeats)]

    pairs = itertools.pairwise(result.times)
    return [result.times[0], *(t for before, t in pairs if state(t) != state(before))]


def _thinned(times: Sequence[int], limit: int, megabatches: int) -> list[int]:
    """At most `limit` of the times: the first two, the last at or before each t of the page's table, which
    has TABLE_TIMES + 1, and the rest evenly."""
    if len(times) <= limit:
        return list(times)
    shown = (round(i * megabatches / TABLE_TIMES) for i in range(TABLE_TIMES + 1))
    kept = {0, 1, len(times) - 1, *(max(0, bisect.bisect_right(times, t) - 1) for t in shown)}
    rest = [i for i in range(len(times)) if i not in kept]
    more = max(0, limit - len(kept))
    kept |= {rest[i * len(rest) // more] for i in range(more)}
    return [times[i] for i in sorted(kept)]


def table(section: Section) -> Panel | None:
    """The general table of `alma.report.compare`."""
    found = _table("Results", "A row per configuration.", compare.table(section.results))
    return found | {"note": compare.note(section.results).replace("\n", " ")}


def _table(title: str, caption: str, cells: Table, of: Iterable[int] = ()) -> Panel:
    """A table; `of` has the configuration of each row if that is not its position."""
    header, *rows = cells
    found = {"kind": "table", "title": title, "caption": caption, "header": header, "rows": rows}
    return found | {"of": list(of) or list(range(len(rows)))}


def compared(section: Section) -> Panel | None:
    """The differences from the baseline of the section, if it has one."""
    baseline, results = section.baseline, section.results
    if not baseline:
        return None
    others = [i for i, result in enumerate(results) if result is not baseline]
    cells, note = differences.table(baseline, results), differences.note(baseline)
    return _table(differences.heading(baseline), "A row for each other configuration.", cells, others) | {
        "note": note.replace("\n", " ")
    }


def experts(section: Section) -> Panel | None:
    """Share of tokens and loss of each expert, by stage, for the first seed of each configuration."""
    grids: list[dict[str, Any]] = []
    numbers, left_out = 0, 0
    for index, result in enumerate(section.results):
        rows, times = result.repeats[0], _steps(result)
        layers = {t: rows[t]["extra"].get("expert_layers") or {} for t in times}
        names = list(dict.fromkeys(itertools.chain(*layers.values())))
        if numbers > NUMBERS:
            left_out += bool(names)
            continue
        for name in names:
            columns = {
                t: layer for t in times if {"share", "loss"} <= (layer := layers[t].get(name, {})).keys()
            }
            shares = [[100 * share for share in column["share"]] for column in columns.values()]
            losses = [column["loss"] for column in columns.values()]
            maps = {"share of tokens (%)": _padded(shares), "loss per token (nats)": _padded(losses)}
            numbers += sum(len(row) for rows in maps.values() for row in rows)
            label = f"{result.label}, layer {name}"
            grids.append({"c": index, "name": label, "x": list(columns), "maps": maps})
    caption = (
        "Share of the test tokens that the router sends to each expert, and their mean loss, "
        "after each stage (t = 0: untrained). First seed of the configuration."
    )
    return _grids("Experts over the stages", caption + _left_out(left_out), "mega-batch t", "expert", grids)


def matrices(section: Section) -> Panel | None:
    """The metric on each held-out part, past, present and to come, of each configuration."""
    name = f"test {section.results[0].display.name}"
    grids: list[dict[str, Any]] = []
    numbers, left_out = 0, 0
    for index, result in enumerate(section.results):
        cells = drift.mean_matrix(result)
        if cells and numbers > NUMBERS:
            left_out += 1
        elif cells:
            grids.append(_by_part(index, result, result.label, name, cells))
            numbers += len(cells) * len(cells[0])
    known = [value for grid in grids for row in grid["maps"][name] for value in row if value is not None]
    span = [min(known, default=0), max(known, default=1)]
    caption = (
        "After each mega-batch t, the test on the held-out part of each mega-batch j: means over "
        "seeds, in one colour scale for all configurations. Frames mark the diagonal (in-distribution); the "
        "past is to its left (backward transfer), the future to its right (forward transfer)."
    )
    caption += _left_out(left_out)
    return _grids("Evaluation matrix", caption, _PART, "after mega-batch", grids, diagonal=True, range=span)


def ages(section: Section) -> Panel | None:
    """Extra loss and regret of each configuration against its age; None without losses against age."""
    found = {id(each.result): each for each in age_table.aged(section.results)}
    if not found:
        return None
    known = [(i, found[id(r)]) for i, r in enumerate(section.results) if id(r) in found]
    unit = age_table.unit(known[0][1].result)
    measures = [
        {"name": f"{name} ({unit})", "lines": [_against_age(i, each.curves[name]) for i, each in known]}
        for name in known[0][1].curves
    ]
    return {
        "kind": "lines",
        "title": "Age",
        "caption": "Loss against the age of the model, the mega-batch of the held-out part minus the newest "
        "one that the model was trained on: the mean over seeds, with a band of ±1 standard deviation. Extra "
        "loss is beyond that of the model whose newest training data are of that part; models of a higher "
        "age have trained less. Regret is the loss above the best model of all configurations on that part.",
        "x": "age (mega-batches)",
        "points": True,
        "measures": measures,
    }


def _against_age(index: int, by_age: Mapping[float, Sequence[float]]) -> dict[str, Any]:
    """The points of a result."""
    means, deviations = zip(*map(mean_and_deviation, by_age.values()), strict=True) if by_age else ((), ())
    line = {"c": index, "t": list(by_age), "y": list(map(rounded, means)), "untrained": 0}
    return line | ({"deviation": list(map(rounded, deviations))} if any(deviations) else {})


def staleness(section: Section) -> Panel | None:
    """The table of losses against age."""
    found = age_table.aged(section.results)
    if not found:
        return None
    of = [i for i, r in enumerate(section.results) if any(each.result is r for each in found)]
    title = f"Staleness and regret ({age_table.unit(found[0].result)})"
    return _table(title, age_table.note(found), age_table.table(found), of)


def experts_by_part(section: Section) -> Panel | None:
    """Share of the tokens of each held-out part that each expert gets, after the last mega-batch."""
    grids = [
        _by_part(i, result, f"{result.label}, layer {layer}", "share of tokens (%)", cells)
        for i, result in enumerate(section.results)
        for layer, cells in drift.experts_by_part(result).items()
    ]
    caption = (
        "Share of the tokens of the held-out part of each mega-batch j that the router sends to "
        "each expert, after the last mega-batch. First seed of the configuration."
    )
    return _grids("Experts by held-out part", caption, _PART, "expert", grids)


def _grids(
    title: str, caption: str, x: str, y: str, grids: Sequence[Mapping[str, Any]], **more: Any
) -> Panel | None:
    """Matrices; None without any. The name of a column is the last letter of `x`."""
    if not grids:
        return None
    found = {"kind": "grids", "title": title, "caption": caption, "x": x, "y": y, "column": x[-1]}
    return found | more | {"grids": grids}


def _by_part(
    index: int, result: Result, name: str, measure: str, cells: Sequence[Sequence[float]]
) -> dict[str, Any]:
    """A grid whose columns are held-out parts, by their periods or numbers."""
    maps = {measure: [[rounded(value) for value in row] for row in cells]}
    columns: list[Any] = drift.periods(result) or [*range(1, len(cells[0]) + 1)]
    return {"c": index, "name": name, "x": columns, "maps": maps}


def _left_out(count: int) -> str:
    left = f" {count} further configuration{'s are' if count > 1 else ' is'} left out to keep the page small."
    return left if count else ""


def _padded(columns: Sequence[Sequence[float]]) -> list[list[float | int | None]]:
    """Columns of different lengths as rows (expert, stage); None where an expert does not exist yet."""
    return [[rounded(value) for value in row] for row in itertools.zip_longest(*columns)]


def settings(section: Section) -> Panel | None:
    """The settings that differ between configurations; the common ones as facts."""
    configs = [flatten({k: v for k, v in r.config.items() if k != "seed"}) for r in section.results]
    different = differing(configs)
    names = [name for name in different if name not in ALWAYS_SHOWN - VARIANT]
    rows = [
        [result.label, *(as_setting(config[name]) if name in config else "" for name in names)]
        for result, config in zip(section.results, configs, strict=True)
    ]
    common = {name: as_setting(value) for name, value in configs[0].items() if name not in different}
    caption = "Settings that differ, beside learner, waiting time and replay; empty if a learner lacks it."
    if not names:
        caption = "No settings differ but learner, waiting time and replay."
    found = _table("Settings", caption, [["configuration", *names], *rows])
    return found | {"facts": common, "facts_title": "Settings that all configurations share"}


def provenance(section: Section) -> Panel | None:
    """Where each run comes from: versions, machine, seeds, data; what all runs share as facts."""
    records = [
        _origin(run, rows)
        for result in section.results
        for run, rows in zip(result.runs, result.repeats, strict=True)
    ]
    of = [index for index, result in enumerate(section.results) for _ in result.runs]
    folder = os.path.commonpath([os.path.dirname(record["run"]) for record in records])
    for record in records:
        record |= {"folder": folder, "run": os.path.relpath(record["run"], folder)}
    names = [name for name in differing(records) if name != "run"]
    common = {name: value for name, value in records[0].items() if name != "run" and name not in names}
    rows = [[record.get(name, "") for name in ("run", *names)] for record in records]
    found = _table("Provenance", "The runs and what differs between them.", [["run", *names], *rows], of)
    return found | {"facts": common, "facts_title": "The same for all runs"}


def _origin(run: Run, rows: Rows) -> dict[str, str]:
    """Facts of run.json about a run: place, seeds, data, time, versions, machine."""
    info = {
        "run": os.path.abspath(run.directory),
        "command": run.info.get("command"),
        "seed": run.config["seed"],
        "average": run.config.get("average"),
        "seeds": run.info.get("seeds"),
        "started": run.info.get("created"),
        "seconds of training": f"{sum(column(rows, 'seconds').values()):.3g}",
        "commit": run.info.get("commit"),
        "versions": run.info.get("versions"),
        "machine": run.info.get("machine"),
        **{name: run.config.get(name) for name in ("stream", "stream_sha256", "dataset", "data")},
    }
    given = {name: value for name, value in info.items() if value not in (None, {}, [])}
    texts = {
        name.removeprefix("versions."): " ".join(map(str, value)) if isinstance(value, list) else str(value)
        for name, value in flatten(given).items()
    }
    return {name: text for name, text in texts.items() if text}


PANELS: list[Callable[[Section], Panel | None]] = [
    *(front, curves, matrices, ages, staleness, table, compared),
    *(advice, experts, experts_by_part, settings, provenance),
]
"""The panels of each section, in the order of the page."""


def panels(section: Section) -> list[Mapping[str, Any]]:
    """The panels that the section has data for."""
    return [panel for function in PANELS if (panel := function(section))]
