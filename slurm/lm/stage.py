"""The restartable pieces of work: train a model of a stage, evaluate the stage, append rows.

Each may be killed at any moment and simply run again. trained.json and result.json, written whole and last,
say that one is complete; before that, fairseq-train goes on from its last checkpoint.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from alma.files import write_json_atomic
from alma.records import MACHINE_FIELDS, Row, Run
from alma.stages import Stage
from slurm.engine import children as child
from slurm.lm.plan import Plan, StageSpec, Training
from slurm.lm.progress import Progress, say

UNTRAINED, TRAINED, RESULT = "untrained.json", "trained.json", "result.json"
"""Written whole and last: in the run's directory, a training's, a stage's."""
Result = dict[str, Any]
"""What `fairseq_alma.evaluate` measured."""
_OF_TRAINING = ("training", "validation")
"""What `extra` tells of the training: its numbers, and the FLOPs of validation, which Comp leaves out."""


def run_stages(plan: Plan, run: Run) -> None:
    """Bring a run to its end here, one thing after the other, whatever of it has been done before."""
    with Progress(sum(len(spec.trainings) for spec in plan.stages), plan.max_update) as progress:
        if not (plan.out / UNTRAINED).exists():
            progress.start("untrained model", "evaluating")
            evaluate_untrained(plan)
        collect(plan, run)
        for spec in plan.stages:
            run_stage(spec, progress)
            collect(plan, run)


def run_stage(spec: StageSpec, progress: Progress) -> None:
    """Bring one stage to its end."""
    complete = (spec.directory / RESULT).exists()
    for training in spec.trainings:
        there = complete or (training.directory / TRAINED).exists()
        if not there:
            progress.start(training.title, resumed=(training.directory / "checkpoint_last.pt").exists())
            train(training, progress.read)
        progress.trained(now=not there)
    if complete:
        say(f"{spec.title}: was complete")
        return
    progress.start(spec.title, "evaluating")
    evaluate(spec)
    progress.done(f"perplexity {_read(spec.directory / RESULT)['perplexity']:.2f}")


def evaluate_untrained(plan: Plan, environment: Mapping[str, str] | None = None) -> None:
    """Write untrained.json, if it is not there: the model before it has seen any data, for t = 0."""
    if not (plan.out / UNTRAINED).exists():
        what = "evaluation of the untrained model"
        child.run(plan.untrained, plan.out / "untrained.log", what, environment=environment)


def train(
    training: Training,
    watch: Callable[[str], None] | None = None,
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    log: str = "train.log",
) -> None:
    """Train to the end, if that is not done; more `arguments` and `environment` say what a machine needs.

    Of several processes each calls it, with its own `log`; the one of train.log says when all is done.
    """
    if (training.directory / TRAINED).exists():
        return
    training.directory.mkdir(parents=True, exist_ok=True)
    command = [*training.command, *arguments]
    if training.previous:
        command += ["--finetune-from-model", str(checkpoint(training.previous))]
    child.run(command, training.directory / log, f"training of {training.title}", watch, environment)
    if log == "train.log":
        write_json_atomic(training.directory / TRAINED, {"checkpoint": checkpoint(training.directory).name})


def evaluate(spec: StageSpec, environment: Mapping[str, str] | None = None) -> None:
    """Write the stage's result.json, if it is not there."""
    if not (spec.directory / RESULT).exists():
        command = [*spec.evaluate, "--path", ":".join(str(checkpoint(model)) for model in spec.models)]
        what = f"evaluation of stage {spec.stage.index}"
        child.run(command, spec.directory / "eval.log", what, environment=environment)


def collect(plan: Plan, run: Run) -> None:
    """Append the rows of what has been evaluated, as far as nothing before it is missing."""
    present = {row["t"] for row in run.rows}
    if not (plan.out / UNTRAINED).exists():
        return
    if 0 not in present:
        run.append(_row(0, None, _read(plan.out / UNTRAINED), []))
    for spec in plan.stages:
        if not (spec.directory / RESULT).exists():
            return
        trained = [training.directory for training in spec.trainings]
        new = [directory in trained for directory in spec.models]
        previous = run.rows[spec.stage.first - 1]
        for row in rows(spec.stage, _read(spec.directory / RESULT), previous, new):
            if row["t"] not in present:
                run.append(row)


def checkpoint(directory: Path) -> Path:
    """The model that a stage hands on: the best on the validation set, where there was one."""
    best = directory / "checkpoint_best.pt"
    return best if best.exists() else directory / "checkpoint_last.pt"


def rows(stage: Stage, result: Result, previous: Mapping[str, Any], new: Sequence[bool]) -> list[Row]:
    """A row for each mega-batch of the stage: the `previous` model's while waiting, then the new one's.

    `new` says of each model that was evaluated whether this stage trained it.
    """
    unchanged = dict.fromkeys(("train_flops", *MACHINE_FIELDS), 0)
    extra = {key: value for key, value in previous["extra"].items() if key not in _OF_TRAINING}
    waiting = [
        Row(**{**previous, **unchanged, "t": t, "extra": extra})  # type: ignore[typeddict-item]
        for t in range(stage.first, stage.last)
    ]
    return [*waiting, _row(stage.last, stage, result, new)]


def _read(path: Path) -> Result:
    return json.loads(path.read_bytes())


def _row(t: int, stage: Stage | None, result: Result, new: Sequence[bool]) -> Row:
    trainings = [each for each, counts in zip(result["training"], new, strict=True) if counts]
    named = {"perplexity", "parameters", "eval_flops_per_example", "experts", "expert_count", "training"}
    extra = {key: value for key, value in result.items() if key not in named}
    if result["expert_count"]:
        extra |= {"experts": result["expert_count"], "expert_layers": result["experts"]}
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
        value=result["perplexity"],
        parameters=result["parameters"],
        train_flops=sum(each["flops"] + each["growth_flops"] for each in trainings),
        eval_flops_per_example=result["eval_flops_per_example"],
        seconds=sum(each["seconds"] for each in trainings),
        peak_memory_bytes=max((each["peak_memory_bytes"] for each in trainings), default=0),
        extra=extra,
    )
