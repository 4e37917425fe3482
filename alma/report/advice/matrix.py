"""Read values of a metric, measured by other software, from CSV files.

A line has the value of a model, the time until which it was trained, and the time of its test data.
"""

import csv
import itertools
import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np

from alma.dates import number_in
from alma.errors import UserError, hint
from alma.report.advice.metric_of_column import (
    COLUMNS_OF_CELLS,
    MetricOptions,
    Value,
    column_of,
    metric_of,
)
from alma.report.advice.period import Period
from alma.report.losses import Losses
from alma.report.metric import Metric

_TIMES = ("trained_until", "tested_on")
_LARGEST = 1e100  # as in alma/schema.py, which needs a further package
_NUMBER_FORM = ": give a number up to 1e100, without %"
_FAR = 5  # steps between times to the next one, beyond which a single value is remarked on
_TIME_FORM = ": a number, or a date such as 2013, 2013-Q2, 2013-05, 2013-W05, 2013-05-31"
_FAR_POINTS = 50.0  # percentage points by which a typo is off, at least
_DAYS = {"week": 7.0, "month": 365.25 / 12, "quarter": 365.25 / 4, "year": 365.25}


class ValueTable(NamedTuple):
    """A table of values, one in each row."""

    name: object
    """Its file, or where else it comes from, for errors."""
    columns: Sequence[str]
    rows: Sequence[tuple[str, dict[str, str]]]
    """For each row its place, such as "losses.csv, line 2", and its cells by column."""


class LossGroup(NamedTuple):
    """The losses of one model and domain."""

    losses: Losses
    period: Period
    gpu_hours: float | None
    """Cost of the newest training that has one in the file; None: none has."""
    metric: Metric
    """Whose losses these are."""
    newest: str = ""
    """The label of the newest time of a model or test."""


@dataclass(frozen=True)
class _Line:
    """A line of a file."""

    place: str  # file and line, for errors
    group: str
    seed: str
    until: float
    tested: float
    newest: str  # label of the later of both times
    value: float
    gpu_hours: float | None

    @property
    def model(self) -> tuple[str, float]:
        """Seed and time of training."""
        return self.seed, self.until

    @property
    def cell(self) -> tuple[str, float, float]:
        """Seed, times of training and test: its place in the matrix of its group."""
        return self.seed, self.until, self.tested


def read_groups(
    paths: Sequence[Path], patterns: Sequence[str] = (), options: MetricOptions | None = None
) -> list[LossGroup]:
    """The losses of each model and domain in the files, in the order of the files.

    If there are `patterns`, only groups whose names match one of them are returned. `options` are
    those about the metric.

    UserError: a file cannot be read, lacks a column, or has a bad or repeated value; the metric is
    open; labels of time are of several kinds; a pattern fits no name; a group has fewer than two
    models or periods.
    """
    tables = [ValueTable(path, _columns(path), list(_rows(path))) for path in paths]
    return groups_of(tables, patterns, options)


def groups_of(
    tables: Sequence[ValueTable],
    patterns: Sequence[str] = (),
    options: MetricOptions | None = None,
) -> list[LossGroup]:
    """The losses of each model and domain in the tables, as `read_groups`, which reads files."""
    options = options or MetricOptions()
    kinds: dict[str, str] = {}
    lines = []
    columns = []
    for table in tables:
        column = column_of(table.name, table.columns, options)
        columns.append(column)
        for place, row in table.rows:
            lines.append(_line(place, row, column, kinds))
    if len(set(columns)) > 1:
        names = ", ".join(dict.fromkeys(columns))
        raise UserError(f"files with several metrics, {names}: give --metric COLUMN that all have")
    values = [Value(line.place, line.value) for line in lines]
    metric = metric_of(columns[0], values, options)
    lines_by_group: dict[str, list[_Line]] = {}
    for line in lines:
        lines_by_group.setdefault(line.group, []).append(line)
    kind = next(iter(kinds))
    chosen = _matching(list(lines_by_group), patterns)
    return [_group(lines_by_group[name], kind, metric) for name in chosen]


def _matching(groups: Sequence[str], patterns: Sequence[str]) -> list[str]:
    """The groups that fit a pattern; all without patterns. UserError: a pattern fits none."""
    if not patterns:
        return list(groups)
    matching = set()
    for pattern in patterns:
        names = {name for name in groups if fnmatchcase(name, pattern)}
        if not names:
            close = hint(pattern, groups)
            raise UserError(f"--groups {pattern}: no such group in the file; {close}")
        matching |= names
    return [name for name in groups if name in matching]


def _table(path: Path) -> "csv.DictReader[str]":
    """The table in a file. UserError: it cannot be read."""
    try:
        return csv.DictReader(path.read_text("utf-8-sig").splitlines())
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise UserError(f"cannot read {path}: {reason}") from error


def _columns(path: Path) -> list[str]:
    """The names in line 1 of a file. UserError: it cannot be read, or times are missing."""
    columns = list(_table(path).fieldnames or [])
    missing = [name for name in _TIMES if name not in columns]
    if not set(columns) - set(COLUMNS_OF_CELLS):
        missing.append("loss, accuracy or another metric")
    if missing:
        form = f"name the columns {', '.join(_TIMES)} and a metric in line 1, with commas"
        raise UserError(f"{path}: no column {', '.join(missing)}: {form}")
    return columns


def _rows(path: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """The lines of a file with their places."""
    table = _table(path)
    row = None
    try:
        for row in table:
            place = f"{path}, line {table.line_num}"
            if None in row or None in row.values():
                raise UserError(f"{place}: as many values as line 1 has names")
            yield place, row
    except csv.Error as error:
        place = f"{path}, line {table.line_num + 1}"
        raise UserError(f"{place}: not CSV ({error}): is a quote left open?") from None
    if row is None:
        raise UserError(f"{path}: no losses below the names of the columns")


def _line(place: str, row: dict[str, str], column: str, kinds: dict[str, str]) -> _Line:
    """Parse a line with a value in `column`, and note the kind of its time labels in `kinds`.

    `kinds` maps each kind, such as "month", to the place of its first label, for errors.
    """
    until, tested = (_time(row[name], f"{place}, {name}", kinds) for name in _TIMES)
    names = [row[column].strip() for column in ("model", "domain") if row.get(column)]
    hours = None
    if row.get("gpu_hours"):
        hours = _number(row["gpu_hours"], f"{place}, gpu_hours")
        if hours < 0:
            raise UserError(f"{place}, gpu_hours: {hours:g}: give a number from 0 on")
    value = _number(row[column], f"{place}, {column}")
    return _Line(
        place=place,
        group="/".join(names) or Path(place.rpartition(", line ")[0]).stem,
        seed=row.get("seed", "").strip(),
        until=until,
        tested=tested,
        newest=row["tested_on" if tested >= until else "trained_until"].strip(),
        value=value,
        gpu_hours=hours,
    )


def _time(label: str, place: str, kinds: dict[str, str]) -> float:
    """A time label as a number: that of its quarter, month, week or day, or the number itself."""
    label = label.strip()
    try:
        kind = Period.of([label]).noun
    except ValueError as error:
        raise UserError(f"{place}: no such date: {label}") from error
    if kind in ("mega-batch", "year"):
        kind = ""
        value = _number(label, place, _TIME_FORM)
    else:
        value = float(number_in(kind, label))
    first_place = kinds.setdefault(kind, place)
    for other_place in kinds.values():
        if other_place != first_place:
            clash = f"{label} is another kind of time than in {other_place}"
            raise UserError(f"{place}: {clash}: use one kind")
    return value


def _number(text: str, place: str, form: str = _NUMBER_FORM) -> float:
    """A finite number. UserError: it is none; `form` says what is expected."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not abs(value) <= _LARGEST:  # NaN, too
        raise UserError(f"{place}: {text.strip() or 'empty'}{form}")
    return value


def _group(lines: Sequence[_Line], kind: str, metric: Metric) -> LossGroup:
    """Build the matrices of one group, one per seed.

    `kind` is the kind of its time labels, such as "month"; "" for numbers.
    """
    label = lines[0].group
    line_by_cell = _lines_by_cell(lines)
    until = sorted({line.until for line in lines})
    tested = sorted({line.tested for line in lines})
    for values, name in ((until, "trained_until"), (tested, "tested_on")):
        if len(values) < 2:
            raise UserError(f"{label}: a single value of {name}: staleness needs two or more")
    remarks = [metric.remark, *_far_times(lines), *_events(lines, metric)]
    metric = replace(metric, remark=" ".join(filter(None, remarks)))
    seeds = []
    for seed in dict.fromkeys(line.seed for line in lines):
        rows = []
        for u in until:
            cells = [line_by_cell.get((seed, u, p)) for p in tested]
            rows.append(tuple(metric.loss(line.value) if line else math.nan for line in cells))
        seeds.append(tuple(rows))
    losses = Losses(label, tuple(until), tuple(tested), tuple(seeds))
    newest = max(lines, key=lambda line: max(line.until, line.tested)).newest
    return LossGroup(losses, _period(until, tested, kind), _newest_hours(lines), metric, newest)


def _lines_by_cell(lines: Sequence[_Line]) -> dict[tuple[str, float, float], _Line]:
    """The line of each cell. UserError: a cell is repeated."""
    line_by_cell: dict[tuple[str, float, float], _Line] = {}
    for line in lines:
        first = line_by_cell.setdefault(line.cell, line)
        if first is not line:
            raise UserError(
                f"{line.place}: {line.group}: the same model, period and seed as {first.place}: "
                "leave out one, or number the seeds in a column `seed`"
            )
    return line_by_cell


def _far_times(lines: Sequence[_Line]) -> list[str]:
    """A sentence for a time that has a single value and is far from all others: maybe a typo.

    One such time may stretch the law to ages that no model has.
    """
    sentences = []
    for name, times in (
        ("trained_until", [line.until for line in lines]),
        ("tested_on", [line.tested for line in lines]),
    ):
        at, counts = np.unique(times, return_counts=True)
        gaps = np.diff(at)
        if len(at) < 4 or np.median(counts) < 3:
            continue
        to_next = np.minimum(np.append(gaps, np.inf), np.insert(gaps, 0, np.inf))
        is_far = (counts == 1) & (to_next > _FAR * np.median(gaps))
        for time in at[is_far]:
            place = lines[times.index(time)].place
            sentences.append(
                f"{place}: the only value of its {name}, which is far from all others: "
                "is the date right?"
            )
    return sentences


def _events(lines: Sequence[_Line], metric: Metric) -> list[str]:
    """A sentence for each period on which several models are far from their usual values.

    Such as an outage: an event of the stream, not a typo. `lines` are those of one group.

    UserError: a value is far from all others of its period and model, and no other model agrees.
    """
    losses = [metric.loss(line.value) for line in lines]
    periods = [line.tested for line in lines]
    distances = []
    rises = []
    above_period = _above_usual(losses, periods)
    above_model = _above_usual(losses, [line.model for line in lines])
    for from_period, from_model in zip(above_period, above_model, strict=True):
        distances.append(min(abs(from_period), abs(from_model)))
        rises.append(from_model)
    limit = _far_distance(losses, distances, metric)
    rises_of_period = _by_key(rises, periods)
    sentences: dict[float, str] = {}  # by period
    farthest_first = sorted(range(len(lines)), key=lambda index: -distances[index])
    for index in farthest_first:
        line = lines[index]
        agreeing = _agreeing(rises[index], rises_of_period[line.tested])
        name = f"{line.place}, {metric.name}: {line.value:g}"
        if distances[index] > limit and agreeing < 2:
            far = "is far from the others of its period and model"
            raise UserError(f"{name} {far}: correct it, or leave it out")
        is_event = abs(rises[index]) > limit and agreeing >= 2
        if is_event and line.tested not in sentences:
            sentences[line.tested] = (
                f"{name} is far from the model's other values, and {agreeing} models agree on "
                "this period: it was read as an event; leave the period out if it was a fault."
            )
    return list(sentences.values())


def _by_key(values: Sequence[float], keys: Sequence[Hashable]) -> dict[Hashable, list[float]]:
    """The values that have the same key."""
    groups: dict[Hashable, list[float]] = {}
    for value, key in zip(values, keys, strict=True):
        groups.setdefault(key, []).append(value)
    return groups


def _above_usual(losses: Sequence[float], keys: Sequence[Hashable]) -> list[float]:
    """Each loss minus the median of those with the same key."""
    usual = {key: median(values) for key, values in _by_key(losses, keys).items()}
    return [loss - usual[key] for loss, key in zip(losses, keys, strict=True)]


def _far_distance(losses: Sequence[float], distances: Sequence[float], metric: Metric) -> float:
    """The distance from usual losses above which a loss is far from them."""
    far_apart = _FAR_POINTS
    if metric.nats:
        far_apart = 1 / metric.nats
    elif not metric.in_points:
        far_apart = median(abs(loss) for loss in losses)
    usual = sorted(distances)[-len(distances) // 20 - 1]  # the 95th percentile
    return max(far_apart, 10 * usual)


def _agreeing(rise: float, rises: Sequence[float]) -> int:
    """How many of the rises of one period, itself included, are half to twice as large as it."""
    if rise == 0:
        return len(rises)
    return sum(0.5 <= candidate / rise <= 2 for candidate in rises)


def _period(until: Sequence[float], tested: Sequence[float], kind: str) -> Period:
    """The period of a group: the median distance between two test times.

    `until` and `tested` are the times of training and test, `kind` the kind of their labels.
    """
    gaps = [later - earlier for earlier, later in itertools.pairwise(tested)]
    step = median(gaps)
    if kind == "day":
        for noun, days in _DAYS.items():  # weeks and longer periods may be named by a day
            if 0.9 < step / days < 1.1:
                return Period(noun, days)
        return Period(kind) if min(gaps) < 2 else Period(size=step)
    if kind:
        return Period(kind)
    are_years = all(1900 <= time <= 2100 and time.is_integer() for time in (*until, *tested))
    return Period("year") if are_years else Period(size=step)


def _newest_hours(lines: Sequence[_Line]) -> float | None:
    """GPU-hours of the newest training that has them."""
    paid = [line for line in lines if line.gpu_hours]
    if not paid:
        return None
    return max(paid, key=lambda line: line.until).gpu_hours
