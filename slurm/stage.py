"""The restartable unit of work: train one stage, evaluate it on the test set, append its rows.

It may be killed at any moment and simply run again. result.json, written whole and last, says that a
stage is complete; before that, fairseq-train goes on from its last checkpoint.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from alma.errors import UserError
from alma.records import MACHINE_FIELDS, Row, Run
from alma.stages import Stage
from slurm import child
from slurm.plan import Plan, StageSpec, Training
from slurm.progress import Progress, say

Result = dict[str, Any]
"""What `fairseq_alma.evaluate` measured."""


def run_untrained(plan: Plan, run: Run) -> None:
    """Evaluate the model before it has seen any data: the row of t = 0."""
    path = plan.out / "untrained.json"
    if not path.exists():
        try:
            child.run(plan.untrained, plan.out / "untrained.log", "evaluation of the untrained model")
        except (UserError, child.StageFailed):
            (plan.out / "run.json").unlink()  # nothing measured yet: a mended command may start anew here
            raise
    _append(run, [_row(0, None, json.loads(path.read_bytes()), [])])


def run_stage(spec: StageSpec, run: Run, max_update: int | None = None) -> None:
    """Bring one stage to its end, whatever of it has been done before: checkpoints, result.json, rows."""
    stage = spec.stage
    arrived = f"{stage.first}-{stage.last}" if stage.last > stage.first else str(stage.last)
    title = f"stage {stage.index} (mega-batch {arrived})"
    path = spec.directory / "result.json"
    if path.exists():
        say(f"{title}: was complete")
    else:
        for number, training in enumerate(spec.trainings, start=1):
            member = f", member {number} of {len(spec.trainings)}" if len(spec.trainings) > 1 else ""
            with Progress(title + member, max_update) as progress:
                _train(training, f"training of stage {stage.index}{member}", progress)
                if number < len(spec.trainings):
                    progress.done("trained")
                    continue
                progress.note("evaluating")
                _evaluate(spec)
                progress.done(f"perplexity {json.loads(path.read_bytes())['perplexity']:.2f}")
    trained = [training.directory for training in spec.trainings]
    new = [directory in trained for directory in spec.models]
    _append(run, rows(stage, json.loads(path.read_bytes()), run.rows[stage.first - 1], new))


def checkpoint(directory: Path) -> Path:
    """The model that a stage hands on: the best on the validation set, where there was one."""
    best = directory / "checkpoint_best.pt"
    return best if best.exists() else directory / "checkpoint_last.pt"


def rows(stage: Stage, result: Result, previous: Mapping[str, Any], new: Sequence[bool]) -> list[Row]:
    """A row for each mega-batch of the stage: the `previous` model's while waiting, then the new one's.

    `new` says of each model that was evaluated whether this stage trained it.
    """
    unchanged = dict.fromkeys(("train_flops", *MACHINE_FIELDS), 0)
    extra = {key: value for key, value in previous["extra"].items() if key != "training"}
    waiting = [
        Row(**{**previous, **unchanged, "t": t, "extra": extra})  # type: ignore[typeddict-item]
        for t in range(stage.first, stage.last)
    ]
    return [*waiting, _row(stage.last, stage, result, new)]


def _train(training: Training, what: str, progress: Progress) -> None:
    training.directory.mkdir(parents=True, exist_ok=True)
    command = list(training.command)
    if training.previous:
        command += ["--finetune-from-model", str(checkpoint(training.previous))]
    child.run(command, training.directory / "train.log", what, progress.read)


def _evaluate(spec: StageSpec) -> None:
    command = [*spec.evaluate, "--path", ":".join(str(checkpoint(model)) for model in spec.models)]
    child.run(command, spec.directory / "eval.log", f"evaluation of stage {spec.stage.index}")


def _row(t: int, stage: Stage | None, result: Result, new: Sequence[bool]) -> Row:
    trainings = [each for each, counts in zip(result["training"], new, strict=True) if counts]
    named = {"perplexity", "parameters", "eval_flops_per_example", "experts", "expert_count", "training"}
    extra = {key: value for key, value in result.items() if key not in named}
    if result["expert_count"]:
        extra |= {"experts": result["expert_count"], "expert_layers": result["experts"]}
    if trainings:
        extra["training"] = [
            {key: value for key, value in each.items() if key not in MACHINE_FIELDS} for each in trainings
        ]
    return Row(
        t=t,
        stage=stage.index if stage else None,
        trained_on=list(stage.train_on) if stage else [],
        metric="perplexity",
        value=result["perplexity"],
        parameters=result["parameters"],
        train_flops=sum(each["flops"] + each["growth_flops"] for each in trainings),
        eval_flops_per_example=result["eval_flops_per_example"],
        seconds=sum(each["seconds"] for each in trainings),
        peak_memory_bytes=max((each["peak_memory_bytes"] for each in trainings), default=0),
        extra=extra,
    )


def _append(run: Run, new: list[Row]) -> None:
    present = {row["t"] for row in run.rows}
    for row in new:
        if row["t"] not in present:
            run.append(row)
