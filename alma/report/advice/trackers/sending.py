"""`alma report --mlflow`: run records as runs of MLflow, beside a run with the report and advice.

A record is known by `alma.run_id`, a tag: what MLflow has of it is never logged again.
"""

import hashlib
import json
import math
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from alma import metrics
from alma.configs import flatten
from alma.errors import UserError
from alma.records import Run
from alma.report.advice.advice import Advice, advise
from alma.report.advice.candidates import one_section
from alma.report.advice.trackers.decisions import log_files, run_with, set_tag, tags_of
from alma.report.advice.trackers.reading import KIND
from alma.report.advice.trackers.store import (
    DEFAULT_EXPERIMENT,
    all_pages,
    connected,
    folder_of_files,
    one_line_errors,
)
from alma.report.page import write_page
from alma.report.raw import Raw

RUN_ID = "alma.run_id"
RECORD = "record"
REPORT = "report"
_PARAM_LENGTH = 500  # characters, which all versions of MLflow take
_BATCH = 500  # points; MLflow takes 1,000 at once
_PARAMS = 100  # params at once


class TrackedPoint(NamedTuple):
    """A value of a metric."""

    key: str
    value: float
    timestamp: int
    """Milliseconds since 1970."""
    step: int
    """The mega-batch t."""


def send(uri: str, runs: Sequence[Run], experiment: str, remarks: Sequence[str]) -> list[str]:
    """Log records, the report page and the advice; returns lines about what was logged.

    runs        their raw weights count as parts of them
    experiment  name; empty: DEFAULT_EXPERIMENT. It is made if there is none.
    remarks     lines about runs left out, for the page

    UserError: MLflow is not installed, does not answer, or refuses.
    """
    client = connected(uri, "--mlflow", creates=True)
    name = experiment or DEFAULT_EXPERIMENT
    counts = {"new": 0, "updated": 0, "unchanged": 0}
    with one_line_errors(uri):
        experiment_id = _experiment(client, name, uri)
        logged = _logged_runs(client, experiment_id)
        records: dict[str, Run] = {}
        for run in runs:
            if run.rows and not isinstance(run, Raw):
                records.setdefault(run_id_of(run), run)
        for run_id, run in records.items():
            counts[_send_record(client, experiment_id, run, run_id, logged.get(run_id))] += 1
        lines = _send_report(client, experiment_id, runs, remarks)
    summary = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
    return [f"MLflow, experiment {name}: records {summary}", *lines]


def run_id_of(run: Run) -> str:
    """What identifies a record wherever its folder is: its settings and when it was created.

    The number of mega-batches does not count, which grows with a stream.
    """
    settings = {key: value for key, value in run.config.items() if key != "megabatches"}
    text = json.dumps([settings, run.info.get("created")], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _experiment(client: Any, name: str, uri: str) -> str:
    """The id of an experiment, which is made if there is none. UserError: it was deleted."""
    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        return str(client.create_experiment(name, artifact_location=folder_of_files(uri)))
    if experiment.lifecycle_stage != "active":
        raise UserError(f"--experiment {name} was deleted in MLflow: restore it, or name another")
    return str(experiment.experiment_id)


def _logged_runs(client: Any, experiment_id: str) -> dict[str, Any]:
    """The runs of MLflow by the record that they hold."""
    runs = {}
    for run in all_pages(client.search_runs, [experiment_id]):
        if RUN_ID in run.data.tags:
            runs[run.data.tags[RUN_ID]] = run
    return runs


def _send_record(client: Any, experiment_id: str, run: Run, run_id: str, logged: Any) -> str:
    """Log what MLflow lacks of a record; returns "new", "updated" or "unchanged"."""
    from mlflow.entities import Metric, Param

    points = points_of(run)
    if logged is None:
        logged = client.create_run(
            experiment_id,
            start_time=points[0].timestamp,
            tags={RUN_ID: run_id, KIND: RECORD},
            run_name=run.directory.name,
        )
        state = "new"
    else:
        state = "unchanged"
    mlflow_id = logged.info.run_id
    lacking = _lacking(client, mlflow_id, points, logged.data.metrics)
    if lacking and state == "unchanged":
        state = "updated"
    params = []
    for setting, value in flatten(run.config).items():
        name = _as_name(setting)
        text = str(value)[:_PARAM_LENGTH]
        if name not in logged.data.params:
            params.append(Param(name, text))
        elif logged.data.params[name] != text:  # a param of MLflow never changes
            set_tag(client, mlflow_id, f"alma.now.{name}", text)
    for first in range(0, len(params), _PARAMS):
        client.log_batch(mlflow_id, params=params[first : first + _PARAMS])
    for first in range(0, len(lacking), _BATCH):
        batch = [Metric(*point) for point in lacking[first : first + _BATCH]]
        client.log_batch(mlflow_id, metrics=batch)
    for name in ("commit", "command"):
        if run.info.get(name):
            set_tag(client, mlflow_id, f"alma.{name}", str(run.info[name]))
    set_tag(client, mlflow_id, "alma.directory", str(run.directory))
    client.set_terminated(mlflow_id, end_time=points[-1].timestamp)
    return state


def _lacking(
    client: Any, mlflow_id: str, points: Sequence[TrackedPoint], logged: dict[str, float]
) -> list[TrackedPoint]:
    """The points that a run of MLflow has not."""
    present = set()
    for key in logged:
        for point in client.get_metric_history(mlflow_id, key):
            present.add((point.key, point.step, point.value))
    return [point for point in points if (point.key, point.step, point.value) not in present]


def points_of(run: Run) -> list[TrackedPoint]:
    """The metrics of a record by t: the loss, CER, FLOPs, Comp, Mem, and losses by period.

    The time of a point is that of the record's start, and the seconds of the rows since.
    """
    rows = {row["t"]: row for row in run.rows}
    milliseconds = _created(run)
    points = []
    for t, row in rows.items():
        milliseconds += round(1000 * row["seconds"])
        until = {i: earlier for i, earlier in rows.items() if i <= t}
        values = {row["metric"]: row["value"]}
        values["CER"] = metrics.cumulative_error_rate(_field(until, "value"))
        values["train_flops"] = row["train_flops"]
        values["Comp_TFLOPs"] = metrics.cumulative_compute(_field(until, "train_flops")) / 1e12
        values["parameters"] = row["parameters"]
        values["Mem"] = metrics.cumulative_memory(_field(until, "parameters"))
        values |= _by_period(row)
        for key, value in values.items():
            if not math.isnan(value):
                points.append(TrackedPoint(key, float(value), milliseconds, t))
    return points


def _field(rows: dict[int, dict[str, Any]], name: str) -> dict[int, Any]:
    return {t: row[name] for t, row in rows.items()}


def _by_period(row: dict[str, Any]) -> dict[str, float]:
    """The metric on the held-out part of each mega-batch, by a name such as error_on/2024-03.

    Not error/2024-03: in a folder of MLflow, `error` is a file already.
    """
    extra = row["extra"]
    periods = extra.get("matrix_periods", [])
    values = {}
    for i, value in enumerate(extra.get("matrix", [])):
        period = periods[i] if i < len(periods) and periods[i] else f"megabatch-{i + 1}"
        values[f"{row['metric']}_on/{_as_name(period)}"] = value
    return values


def _created(run: Run) -> int:
    """When a record was begun, in milliseconds since 1970; now, if it does not say."""
    try:
        created = datetime.fromisoformat(str(run.info.get("created")))
    except ValueError:
        created = datetime.fromtimestamp(run.results.stat().st_mtime, UTC)
    return round(1000 * created.timestamp())


def _send_report(
    client: Any, experiment_id: str, runs: Sequence[Run], remarks: Sequence[str]
) -> list[str]:
    """Log the page and the advice into the run "alma report"; returns lines about them."""
    mlflow_id = run_with(client, experiment_id, {KIND: REPORT}, "alma report")
    with TemporaryDirectory() as name:
        write_page(runs, Path(name) / "report.html", remarks)
        client.log_artifacts(mlflow_id, name)
    try:
        report = advise(one_section(runs))
    except UserError as error:
        set_tag(client, mlflow_id, "alma.decision", f"none: {error}")
        client.set_terminated(mlflow_id)
        return [f"no advice: {error}"]
    for name, text in _tags_of_advice(report).items():
        set_tag(client, mlflow_id, f"alma.{name}", text)
    log_files(client, mlflow_id, report)
    client.set_terminated(mlflow_id)
    return [f"alma.decision: {report.summary}"]


def _tags_of_advice(report: Advice) -> dict[str, str]:
    """The choice, the answer to each question, and how often to retrain."""
    tags = {"decision": report.summary, "choice": report.choice.label if report.choice else "none"}
    for comparison in report.comparisons:
        question = comparison.question.removesuffix("?").replace(" ", "_")
        tags[f"decision.{question}"] = comparison.advice
    if report.retraining:
        of_retraining = tags_of(report.retraining, has_dates=False)
        tags["retraining"] = of_retraining["answer"]
        tags["next_training"] = of_retraining["next_training"]
    return tags


def _as_name(text: str) -> str:
    """A text as a name in MLflow: letters, digits, and these marks."""
    return "".join(letter if letter.isalnum() or letter in "_-. /" else "_" for letter in text)
