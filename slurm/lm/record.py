"""The run directory of a plan: its config, its rows from what each stage measured, and their table."""

import contextlib
import hashlib
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from alma.dates import begins
from alma.environment import Measured, append_rows
from alma.errors import UserError
from alma.markers import read_marker, read_record
from alma.records import MACHINE_FIELDS, Run
from alma.schema import AMOUNT, NATURAL, NUMBER, parse_json, require
from alma.stages import Stage, check_growth
from alma.stream import FileInfo, Stream, is_stream
from alma.tables import as_text
from slurm.lm.plan import Plan, StageSpec

UNTRAINED, RESULT = "untrained.json", "result.json"
"""Measurements of the untrained model, in the run's directory, and of a stage, in the stage's."""
SCORES = "scores.json"  # what --evaluate printed, in the stage's directory
TRAINED = "trained.json"  # marker in the directory of a training


class _Costs(TypedDict):  # of a training
    flops: AMOUNT
    growth_flops: AMOUNT
    seconds: AMOUNT
    peak_memory_bytes: AMOUNT
    validation_flops: AMOUNT


_KINDS: dict[str, Any] = {"perplexity": AMOUNT, "parameters": NATURAL, "eval_flops_per_example": AMOUNT}
_KINDS |= {"expert_count": NATURAL | None, "training": list[_Costs]}


def identity(stream: str) -> dict[str, Any]:
    """Identity of the data for run.json; a moved stream stays the same, by its checksums."""
    if not is_stream(stream):
        return {"data": ":".join(str(Path(shard).resolve()) for shard in stream.split(":"))}
    made = Stream.load(stream)
    shared = made.files | made.valid.files | made.test.files
    name, parts = Path(stream).resolve().name, [_digest(part.files) for part in made.megabatches]
    return {"stream": name, "stream_sha256": _digest(shared), "megabatch_sha256": parts}


def _digest(files: Mapping[str, FileInfo]) -> str:
    return hashlib.sha256("".join(files[name].sha256 for name in sorted(files)).encode()).hexdigest()


def run_config(plan: Plan) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The run's config, and those of its keys that may grow with the stream.

    Raises UserError if the last stage of the existing run was cut short by the end of a shorter stream.
    """
    waiting_time = plan.config["waiting_time"]
    config = plan.config | identity(plan.request.stream)
    if (plan.out / "run.json").exists():
        before = Run.read(plan.out).config["megabatches"]
        trained = (plan.out / f"stage_{(before - 1) // waiting_time:02d}").exists()
        if before < plan.config["megabatches"] and waiting_time <= before and trained:
            check_growth(plan.out, before, plan.config["megabatches"], waiting_time)
    growing = ("megabatches", "megabatch_sha256", "grow_experts") if is_stream(plan.request.stream) else ()
    return config, growing


def open_run(plan: Plan) -> Run:
    """Create or resume the run directory. Raises UserError if it was trained with other settings."""
    config, growing = run_config(plan)
    run = Run.open(plan.out, config, plan.seeds, growing, untrained=[UNTRAINED])
    # Stages as requested, which may be fewer than the stream has.
    run.note(stages=len(plan.stages), command=plan.request.command)
    if place := plan.request.placement:
        run.note(processes=place.processes, gpus=place.gpus, tokens_per_update=place.tokens)
    return run


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
        return measured_fields(read_measured(plan.out / UNTRAINED, 0), [], plan.request.cutoff)
    trained = [training.directory for training in spec.trainings]
    new = [directory in trained for directory in spec.models]
    fields = measured_fields(read_measured(spec.directory / RESULT, len(new)), new, plan.request.cutoff)
    markers = [read_marker(directory / TRAINED) for directory in trained if (directory / TRAINED).exists()]
    if sources := [marker["shared_with"] for marker in markers if "shared_with" in marker]:
        fields["extra"]["shared_with"] = sources
    if (scores := spec.directory / SCORES).exists():
        fields["extra"]["scores"] = read_scores(scores.read_bytes(), scores)
    return fields


def waiting_fields(row: Mapping[str, Any]) -> Measured:
    """The fields of a row while the learner waits, after the row before it."""
    of_training = ("training", "validation", "shared_with")
    extra = {key: value for key, value in row["extra"].items() if key not in of_training}
    return {**row, **dict.fromkeys(("train_flops", *MACHINE_FIELDS), 0), "extra": extra}


def read_measured(path: Path, trainings: int | None = None) -> dict[str, Any]:
    """Read untrained.json or result.json. UserError: damaged, or not of as many `trainings`, if given."""
    record = read_record(path, _KINDS, _KINDS)
    count = len(record["training"])
    if trainings is not None and count != trainings:
        what = f"of {count} trainings, not {trainings}"
        raise UserError(f"{path}: damaged ({what}): delete it and rerun the command")
    return record


def read_scores(text: bytes, where: Path) -> dict[str, float]:
    """The numbers that --evaluate printed in a line, or that `where` has. UserError: they are none."""
    with contextlib.suppress(ValueError):
        scores = parse_json(text)
        if isinstance(scores, dict) and scores:
            require(scores, dict.fromkeys(scores, NUMBER))
            return scores
    what = 'its last line is no JSON object of numbers such as {"cloze_error": 0.25}'
    raise UserError(f"{where}: {what}: repair the program of --evaluate, and rerun the command")


def measured_fields(measured: Mapping[str, Any], new: Sequence[bool], cutoff: str | None = None) -> Measured:
    """The fields of a row; `new`: for each deployed model, whether this stage trained it."""
    trainings = [each for each, counts in zip(measured["training"], new, strict=True) if counts]
    extra = {key: value for key, value in measured.items() if key not in (*_KINDS, "experts")}
    if cutoff:
        extra["matrix_seen"] = sum(begins(each)[: len(cutoff)] <= cutoff for each in extra["matrix_periods"])
    if measured["expert_count"]:
        extra |= {"experts": measured["expert_count"], "expert_layers": measured["experts"]}
    if trainings:
        extra["validation"] = sum(each["validation_flops"] for each in trainings)
        extra["training"] = [
            {key: each[key] for key in each if key not in MACHINE_FIELDS} for each in trainings
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


def summary(run: Run) -> str:
    """The rows as a table."""
    lines = [["t", "stage", "experts", "parameters", "perplexity", "TFLOPs", "seconds"]]
    for row in run.rows:
        extra, members = row["extra"], row["extra"].get("members", 1)
        experts = str(extra.get("experts", "-")) + (f"@{members}" if members > 1 else "")
        cells = [row["t"], "-" if row["stage"] is None else row["stage"], experts, f"{row['parameters']:,}"]
        cells += [f"{row['value']:,.2f}", f"{row['train_flops'] / 1e12:,.2f}", f"{row['seconds']:,.0f}"]
        lines.append(list(map(str, cells)))
    return as_text(lines)
