"""Rows of results.jsonl, from what `fairseq_alma.evaluate` measured after each stage."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from alma.records import MACHINE_FIELDS, Row, Run
from alma.stages import Stage
from slurm.lm.plan import Plan

UNTRAINED, RESULT = "untrained.json", "result.json"
"""Measurements of the untrained model, in the run's directory, and of a stage, in the stage's."""
TRAINED = "trained.json"
"""Marker in the directory of a training."""
Measured = dict[str, Any]
"""Content of these files."""
_OF_TRAINING = ("training", "validation", "shared_with")
"""Keys of `extra` about the training, which waiting rows do not repeat."""


def collect(plan: Plan, run: Run) -> None:
    """Append the missing rows, up to the first stage without result.json."""
    present = {row["t"] for row in run.rows}
    if not (plan.out / UNTRAINED).exists():
        return
    if 0 not in present:
        run.append(_row(0, None, read_measured(plan.out / UNTRAINED), []))
    for spec in plan.stages:
        if not (spec.directory / RESULT).exists():
            return
        trained = [training.directory for training in spec.trainings]
        new = [directory in trained for directory in spec.models]
        previous = run.rows[spec.stage.first - 1]
        for row in rows(spec.stage, read_measured(spec.directory / RESULT), previous, new):
            if sources := _sources(trained) if row["t"] == spec.stage.last else []:
                row["extra"]["shared_with"] = sources
            if row["t"] not in present:
                run.append(row)


def _sources(trained: Sequence[Path]) -> list[str]:
    """Where the trainings in these directories were taken over from."""
    markers = [read_measured(directory / TRAINED) for directory in trained if (directory / TRAINED).exists()]
    return [marker["shared_with"] for marker in markers if "shared_with" in marker]


def rows(stage: Stage, measured: Measured, previous: Mapping[str, Any], new: Sequence[bool]) -> list[Row]:
    """A row for each mega-batch of a stage: that of the `previous` model while waiting, then the new one.

    new: for each deployed model, whether this stage trained it.
    """
    unchanged = dict.fromkeys(("train_flops", *MACHINE_FIELDS), 0)
    extra = {key: value for key, value in previous["extra"].items() if key not in _OF_TRAINING}
    waiting = [
        Row(**{**previous, **unchanged, "t": t, "extra": extra})  # type: ignore[typeddict-item]
        for t in range(stage.first, stage.last)
    ]
    return [*waiting, _row(stage.last, stage, measured, new)]


def read_measured(path: Path) -> Measured:
    """Read untrained.json or result.json."""
    return json.loads(path.read_bytes())


def _row(t: int, stage: Stage | None, measured: Measured, new: Sequence[bool]) -> Row:
    trainings = [each for each, counts in zip(measured["training"], new, strict=True) if counts]
    named = {"perplexity", "parameters", "eval_flops_per_example", "experts", "expert_count", "training"}
    extra = {key: value for key, value in measured.items() if key not in named}
    if measured["expert_count"]:
        extra |= {"experts": measured["expert_count"], "expert_layers": measured["experts"]}
    if trainings:
        extra["validation"] = sum(each.get("validation_flops", 0) for each in trainings)
        extra["training"] = [
            {key: value for key, value in each.items() if key not in MACHINE_FIELDS} for each in trainings
        ]
    return Row(
        t=t,
        stage=stage.index if stage else None,
        trained_on=list(stage.train_on) if stage else [],
        metric="perplexity",
        value=measured["perplexity"],
        parameters=measured["parameters"],
        train_flops=sum(each["flops"] + each["growth_flops"] for each in trainings),
        eval_flops_per_example=measured["eval_flops_per_example"],
        seconds=sum(each["seconds"] for each in trainings),
        peak_memory_bytes=max((each["peak_memory_bytes"] for each in trainings), default=0),
        extra=extra,
    )
