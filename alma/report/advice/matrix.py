"""Losses measured by other software, from a CSV file: models trained until some time, tested on others."""

import csv
import itertools
import math
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from alma.dates import number_in
from alma.errors import UserError, hint
from alma.report.advice.cadence import Period, Retraining, TrainingCost
from alma.report.losses import Losses
from alma.report.tables import TitledTable
from alma.schema import is_number

_TIMES = ("trained_until", "tested_on")
_FORM = ": a number, or a date such as 2013, 2013-Q2, 2013-05, 2013-W05, 2013-05-31"
_DAYS = {"week": 7.0, "month": 365.25 / 12, "quarter": 365.25 / 4, "year": 365.25}
_NEEDED = (*_TIMES, "loss")


class LossGroup(NamedTuple):
    """The losses of one model and domain."""

    losses: Losses
    period: Period
    gpu_hours: float | None  # of the newest training that has them; None: the file has none


class MatrixReport:
    """How often to retrain each of several groups; `asked`: options of `Retraining`.

    UserError: a group is too small.
    """

    def __init__(self, groups: Sequence[LossGroup], **asked: Any):
        self.found: list[Retraining] = []
        for each in groups:
            cost = TrainingCost(hours=each.gpu_hours)
            self.found.append(Retraining(each.losses, "nats", each.period, cost, **asked))

    @property
    def parts(self) -> list[TitledTable]:
        """The document; only the last part has the note."""
        *parts, last = (part for each in self.found for part in each.parts)
        return [*(part._replace(note="") for part in parts), last]

    def record(self) -> dict[str, Any]:
        """For JSON."""
        return {"groups": [each.record() for each in self.found]}


class _Loss(NamedTuple):
    """A line of a file."""

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
    lines = [_loss(place, row, kinds) for path in paths for place, row in _rows(path)]
    groups = list(dict.fromkeys(line.group for line in lines))
    for pattern in wanted:
        if not any(fnmatchcase(group, pattern) for group in groups):
            raise UserError(f"--groups {pattern}: no such group in the file; {hint(pattern, groups)}")
    chosen = [g for g in groups if not wanted or any(fnmatchcase(g, pattern) for pattern in wanted)]
    return [_group([line for line in lines if line.group == group], *kinds) for group in chosen]


def _rows(path: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """The lines of a file with their places."""
    try:
        table = csv.DictReader(path.read_text("utf-8-sig").splitlines())
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise UserError(f"cannot read {path}: {reason}") from error
    missing = [name for name in _NEEDED if name not in (table.fieldnames or [])]
    if missing:
        form = f"name the columns {', '.join(_NEEDED)} in line 1, with commas"
        raise UserError(f"{path}: no column {', '.join(missing)}: {form}")
    row = None
    try:
        for row in table:
            if None in row or None in row.values():
                raise UserError(f"{path}, line {table.line_num}: as many values as line 1 has names")
            yield f"{path}, line {table.line_num}", row
    except csv.Error as error:
        place = f"{path}, line {table.line_num + 1}"
        raise UserError(f"{place}: not CSV ({error}): is a quote left open?") from None
    if row is None:
        raise UserError(f"{path}: no losses below the names of the columns")


def _loss(place: str, row: dict[str, str], kinds: dict[str, str]) -> _Loss:
    """A line; `kinds` gets the kind of its labels of time, with the first place."""
    until, tested = (_time(row[name], f"{place}, {name}", kinds) for name in _TIMES)
    group = "/".join(row[name].strip() for name in ("model", "domain") if row.get(name))
    hours = _number(row["gpu_hours"], f"{place}, gpu_hours") if row.get("gpu_hours") else None
    if hours is not None and hours < 0:
        raise UserError(f"{place}, gpu_hours: {hours:g}: give a number from 0 on")
    loss, named = _number(row["loss"], f"{place}, loss"), group or Path(place.rpartition(", line ")[0]).stem
    return _Loss(place, named, row.get("seed", "").strip(), until, tested, loss, hours)


def _time(text: str, place: str, kinds: dict[str, str]) -> float:
    """A label of time as the number of its quarter, month, week or day, or the number that it is."""
    try:
        kind = Period.of([text := text.strip()]).noun
    except ValueError as error:
        raise UserError(f"{place}: no such date: {text}") from error
    if kind in ("mega-batch", "year"):
        kind, value = "", _number(text, place, _FORM)
    else:
        value = float(number_in(kind, text))
    first = kinds.setdefault(kind, place)
    if len(kinds) > 1:
        other = next(each for each in kinds.values() if each != first)
        raise UserError(f"{place}: {text} is another kind of time than in {other}: use one kind")
    return value


def _number(text: str, place: str, form: str = ": give a number up to 1e100") -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or not is_number(value):
        raise UserError(f"{place}: {text.strip() or 'empty'}{form}")
    return value


def _check_extremes(lines: Sequence[_Loss]) -> None:
    """UserError: one loss is so far from all others of its period and its model that it may be a slip."""
    others: dict[Any, list[float]] = {}
    for line in lines:
        for key in (line.tested, (line.seed, line.until)):
            others.setdefault(key, []).append(line.loss)
    typical = {key: median(values) for key, values in others.items()}
    apart = [min(abs(x.loss - typical[x.tested]), abs(x.loss - typical[x.seed, x.until])) for x in lines]
    worst = max(range(len(lines)), key=apart.__getitem__)
    if apart[worst] > max(1.0, 10 * sorted(apart)[-len(apart) // 20 - 1]):
        place, loss = lines[worst].place, lines[worst].loss
        far = "is far from the others of its period and model"
        raise UserError(f"{place}, loss: {loss:g} {far}: correct it, or leave it out")


def _group(lines: Sequence[_Loss], kind: str) -> LossGroup:
    """The matrix of each seed of one group."""
    label, cells = lines[0].group, dict[tuple[str, float, float], _Loss]()
    for line in lines:
        first = cells.setdefault((line.seed, line.until, line.tested), line)
        if first is not line:
            again = f"{line.place}: {label}: the same model, period and seed as {first.place}"
            raise UserError(f"{again}: leave out one, or number the seeds in a column `seed`")
    until, tested = sorted({line.until for line in lines}), sorted({line.tested for line in lines})
    for count, what in zip((len(until), len(tested)), _TIMES, strict=True):
        if count < 2:
            raise UserError(f"{label}: a single value of {what}: staleness needs two or more")
    seeds = tuple(
        tuple(tuple(cells[s, u, p].loss if (s, u, p) in cells else math.nan for p in tested) for u in until)
        for s in dict.fromkeys(line.seed for line in lines)
    )
    _check_extremes(lines)
    gaps, paid = [b - a for a, b in itertools.pairwise(tested)], [x for x in lines if x.gpu_hours]
    step = median(gaps)
    if kind == "day":  # weeks and months may be named by a day
        alike = [Period(noun, days) for noun, days in _DAYS.items() if 0.9 < step / days < 1.1]
        period = [*alike, Period(kind) if min(gaps) < 2 else Period(size=step)][0]
    elif kind or all(1900 <= time <= 2100 and time.is_integer() for time in (*until, *tested)):
        period = Period(kind or "year")
    else:
        period = Period(size=step)
    newest = max(paid, key=lambda line: line.until, default=lines[0])
    return LossGroup(Losses(label, tuple(until), tuple(tested), seeds), period, newest.gpu_hours)
