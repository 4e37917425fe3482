"""How runs of a tracker hold the evaluation matrix of deployed models, as docs/trackers.md says.

Layout 1: a run for each model and period; the period is a tag or a param.
Layout 2: a run for each model; the period is in the name of the metric, `accuracy/2024-03`, or, on
request, its step.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from alma.dates import label, number_in
from alma.errors import UserError, hint
from alma.report.advice.matrix import ValueTable
from alma.report.advice.metric_of_column import COLUMNS_OF_CELLS
from alma.report.advice.period import Period

MODEL_DATES = ("trained_until", "model_date", "train_end")
"""Names of the tag or param with the date until which a model was trained."""
PERIODS = ("tested_on", "eval_period", "test_period")
"""Names of the tag or param with the period of a test."""
STEP = "step"
"""In place of a name of PERIODS: the steps of the metric are the periods."""
_FURTHER = ("model", "domain", "seed", "gpu_hours")
_LABEL = r"\d{4}(?:-(?:Q[1-4]|W\d\d|\d\d(?:-\d\d)?))?"
_MONTH = re.compile(r"(?:19|20)\d\d(?:0[1-9]|1[0-2])")
_HOW_TO_LOG = "log a tag tested_on=2024-03 in a run for each period, or metrics such as"


@dataclass(frozen=True)
class TrackedRun:
    """A finished run of a tracker."""

    run_id: str
    name: str
    started: str
    """The day on which it started, such as "2024-03-31"."""
    facts: Mapping[str, str]
    """Its params and tags; those of its parent, too, where it has none of the name."""
    metrics: Mapping[str, float]
    """The last value of each metric."""
    steps: Mapping[int, float] = field(default_factory=dict)
    """Of the metric that was asked for, the last value at each step, if steps are periods."""

    @property
    def place(self) -> str:
        """For errors."""
        return f"run {self.name or self.run_id[:8]}"

    def fact(self, names: Sequence[str]) -> str:
        """The first of these tags or params that it has; empty: none."""
        for name in names:
            text = self.facts.get(name, "").strip()
            if text:
                return text
        return ""


@dataclass(frozen=True)
class Reading:
    """Where a reader looks for the values of a matrix."""

    experiment: str
    metric: str
    model_date: str = ""
    """The tag or param with the date of a model; empty: one of MODEL_DATES."""
    period: str = ""
    """That with the period of a test, or STEP; empty: one of PERIODS."""

    @property
    def model_dates(self) -> tuple[str, ...]:
        """The names under which the date of a model may be."""
        return (self.model_date,) if self.model_date else MODEL_DATES

    @property
    def periods(self) -> tuple[str, ...]:
        """The names under which the period of a test may be."""
        return (self.period,) if self.period else PERIODS


@dataclass
class TrackedMatrix:
    """The matrix of an experiment, and lines on how it was read."""

    table: ValueTable
    remarks: list[str]


def matrix_of(runs: Sequence[TrackedRun], reading: Reading) -> TrackedMatrix:
    """The values of a metric by model and period, as the table of a CSV file of `--matrix`.

    UserError: no run has the metric, or none has a period; a model has no date; a cell is repeated.
    """
    runs_with_metric = [run for run in runs if _has_metric(run, reading.metric)]
    if not runs_with_metric:
        _refuse_metric(runs, reading)
    tests_by_run = [(run, _tests(run, reading)) for run in runs_with_metric]
    tested = [(run, tests) for run, tests in tests_by_run if tests]
    if not tested:
        raise UserError(
            f"{reading.experiment}: no run says on which period its {reading.metric} was measured: "
            f"{_HOW_TO_LOG} {reading.metric}/2024-03, or give --period-tag"
        )
    kind = _kind([period for _, tests in tested for period in tests])
    rows = []
    dated_by_start = 0
    for run, tests in tested:
        until = _label(run.fact(reading.model_dates))
        if not until:
            until = _start(run, kind, reading)
            dated_by_start += 1
        rows += [(run.place, _row(run, until, *test, reading)) for test in tests.items()]
    _check_repeats(rows, reading)
    remarks = [f"{reading.experiment}: {_count(len(tested), 'run')} with {reading.metric} read"]
    _note(remarks, len(runs) - len(runs_with_metric), f"without {reading.metric}")
    _note(remarks, len(tests_by_run) - len(tested), "without a period")
    if dated_by_start:
        remarks.append(
            f"{_count(dated_by_start, 'run')} without {' or '.join(reading.model_dates[:2])}: "
            "the start of the run is taken for the date of its model"
        )
    columns = [*COLUMNS_OF_CELLS, reading.metric]
    return TrackedMatrix(ValueTable(reading.experiment, columns, rows), remarks)


def _has_metric(run: TrackedRun, metric: str) -> bool:
    """Whether a run has the metric, of any period."""
    return metric in run.metrics or any(_period_in(name, metric) for name in run.metrics)


def _period_in(name: str, metric: str) -> str:
    """The period in the name of a metric, such as accuracy/2024-03; empty: none."""
    match = re.fullmatch(rf"{re.escape(metric)}[/_.: -]({_LABEL})", name)
    return match[1] if match else ""


def _tests(run: TrackedRun, reading: Reading) -> dict[str, float]:
    """The values of a run by period; empty: it names none."""
    if reading.period == STEP:
        return {_label(str(step)): value for step, value in run.steps.items()}
    values = {}
    for name, value in run.metrics.items():
        period = _period_in(name, reading.metric)
        if period:
            values[period] = value
    of_tag = {}
    period = _label(run.fact(reading.periods))
    if period and reading.metric in run.metrics:
        of_tag[period] = run.metrics[reading.metric]
    if reading.period and of_tag:
        return of_tag
    return values or of_tag


def _label(text: str) -> str:
    """A date as `--matrix` reads it: 202403, as steps have it, is 2024-03."""
    return f"{text[:4]}-{text[4:]}" if _MONTH.fullmatch(text) else text


def _kind(periods: Sequence[str]) -> str:
    """The kind of the periods, such as "month"; "mega-batch" if they are no dates."""
    try:
        return Period.of(periods[:1]).noun
    except ValueError:
        return "mega-batch"  # no such date, which the reader of the matrix says


def _start(run: TrackedRun, kind: str, reading: Reading) -> str:
    """The start of a run as a period of a kind. UserError: the periods are no dates."""
    if kind == "mega-batch":
        raise UserError(
            f"{run.place}: until when was its model trained? Log a tag {reading.model_dates[0]}, "
            "or give --model-date-tag"
        )
    if kind == "day":
        return run.started
    return label(kind, number_in(kind, run.started))


def _row(
    run: TrackedRun, until: str, tested_on: str, value: float, reading: Reading
) -> dict[str, str]:
    """A test as a row of the CSV file."""
    row = {name: run.fact([name]) for name in _FURTHER}
    if not row["model"] and not row["domain"]:
        row["model"] = reading.experiment  # names the group
    row |= {"trained_until": until, "tested_on": tested_on, reading.metric: repr(value)}
    return row


def _check_repeats(rows: Sequence[tuple[str, dict[str, str]]], reading: Reading) -> None:
    """Raise a UserError if two runs tested the same model on the same period."""
    places: dict[tuple[str, ...], str] = {}
    for place, row in rows:
        cell = (*(row[name] for name in _FURTHER[:3]), row["trained_until"], row["tested_on"])
        if cell in places:
            raise UserError(
                f"{reading.experiment}: {places[cell]} and {place} are of a model of "
                f"{row['trained_until']} on {row['tested_on']}: delete one in MLflow, or log a "
                "param model or seed that tells them apart"
            )
        places[cell] = place


def _refuse_metric(runs: Sequence[TrackedRun], reading: Reading) -> None:
    """Raise a UserError that names the metrics that there are."""
    names: dict[str, None] = {}
    for run in runs:
        for name in run.metrics:
            names[re.sub(rf"[/_.: -]{_LABEL}$", "", name)] = None
    if not names:
        raise UserError(f"{reading.experiment}: no finished run has a metric")
    choice = hint(reading.metric, sorted(names))
    raise UserError(f"--metric {reading.metric}: no finished run has it; {choice}")


def _note(remarks: list[str], number: int, reason: str) -> None:
    """Add a line on runs that are left out, if there are some."""
    if number:
        remarks.append(f"left out: {_count(number, 'run')} {reason}")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
