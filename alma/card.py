"""The card of an exported language model, README.md: its data, its cost, its losses by period."""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from alma.errors import UserError
from alma.markers import deployed_by
from alma.records import Run
from alma.tables import number

CARD = "README.md"
_SEEN_BEFORE = "newest text that this model had seen before"
_SPAN = re.compile(r"^\| data \| mega-batches \d+ to \d+ of \d+, \S+ to (\S+), of ", re.MULTILINE)
_CUTOFF = re.compile(rf"^\| {_SEEN_BEFORE} \| (\S+) \|$", re.MULTILINE)
_FRONT = """\
---
library_name: transformers
pipeline_tag: text-generation
tags: [alma, continual-pretraining]
---
"""


def card_of(place: Path, t: int | None = None) -> str:
    """The card of the model that a run deploys, by default its newest one, else that of `t`.

    UserError: no stage has finished then, or a file of the run is damaged.
    """
    run = Run.read(place)
    stage = deployed_by(place, t).stage
    rows = []
    for row in run.rows:
        if row["extra"].get("training") and row["stage"] <= stage:  # else it waits
            rows.append(row)
    if not rows or rows[-1]["stage"] != stage:
        raise UserError(f"{place}: no row of stage {stage} yet: rerun its launch command")
    if run.config.get("from_scratch"):
        rows = rows[-1:]
    row = rows[-1]
    facts = [*_of_data(run, rows), *_of_training(run, rows), *_of_test(row)]
    lines = [f"# {run.config.get('name') or place.resolve().name}", ""]
    lines += ["A language model of a run of ALMA, trained on a stream of mega-batches.", ""]
    lines += ["| | |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in facts]
    by_period = _by_period(run, row)
    if by_period:
        lines += ["", "Perplexity on the held-out text of each period:", ""]
        lines += ["| period | perplexity | for the model |", "|---|---|---|", *by_period]
    lines += ["", "Trained by:", "", "```bash", run.info.get("command", ""), "```", ""]
    return _FRONT + "\n".join(lines)


def trained_until(card: str) -> list[str]:
    """The dates in the text of a card until which its model has seen data; none: no such card.

    They are the last period of its training, and the cutoff of the model from which it started.
    """
    dates = [*_SPAN.findall(card), *_CUTOFF.findall(card)]
    return [date.rpartition("..")[2] for date in dates]


def _of_data(run: Run, rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Facts on the data of all trainings up to the model."""
    config = run.config
    trained_on = sorted({t for row in rows for t in row["trained_on"]})
    periods = rows[-1]["extra"].get("matrix_periods", ())
    span = f"mega-batches {trained_on[0]} to {trained_on[-1]} of {config['megabatches']}"
    if periods:
        span += f", {periods[trained_on[0] - 1]} to {periods[trained_on[-1] - 1]}"
    facts = [("data", f"{span}, of the stream `{config.get('stream', config.get('data'))}`")]
    if config.get("init"):
        facts.insert(0, ("trained from", f"`{config['init']}`, SHA-256 {config['init_sha256']}"))
    if config.get("cutoff"):
        facts.append((_SEEN_BEFORE, config["cutoff"]))
    return facts


def _of_training(run: Run, rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Facts on the cost of all trainings up to the model."""
    trainings = [training for row in rows for training in row["extra"].get("training", ())]
    tokens = sum(training.get("tokens", 0) for training in trainings)
    learner = run.config["learner"]
    if run.config.get("replay_share"):
        learner += f", {run.config['replay_share']:.0%} replay"
    facts = [("learner", learner), ("parameters", f"{rows[-1]['parameters']:,}")]
    if tokens:
        facts.append(("tokens of training", f"{tokens:,}"))
    facts.append(("FLOPs of training", f"{sum(row['train_flops'] for row in rows):.3g}"))
    facts.append(("trained by", f"ALMA, commit {run.info.get('commit')}"))
    return facts


def _of_test(row: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Facts on the test set."""
    facts = [("perplexity a token on `test`", number(row["value"]))]
    if row["extra"].get("bits_per_byte"):
        facts.append(("bits a byte on `test`", f"{row['extra']['bits_per_byte']:.4f}"))
    return facts


def _by_period(run: Run, row: Mapping[str, Any]) -> list[str]:
    """A line of the table for each held-out part on which the model was tested."""
    names = row["extra"].get("matrix_periods", ())
    last = max(row["trained_on"])
    lines = []
    for megabatch, value in enumerate(row["extra"].get("matrix", ()), start=1):
        name = f"mega-batch {megabatch}"
        if names:
            name = names[megabatch - 1]
        when = "past"
        if megabatch > last:
            when = "future"
        if not math.isnan(value):
            lines.append(f"| {name} | {number(value)} | {when} |")
    return lines
