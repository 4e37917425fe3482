"""The run directory of a plan: its config, and its rows and late evaluations, as measured."""

import contextlib
import hashlib
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NotRequired, TypedDict, cast

from alma.dates import begins
from alma.environment import Measured, append_rows
from alma.errors import UserError
from alma.evaluations import LateEvaluation
from alma.markers import read_marker, read_record
from alma.records import MACHINE_FIELDS, Run
from alma.schema import AMOUNT, COUNT, NATURAL, NUMBER, TEXT, parse_json, require
from alma.stages import Stage, check_growth, stage_folder
from alma.stream import FileInfo, Stream, is_stream
from alma.tables import as_text
from slurm.lm.plan import Plan
from slurm.lm.planned import StageSpec

UNTRAINED = "untrained.json"  # measurements of the untrained model, in the run's directory
RESULT = "result.json"  # measurements after a stage, in the stage's directory
SCORES = "scores.json"  # what --evaluate printed, in the stage's directory
LATE = "late"  # folder of late evaluations, beside the measurements of the same model
LATE_LOG = "late.log"
TRAINED = "trained.json"
"""Marker in the directory of a training, with the name of the chosen checkpoint (`alma.markers`).

Not to be confused with the trained.json of a user's own trainer (`alma.trainer`), which is in a
folder below.
"""


class _Costs(TypedDict):  # costs of a training
    flops: AMOUNT
    growth_flops: AMOUNT
    seconds: AMOUNT
    peak_memory_bytes: AMOUNT
    validation_flops: AMOUNT
    tf32: NotRequired[bool]


class _Cell(TypedDict):  # of a late evaluation
    megabatch: COUNT
    value: AMOUNT
    tokens: NotRequired[NATURAL]
    period: NotRequired[TEXT]
    raw: NotRequired[AMOUNT]
    experts: NotRequired[dict[str, list[NUMBER]]]


_LATE_KINDS: dict[str, Any] = {"held_out": list[_Cell], "seconds": AMOUNT}
_KINDS: dict[str, Any] = {
    "perplexity": AMOUNT,
    "parameters": NATURAL,
    "eval_flops_per_example": AMOUNT,
}
_KINDS |= {"expert_count": NATURAL | None, "training": list[_Costs]}


def identity(stream: str) -> dict[str, Any]:
    """Settings that identify the data in run.json.

    A stream is identified by its checksums, so that it may be moved.
    """
    if not is_stream(stream):
        return {"data": ":".join(str(Path(shard).resolve()) for shard in stream.split(":"))}
    loaded = Stream.load(stream)
    shared = loaded.files | loaded.valid.files | loaded.test.files
    return {
        "stream": Path(stream).resolve().name,
        "stream_sha256": _digest(shared),
        "megabatch_sha256": [_digest(part.files) for part in loaded.megabatches],
    }


def _digest(files: Mapping[str, FileInfo]) -> str:
    return hashlib.sha256(
        "".join(files[name].sha256 for name in sorted(files)).encode()
    ).hexdigest()


def run_config(plan: Plan) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The run's config, and the names of its settings that may grow with the stream.

    A plan that only tests what is trained keeps the settings of the run. Raises UserError if the
    stream has grown but the last stage of the existing run was cut short by the stream's former
    end.
    """
    waiting_time = plan.config["waiting_time"]
    config = plan.config | identity(plan.request.stream)
    if plan.tests_only:
        recorded = Run.read(plan.out).config
        name = recorded.get("stream")  # the folder may have another name now
        config = recorded | identity(plan.request.stream) | {"stream": name}
        config["megabatches"] = plan.config["megabatches"]
    if (plan.out / "run.json").exists():
        before = Run.read(plan.out).config["megabatches"]
        trained = stage_folder(plan.out, (before - 1) // waiting_time).exists()
        if before < plan.config["megabatches"] and waiting_time <= before and trained:
            check_growth(plan.out, before, plan.config["megabatches"], waiting_time)
    growing = (
        ("megabatches", "megabatch_sha256", "grow_experts")
        if is_stream(plan.request.stream)
        else ()
    )
    return config, growing


def open_run(plan: Plan) -> Run:
    """Create or resume the run directory. Raises UserError if it was trained with other
    settings."""
    config, growing = run_config(plan)
    run = Run.open(plan.out, config, plan.seeds, growing, untrained=[UNTRAINED])
    if plan.tests_only:
        return run
    # Record the number of requested stages, which may be fewer than the stream has.
    run.note(stages=len(plan.stages), command=plan.request.command)
    stream = plan.request.stream
    if is_stream(stream) and Stream.load(stream).ordered:
        run.note(test_periods=Stream.load(stream).test_megabatches)
    placement = plan.request.placement
    if placement:
        run.note(
            processes=placement.processes,
            gpus=placement.gpus,
            tokens_per_update=placement.tokens,
        )
    return run


def collect(plan: Plan, run: Run) -> None:
    """Append the missing rows, up to the first stage without result.json, and late evaluations.

    The evaluation matrix of a row ends with the newest mega-batch that the run's config has when
    the row is written. Later parts, of result.json or of late evaluations, follow as such.
    """
    if not (plan.out / UNTRAINED).exists():
        return
    complete = itertools.takewhile(lambda spec: (spec.directory / RESULT).exists(), plan.stages)
    specs: dict[Stage | None, StageSpec] = {spec.stage: spec for spec in complete}
    megabatches = run.config["megabatches"]
    lengths: dict[int | None, int] = {}  # of the matrix, by stage of the first row that has it
    for row in run.rows_as_written:
        lengths.setdefault(row["stage"], len(row["extra"].get("matrix", ())))

    def measure(stage: Stage | None) -> Measured:
        index = stage.index if stage else None
        return _measured(plan, specs.get(stage), lengths.get(index, megabatches))

    append_rows(run, [spec.stage for spec in specs.values()], measure, waiting_fields)
    if _used_tf32(run):
        run.note(tf32=True)
    evaluations = []
    for index in [None, *(spec.stage.index for spec in specs.values())]:
        for cell in measured_cells(plan, index):
            if cell["megabatch"] <= megabatches:
                evaluations.append(cell)
    run.append_evaluations(evaluations)


def _used_tf32(run: Run) -> bool:
    """Whether a training of the run had TF32 products; records of earlier versions do not say."""
    for row in run.rows_as_written:
        for training in row["extra"].get("training", ()):
            if training.get("tf32"):
                return True
    return False


def _measured(plan: Plan, spec: StageSpec | None, cells: int) -> Measured:
    """The fields of a row after a stage, or of the untrained model, with the first `cells` of the
    evaluation matrix."""
    if spec is None:
        untrained = _shortened(read_measured(plan.out / UNTRAINED, 0), cells)
        return measured_fields(untrained, [], plan.request.cutoff)
    directories = [training.directory for training in spec.trainings]
    is_new = [directory in directories for directory in spec.models]
    measured = _shortened(read_measured(spec.directory / RESULT, len(is_new)), cells)
    fields = measured_fields(measured, is_new, plan.request.cutoff)
    sources = []
    for directory in directories:
        if (directory / TRAINED).exists():
            marker = read_marker(directory / TRAINED)
            if "shared_with" in marker:
                sources.append(marker["shared_with"])
    if sources:
        fields["extra"]["shared_with"] = sources
    scores = spec.directory / SCORES
    if scores.exists():
        fields["extra"]["scores"] = read_scores(scores.read_bytes(), scores)
    return fields


def _shortened(measured: Mapping[str, Any], cells: int) -> dict[str, Any]:
    """What was measured, with the first `cells` of the evaluation matrix."""
    shortened = dict(measured)
    for name in ("matrix", "matrix_experts", "matrix_periods"):
        if name in measured:
            shortened[name] = measured[name][:cells]
    raw = measured.get("raw") or {}
    if "matrix" in raw:
        shortened["raw"] = raw | {"matrix": raw["matrix"][:cells]}
    return shortened


def result_of(plan: Plan, stage: int | None) -> Path:
    """The file with the measurements of a stage, or of the untrained model."""
    if stage is None:
        return plan.out / UNTRAINED
    return plan.stages[stage].directory / RESULT


def late_folder(plan: Plan, stage: int | None) -> Path:
    """The folder of the late evaluations of a model, a file each."""
    return result_of(plan, stage).parent / LATE


def measured_cells(plan: Plan, stage: int | None) -> list[LateEvaluation]:
    """The evaluation matrix of a model as far as its files have it: its own and the late ones.

    UserError: a file is damaged.
    """
    cells: list[dict[str, Any]] = []
    result = result_of(plan, stage)
    if result.exists():
        cells += _cells_of_result(read_measured(result))
    for file in sorted(late_folder(plan, stage).glob("*.json")):
        cells += read_late(file)
    evaluations = []
    for cell in cells:
        late: dict[str, Any] = {"stage": stage}
        for name in ("megabatch", "period", "value", "raw", "experts"):
            if name in cell:
                late[name] = cell[name]
        if plan.request.cutoff:
            late["seen"] = _is_seen(late["period"], plan.request.cutoff)
        evaluations.append(cast(LateEvaluation, late))
    return evaluations


def read_late(path: Path) -> list[dict[str, Any]]:
    """The cells in the file of a late evaluation. UserError: damaged."""
    return read_late_record(path)["held_out"]


def read_late_record(path: Path) -> dict[str, Any]:
    """The file of a late evaluation: its cells in `held_out`, and `seconds`. UserError: damaged."""
    return read_record(path, _LATE_KINDS, ["held_out"])


def _cells_of_result(measured: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The evaluation matrix of untrained.json or result.json, cell by cell."""
    cells = []
    raw = measured.get("raw") or {}
    columns = {
        "period": measured.get("matrix_periods"),
        "raw": raw.get("matrix"),
        "experts": measured.get("matrix_experts"),
    }
    for index, value in enumerate(measured.get("matrix", ())):
        cell = {"megabatch": index + 1, "value": value}
        for name, column in columns.items():
            if column:
                cell[name] = column[index]
        cells.append(cell)
    return cells


def _is_seen(period: str, cutoff: str) -> bool:
    """Whether a period does not begin after the date of --cutoff."""
    return begins(period)[: len(cutoff)] <= cutoff


def waiting_fields(row: Mapping[str, Any]) -> Measured:
    """The fields of a row while the learner waits, derived from the previous row."""
    of_training = ("training", "validation", "shared_with")
    extra = {key: value for key, value in row["extra"].items() if key not in of_training}
    return {**row, **dict.fromkeys(("train_flops", *MACHINE_FIELDS), 0), "extra": extra}


def read_measured(path: Path, trainings: int | None = None) -> dict[str, Any]:
    """Read untrained.json or result.json.

    `trainings` is the number of trainings whose costs it must have (None: any). Raises UserError if
    it is damaged or has another number.
    """
    record = read_record(path, _KINDS, _KINDS)
    count = len(record["training"])
    if trainings is not None and count != trainings:
        problem = f"of {count} trainings, not {trainings}"
        raise UserError(f"{path}: damaged ({problem}): delete it and rerun the command")
    return record


def read_scores(text: bytes, where: Path) -> dict[str, float]:
    """Parse the scores of --evaluate, a JSON object of numbers on the last line of `text`.

    where: the log or file of the text, which the UserError names if there is no such object.
    """
    with contextlib.suppress(ValueError):
        scores = parse_json(text)
        if isinstance(scores, dict) and scores:
            require(scores, dict.fromkeys(scores, NUMBER))
            return scores
    problem = 'its last line is no JSON object of numbers such as {"cloze_error": 0.25}'
    raise UserError(f"{where}: {problem}: repair the program of --evaluate, and rerun the command")


def measured_fields(
    measured: Mapping[str, Any], is_new: Sequence[bool], cutoff: str | None = None
) -> Measured:
    """The fields of a row, from the measurements of a stage.

    measured: content of untrained.json or result.json. is_new: for each deployed model, whether
    this stage trained it; only the costs of these trainings count for the row. cutoff: date of
    --cutoff; `matrix_seen` counts the held-out periods up to it.
    """
    costs = [cost for cost, counts in zip(measured["training"], is_new, strict=True) if counts]
    extra = {key: value for key, value in measured.items() if key not in (*_KINDS, "experts")}
    if cutoff:
        extra["matrix_seen"] = sum(_is_seen(period, cutoff) for period in extra["matrix_periods"])
    if measured["expert_count"]:
        extra |= {"experts": measured["expert_count"], "expert_layers": measured["experts"]}
    if costs:
        extra["validation"] = sum(cost["validation_flops"] for cost in costs)
        extra["training"] = list(map(_without_machine_fields, costs))
    return {
        "metric": "perplexity",
        "value": measured["perplexity"],
        "parameters": measured["parameters"],
        "train_flops": sum(cost["flops"] + cost["growth_flops"] for cost in costs),
        "eval_flops_per_example": measured["eval_flops_per_example"],
        "seconds": sum(cost["seconds"] for cost in costs),
        "peak_memory_bytes": max((cost["peak_memory_bytes"] for cost in costs), default=0),
        "extra": extra,
    }


def _without_machine_fields(cost: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in cost.items() if key not in MACHINE_FIELDS}


def summary(run: Run) -> str:
    """The rows as a table; on a stream with periods, with the newest held-out part."""
    rows = run.rows
    lines = [["t", "stage", "experts", "parameters", "perplexity", "TFLOPs", "seconds"]]
    periods: list[str] = []
    for row in rows:
        periods = max(periods, row["extra"].get("matrix_periods", []), key=len)
    if periods:
        lines[0].insert(lines[0].index("TFLOPs"), f"on {periods[-1]}")
    for row in rows:
        experts = str(row["extra"].get("experts", "-"))
        members = row["extra"].get("members", 1)
        if members > 1:
            experts += f"@{members}"
        cells = [
            str(row["t"]),
            "-" if row["stage"] is None else str(row["stage"]),
            experts,
            f"{row['parameters']:,}",
            f"{row['value']:,.2f}",
            f"{row['train_flops'] / 1e12:,.2f}",
            f"{row['seconds']:,.0f}",
        ]
        if periods:
            matrix = row["extra"].get("matrix", [])
            is_tested = len(matrix) == len(periods) and math.isfinite(matrix[-1])
            cells.insert(lines[0].index("TFLOPs") - 1, f"{matrix[-1]:,.2f}" if is_tested else "")
        lines.append(cells)
    return as_text(lines)
