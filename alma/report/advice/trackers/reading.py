"""`alma advise --mlflow`: the runs of an experiment as the matrix of `--matrix`."""

from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from alma.errors import UserError
from alma.report.advice.trackers.layouts import STEP, Reading, TrackedMatrix, TrackedRun, matrix_of
from alma.report.advice.trackers.store import (
    all_pages,
    connected,
    experiment_named,
    one_line_errors,
)

KIND = "alma.kind"
"""Tag of runs that ALMA has written, which hold no values of deployed models."""
_PARENT = "mlflow.parentRunId"


def read_matrix(uri: str, reading: Reading) -> TrackedMatrix:
    """The matrix of an experiment of the store at `uri`, and lines on what was left out.

    Nothing is written. UserError: the store does not answer, there is no such experiment, or its
    runs hold no such matrix.
    """
    client = connected(uri, "--mlflow")
    with one_line_errors(uri or "MLFLOW_TRACKING_URI"):
        experiment = experiment_named(client, reading.experiment)
        places = [experiment.experiment_id]
        active = all_pages(client.search_runs, places)
        deleted = all_pages(client.search_runs, places, run_view_type=_deleted())
        by_alma = [run for run in active if KIND in run.data.tags]
        finished = []
        for run in active:
            if run.info.status == "FINISHED" and run not in by_alma:
                finished.append(run)
        if not finished:
            raise UserError(f"{reading.experiment}: the experiment has no finished run to read")
        by_id = {run.info.run_id: run for run in active}
        runs = [_tracked(client, run, by_id, reading) for run in finished]
    matrix = matrix_of(runs, reading)
    unfinished = [run for run in active if run.info.status != "FINISHED" and run not in by_alma]
    counts = Counter(run.info.status.lower() for run in unfinished)
    counts["deleted"] = len(deleted)
    counts["written by ALMA"] = len(by_alma)
    for reason, number in counts.items():
        if number:
            matrix.remarks.append(f"left out: {_runs(number)} {reason}")
    nested = sum(_PARENT in run.data.tags for run in finished)
    if nested:
        matrix.remarks.append(
            f"{_runs(nested)} nested: what they lack is taken from the params and tags of the "
            "run above"
        )
    return matrix


def _runs(number: int) -> str:
    return "1 run" if number == 1 else f"{number} runs"


def _deleted() -> int:
    from mlflow.entities import ViewType

    return int(ViewType.DELETED_ONLY)


def _tracked(client: Any, run: Any, by_id: dict[str, Any], reading: Reading) -> TrackedRun:
    """A run of MLflow, with params and tags of the runs above it."""
    facts: dict[str, str] = {}
    for above in reversed(_line_of(run, by_id)):
        facts |= above.data.params | above.data.tags
    steps: dict[int, float] = {}
    if reading.period == STEP and reading.metric in run.data.metrics:
        history = client.get_metric_history(run.info.run_id, reading.metric)
        for point in sorted(history, key=lambda point: point.timestamp):
            steps[point.step] = point.value
    started = datetime.fromtimestamp(run.info.start_time / 1000, UTC)
    return TrackedRun(
        run_id=run.info.run_id,
        name=run.info.run_name or "",
        started=started.date().isoformat(),
        facts=facts,
        metrics=run.data.metrics,
        steps=steps,
    )


def _line_of(run: Any, by_id: dict[str, Any]) -> Sequence[Any]:
    """A run, the run above it, and so on."""
    line = [run]
    while True:
        above = by_id.get(line[-1].data.tags.get(_PARENT, ""))
        if above is None or above in line:
            return line
        line.append(above)
