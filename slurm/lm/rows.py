"""Rows of results.jsonl, from what `fairseq_alma.evaluate` measured after each stage."""

import itertools
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from alma.environment import Measured, append_rows
from alma.errors import UserError
from alma.records import MACHINE_FIELDS, Run
from alma.schema import AMOUNT, NATURAL, TEXT, parse_json, require
from alma.stages import Stage
from slurm.lm.plan import Plan, StageSpec

UNTRAINED, RESULT = "untrained.json", "result.json"
"""Measurements of the untrained model, in the run's directory, and of a stage, in the stage's."""
TRAINED = "trained.json"
"""Marker in the directory of a training."""
_OF_TRAINING = ("training", "validation", "shared_with")
"""Keys of `extra` about the training, which waiting rows do not repeat."""


class _Costs(TypedDict):
    """Of a training."""

    flops: AMOUNT
    growth_flops: AMOUNT
    seconds: AMOUNT
    peak_memory_bytes: AMOUNT
    validation_flops: NotRequired[AMOUNT | None]


_KINDS: dict[str, Any] = {"perplexity": AMOUNT, "parameters": NATURAL, "eval_flops_per_example": AMOUNT}
_KINDS |= {"expert_count": NATURAL | None, "training": list[_Costs]}


def collect(plan: Plan, run: Run) -> None:
    """Append the missing rows, up to the first stage without result.json."""
    if (plan.out / UNTRAINED).exists():
        complete = itertools.takewhile(lambda spec: (spec.directory / RESULT).exists(), plan.stages)
        specs: dict[Stage | None, StageSpec] = {spec.stage: spec for spec in complete}
        schedule = [spec.stage for spec in specs.values()]
        append_rows(run, schedule, lambda stage: _measured(plan, specs.get(stage)), waiting_fields)


def _measured(plan: Plan, spec: StageSpec | None) -> Measured:
    """The fields of a row after a stage, or of the untrained model."""
    if spec is None:
        return measured_fields(read_measured(plan.out / UNTRAINED, 0), [])
    trained = [training.directory for training in spec.trainings]
    new = [directory in trained for directory in spec.models]
    fields = measured_fields(read_measured(spec.directory / RESULT, len(new)), new)
    markers = [read_marker(directory / TRAINED) for directory in trained if (directory / TRAINED).exists()]
    if sources := [marker["shared_with"] for marker in markers if "shared_with" in marker]:
        fields["extra"]["shared_with"] = sources
    return fields


def waiting_fields(row: Mapping[str, Any]) -> Measured:
    """The fields of a row while the learner waits, after the row before it."""
    extra = {key: value for key, value in row["extra"].items() if key not in _OF_TRAINING}
    return {**row, **dict.fromkeys(("train_flops", *MACHINE_FIELDS), 0), "extra": extra}


def read_measured(path: Path, trainings: int | None = None) -> dict[str, Any]:
    """Read untrained.json or result.json. UserError: damaged, or not of as many `trainings`, if given."""
    return _read(path, _KINDS, _KINDS, trainings)


def read_marker(path: Path) -> dict[str, Any]:
    """Read trained.json. UserError: damaged."""
    return _read(path, {"checkpoint": TEXT, "shared_with": TEXT}, ())


def _read(
    path: Path, kinds: Mapping[str, Any], needed: Collection[str], trainings: int | None = None
) -> dict[str, Any]:
    try:
        record = parse_json(path.read_bytes())
        require(record, kinds, needed)
        if trainings is not None and len(record["training"]) != trainings:
            raise ValueError(f"of {len(record['training'])} trainings, not {trainings}")
    except ValueError as error:
        raise UserError(f"{path}: damaged ({error}): delete it and rerun the command") from None
    return record


def measured_fields(measured: Mapping[str, Any], new: Sequence[bool]) -> Measured:
    """The fields of a row; `new`: for each deployed model, whether this stage trained it."""
    trainings = [each for each, counts in zip(measured["training"], new, strict=True) if counts]
    named = {"perplexity", "parameters", "eval_flops_per_example", "experts", "expert_count", "training"}
    extra = {key: value for key, value in measured.items() if key not in named}
    if measured["expert_count"]:
        extra |= {"experts": measured["expert_count"], "expert_layers": measured["experts"]}
    if trainings:
        extra["validation"] = sum(each.get("validation_flops") or 0 for each in trainings)
        extra["training"] = [
            {key: value for key, value in each.items() if key not in MACHINE_FIELDS} for each in trainings
        ]
    return {
        "metric": "perplexity",
        "value": measured["perplexity"],
        "parameters": measured["parameters"],
        "train_flops": sum(each["flops"] + each["growth_flops"] for each in trainings),
        "eval_flops_per_example": measured["eval_flops_per_example"],
        "seconds": sum(each["seconds"] for each in trainings),
        "peak_memory_bytes": max((each["peak_memory_bytes"] for each in trainings), default=0),
        "extra": extra,
    }
