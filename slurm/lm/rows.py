"""Rows of results.jsonl, from what `fairseq_alma.evaluate` measured after each stage."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from alma.errors import UserError
from alma.records import MACHINE_FIELDS, Row, Run
from alma.schema import AMOUNT, TEXT, Kind, optional, parse_json, require, whole
from alma.stages import Stage
from slurm.lm.plan import Plan

UNTRAINED, RESULT = "untrained.json", "result.json"
"""Measurements of the untrained model, in the run's directory, and of a stage, in the stage's."""
TRAINED = "trained.json"
"""Marker in the directory of a training."""
Measured = dict[str, Any]
"""Content of these files."""
_COSTS = ("flops", "growth_flops", "seconds", "peak_memory_bytes")
_KINDS = {"perplexity": AMOUNT, "parameters": whole(0), "eval_flops_per_example": AMOUNT}
_KINDS |= {"expert_count": optional(whole(0)), "training": Kind("a list of costs", lambda v: _are_costs(v))}
_OF_TRAINING = ("training", "validation", "shared_with")
"""Keys of `extra` about the training, which waiting rows do not repeat."""


def collect(plan: Plan, run: Run) -> None:
    """Append the missing rows, up to the first stage without result.json."""
    present = {row["t"] for row in run.rows}
    if not (plan.out / UNTRAINED).exists():
        return
    if 0 not in present:
        run.append(_row(0, None, read_measured(plan.out / UNTRAINED, 0), []))
    for spec in plan.stages:
        if not (spec.directory / RESULT).exists():
            return
        trained = [training.directory for training in spec.trainings]
        new = [directory in trained for directory in spec.models]
        previous = next(row for row in run.rows if row["t"] == spec.stage.first - 1)
        for row in rows(spec.stage, read_measured(spec.directory / RESULT, len(new)), previous, new):
            if sources := _sources(trained) if row["t"] == spec.stage.last else []:
                row["extra"]["shared_with"] = sources
            if row["t"] not in present:
                run.append(row)


def _sources(trained: Sequence[Path]) -> list[str]:
    """Where the trainings in these directories were taken over from."""
    markers = [read_marker(directory / TRAINED) for directory in trained if (directory / TRAINED).exists()]
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


def read_measured(path: Path, trainings: int | None = None) -> Measured:
    """Read untrained.json or result.json. UserError: damaged, or not of as many `trainings`, if given."""
    return _read(path, _KINDS, _KINDS, trainings)


def read_marker(path: Path) -> Measured:
    """Read trained.json. UserError: damaged."""
    return _read(path, {"checkpoint": TEXT, "shared_with": TEXT}, ())


def _read(
    path: Path, kinds: Mapping[str, Kind], needed: Collection[str], trainings: int | None = None
) -> Measured:
    try:
        record = parse_json(path.read_bytes())
        require(record, kinds, needed)
        if trainings is not None and len(record["training"]) != trainings:
            raise ValueError(f"of {len(record['training'])} trainings, not {trainings}")
    except ValueError as error:
        raise UserError(f"{path}: damaged ({error}): delete it and rerun the command") from None
    return record


def _are_costs(value: Any) -> bool:
    try:
        for each in value:
            require(each, dict.fromkeys(_COSTS, AMOUNT) | {"validation_flops": optional(AMOUNT)}, _COSTS)
    except (ValueError, TypeError):
        return False
    return isinstance(value, list)


def _row(t: int, stage: Stage | None, measured: Measured, new: Sequence[bool]) -> Row:
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
