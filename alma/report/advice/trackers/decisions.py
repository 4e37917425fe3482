"""What an answer of `alma advise` leaves in MLflow: tags of a run "alma advice", and files."""

import math
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from alma.dates import label
from alma.files import atomic_write, write_json_atomic
from alma.report.advice.advice import Advice
from alma.report.advice.brief import write_brief
from alma.report.advice.questions import NO_EVIDENCE
from alma.report.advice.retraining import Retraining
from alma.report.advice.retraining_table import MatrixReport
from alma.report.advice.retraining_words import advice_of, answer
from alma.report.advice.trackers.layouts import Reading
from alma.report.advice.trackers.reading import KIND
from alma.report.advice.trackers.store import (
    all_pages,
    connected,
    experiment_named,
    one_line_errors,
)

_LONGEST = 5000  # characters of a tag in MLflow
ADVICE = "advice"


def log_decision(client: Any, experiment_id: str, metric: str, report: MatrixReport) -> str:
    """Write the answer into the run "alma advice" of an experiment; returns the id of the run.

    A run for each metric, which the next answer updates.
    """
    tags = {KIND: ADVICE, "alma.metric": metric}
    run_id = run_with(client, experiment_id, tags, "alma advice")
    for retraining in report.groups:
        prefix = f"{_as_key(retraining.losses.label)}." if len(report.groups) > 1 else ""
        for name, text in tags_of(retraining, has_dates=True).items():
            set_tag(client, run_id, f"alma.{prefix}{name}", text)
    log_files(client, run_id, report)
    client.set_terminated(run_id)
    return run_id


def log_advice(uri: str, reading: Reading, report: MatrixReport) -> str:
    """Call `log_decision` for the experiment of a reading; returns a line about it.

    UserError: the store does not answer, or refuses.
    """
    client = connected(uri, "--log-decision")
    with one_line_errors(uri or "MLFLOW_TRACKING_URI"):
        experiment = experiment_named(client, reading.experiment)
        run_id = log_decision(client, experiment.experiment_id, reading.metric, report)
    return f"MLflow, experiment {reading.experiment}: alma.decision in the run {run_id}"


def run_with(client: Any, experiment_id: str, tags: dict[str, str], name: str) -> str:
    """The id of the run with these tags, which is made if there is none."""
    for run in all_pages(client.search_runs, [experiment_id]):
        if tags.items() <= run.data.tags.items():
            return str(run.info.run_id)
    return str(client.create_run(experiment_id, tags=tags, run_name=name).info.run_id)


def tags_of(retraining: Retraining, has_dates: bool) -> dict[str, str]:
    """How often to retrain: the advice, its sentence, and the next training.

    has_dates   whether the axis of the losses has dates, as that of a matrix, or mega-batches
    """
    return {
        "decision": advice_of(retraining),
        "answer": answer(retraining),
        "next_training": _next_training(retraining, has_dates),
    }


def _next_training(retraining: Retraining, has_dates: bool) -> str:
    """Such as "2024-07" or, without dates, "in 2 months"; "none" if none is planned or advised."""
    if advice_of(retraining) == NO_EVIDENCE:
        return "none"
    period = retraining.period
    newest = retraining.losses.periods[-1]
    if math.isnan(retraining.price):
        every = retraining.choice.every * period.size
        ahead = max(0.0, retraining.losses.until[-1] + every - newest)
    elif retraining.plan.first is None:
        return "none"
    else:
        ahead = retraining.plan.first * period.size
    if not has_dates or not period.dated:
        return f"in {period.span(ahead / period.size)}" if ahead else "now"
    if period.noun == "year":
        return str(round(newest + ahead))
    if period.noun == "day" or period.size > 1:
        return date.fromordinal(round(newest + ahead) + 1).isoformat()
    return label(period.noun, round(newest + ahead))


def log_files(client: Any, run_id: str, report: Advice | MatrixReport) -> None:
    """Write advice.md, advice.json and the brief as artefacts, in place of earlier ones."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        with atomic_write(folder / "advice.md") as file:
            for part in report.parts:
                file.write("\n\n".join(part.as_markdown("##")) + "\n\n")
        write_json_atomic(folder / "advice.json", report.record())
        write_brief(report, folder / "brief.html")
        client.log_artifacts(run_id, name)


def set_tag(client: Any, run_id: str, name: str, text: str) -> None:
    """Set a tag, cut to the length that MLflow takes."""
    client.set_tag(run_id, name, text[:_LONGEST])


def _as_key(text: str) -> str:
    """A text as a part of the name of a tag."""
    return "".join(letter if letter.isalnum() or letter in "-_" else "_" for letter in text)
