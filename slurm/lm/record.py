"""The run directory of a plan: its config, whether it can be resumed, and its rows as a table."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from alma.errors import UserError
from alma.records import Run
from alma.stages import stages
from alma.stream import FileInfo, Stream, is_stream
from alma.tables import as_text
from slurm.lm.plan import Plan
from slurm.lm.rows import UNTRAINED


def identity(stream: str) -> dict[str, Any]:
    """Identity of the data for run.json; a moved stream stays the same, by its checksums."""
    if not is_stream(stream):
        return {"data": ":".join(str(Path(shard).resolve()) for shard in stream.split(":"))}
    made = Stream.load(stream)
    shared = made.files | made.valid.files | made.test.files
    return {
        "stream": Path(stream).resolve().name,
        "stream_sha256": _digest(shared),
        "megabatch_sha256": [_digest(part.files) for part in made.megabatches],
    }


def _digest(files: Mapping[str, FileInfo]) -> str:
    return hashlib.sha256("".join(files[name].sha256 for name in sorted(files)).encode()).hexdigest()


def run_config(plan: Plan) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The run's config, and those of its keys that may grow with the stream.

    Raises UserError if the last stage of the existing run was cut short by the end of a shorter stream.
    """
    waiting_time, replay = plan.config["waiting_time"], plan.config["replay"]
    config = plan.config | identity(plan.stream)
    if (plan.out / "run.json").exists():
        before = Run.read(plan.out).config["megabatches"]
        if before < plan.config["megabatches"] and waiting_time <= before:
            last = stages(before, waiting_time, replay)[-1]
            now = stages(plan.config["megabatches"], waiting_time, replay)[last.index]
            if last != now and (plan.out / f"stage_{last.index:02d}").exists():
                raise UserError(
                    f"{plan.out}: stage {last.index} was trained when the stream ended with mega-batch "
                    f"{last.last}; now it would wait for mega-batch {now.last}: choose another --out"
                )
    growing = ("megabatches", "megabatch_sha256", "grow_experts") if is_stream(plan.stream) else ()
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


def summary(run: Run) -> str:
    lines = [["t", "stage", "experts", "parameters", "perplexity", "TFLOPs", "seconds"]]
    for row in run.rows:
        stage = "-" if row["stage"] is None else row["stage"]
        members = row["extra"].get("members", 1)
        experts = str(row["extra"].get("experts", "-")) + (f"@{members}" if members > 1 else "")
        cells = [row["t"], stage, experts, f"{row['parameters']:,}"]
        cells += [f"{row['value']:,.2f}", f"{row['train_flops'] / 1e12:,.2f}", f"{row['seconds']:,.0f}"]
        lines.append([str(cell) for cell in cells])
    return as_text(lines)
