"""Losses from a CSV file of elsewhere: models trained until some time, tested on others."""

import csv
import itertools
import math
import re
from collections.abc import Iterator, Sequence
from datetime import date
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from alma.errors import UserError, hint
from alma.report.advice.cadence import Period, Retraining, TrainingCost, retraining
from alma.report.advice.staleness import StalenessBacktest, look_back_on
from alma.report.advice.text import DocumentPart
from alma.report.age import Losses
from alma.schema import is_number

_NEEDED = ("trained_until", "tested_on", "loss")
_GROUP = ("model", "domain")
_UNIT = "nats"


class LossGroup(NamedTuple):
    """The losses of one model and domain."""

    losses: Losses
    unit: str  # of time: "months", "days", or "" of plain numbers
    gpu_hours: float | None  # of the newest training; None: the file has none

    @property
    def period(self) -> Period:
        """A month, a day, or the median distance of the held-out parts."""
        if self.unit:
            return Period(self.unit.removesuffix("s"))
        return Period(size=median(b - a for a, b in itertools.pairwise(self.losses.periods)))

    def name(self, time: float) -> str:
        """A time as the file writes it."""
        if self.unit == "days":
            return date.fromordinal(int(time)).isoformat()
        if self.unit == "months":
            return f"{int(time - 1) // 12}-{int(time - 1) % 12 + 1:02}"
        return f"{time:g}"


class MatrixReport(NamedTuple):
    """The answers, or the backtests, of several groups."""

    found: Sequence[Retraining | StalenessBacktest]

    @property
    def parts(self) -> list[DocumentPart]:
        """The document; only the last part has the note."""
        *parts, last = (part for each in self.found for part in each.parts)
        return [*(part._replace(below=()) for part in parts), last]

    def record(self) -> dict[str, Any]:
        """For JSON."""
        return {"groups": [each.record() for each in self.found]}


def report_on(groups: Sequence[LossGroup], backtest: bool, **asked: Any) -> MatrixReport:
    """The answer of `retraining`, as it is `asked`, or the backtest, of each group. UserError: one is too
    small."""
    if backtest:
        return MatrixReport([look_back_on(g.losses.label, _UNIT, [g.losses], g.name) for g in groups])
    return MatrixReport(
        [retraining(g.losses, _UNIT, g.period, TrainingCost(hours=g.gpu_hours), **asked) for g in groups]
    )


class _Loss(NamedTuple):
    """A line of the file."""

    place: str  # file and line, for errors
    group: str
    seed: str
    until: float
    tested: float
    loss: float
    gpu_hours: float | None


def read_groups(paths: Sequence[Path], wanted: Sequence[str] = ()) -> list[LossGroup]:
    """The losses of each model and domain of the files, in their order; of names that fit a pattern of
    `wanted`, if there are any.

    UserError: a file cannot be read, lacks a column, has a bad or a repeated value; labels of time are of
    several kinds; a pattern fits no name; a group has fewer than two models or periods.
    """
    kinds: dict[str, str] = {}
    lines = [line for path in paths for line in _lines(path, kinds)]
    groups = list(dict.fromkeys(line.group for line in lines))
    for pattern in wanted:
        if not any(fnmatchcase(group, pattern) for group in groups):
            raise UserError(f"--groups {pattern}: no such group in the file; {hint(pattern, groups)}")
    chosen = [g for g in groups if not wanted or any(fnmatchcase(g, pattern) for pattern in wanted)]
    (unit,) = kinds
    found = []
    for group in chosen:
        own = [line for line in lines if line.group == group]
        found.append(LossGroup(_losses(group, own), unit, max(own, key=lambda line: line.until).gpu_hours))
    return found


def _lines(path: Path, kinds: dict[str, str]) -> Iterator[_Loss]:
    """The lines of a file; `kinds` gets the kind of its labels of time, with the place of the first one."""
    try:
        text = path.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise UserError(f"cannot read {path}: {reason}") from error
    table = csv.DictReader(text.splitlines())
    missing = [name for name in _NEEDED if name not in (table.fieldnames or [])]
    if missing:
        raise UserError(f"{path}: no column {', '.join(missing)}: line 1 names {', '.join(_NEEDED)}")
    empty = True
    for row in _rows(table, path):
        place, empty = f"{path}, line {table.line_num}", False
        if None in row or None in row.values():
            raise UserError(f"{place}: as many values as line 1 has names")
        names = [row[name].strip() for name in _GROUP if row.get(name)]
        until, tested = (_time(row[name], f"{place}, {name}", kinds) for name in _NEEDED[:2])
        loss = _number(row["loss"], f"{place}, loss")
        hours = _number(row["gpu_hours"], f"{place}, gpu_hours") if row.get("gpu_hours") else None
        group, seed = "/".join(names) or path.stem, row.get("seed", "").strip()
        yield _Loss(place, group, seed, until, tested, loss, hours)
    if empty:
        raise UserError(f"{path}: no losses below the names of the columns")


def _rows(table: "csv.DictReader[str]", path: Path) -> Iterator[dict[str, Any]]:
    try:
        yield from table
    except csv.Error as error:
        raise UserError(
            f"{path}, line {table.line_num + 1}: not CSV ({error}): is a quote left open?"
        ) from None


def _time(text: str, place: str, kinds: dict[str, str]) -> float:
    """A label of time as a number of years, months or days, or as it is."""
    kind, value = "", 0.0
    try:
        if re.fullmatch(r"\d{4}-\d{2}(-\d{2})?", text := text.strip()):
            day = date.fromisoformat(text if len(text) > 7 else f"{text}-01")
            kind = "days" if len(text) > 7 else "months"
            value = float(day.toordinal() if len(text) > 7 else 12 * day.year + day.month)
    except ValueError as error:
        raise UserError(f"{place}: no such date: {text}") from error
    value = value if kind else _number(text, place, ": a number, or a date such as 2013, 2013-05, 2013-05-31")
    first = kinds.setdefault(kind, place)
    if len(kinds) > 1:
        other = next(each for each in kinds.values() if each != first)
        raise UserError(f"{place}: {text} is another kind of time than in {other}: use one kind")
    return value


def _number(text: str, place: str, form: str = ": a number up to 1e100") -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or not is_number(value):
        raise UserError(f"{place}: {text.strip() or 'empty'}{form}")
    return value


def _losses(label: str, lines: Sequence[_Loss]) -> Losses:
    """The matrix of each seed."""
    cells: dict[tuple[str, float, float], _Loss] = {}
    for line in lines:
        first = cells.setdefault((line.seed, line.until, line.tested), line)
        if first is not line:
            again = f"{line.place}: {label}: the same model, period and seed as {first.place}"
            raise UserError(f"{again}: leave out one, or number the seeds in a column `seed`")
    until, tested = sorted({line.until for line in lines}), sorted({line.tested for line in lines})
    for count, what in ((len(until), "trained_until"), (len(tested), "tested_on")):
        if count < 2:
            raise UserError(f"{label}: a single value of {what}: staleness needs two or more")
    seeds = tuple(
        tuple(tuple(cells[s, u, p].loss if (s, u, p) in cells else math.nan for p in tested) for u in until)
        for s in dict.fromkeys(line.seed for line in lines)
    )
    return Losses(label, tuple(until), tuple(tested), seeds)
