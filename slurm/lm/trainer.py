"""Runs by the user's own trainer: the task file, the call, and the result file."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from alma.errors import UserError
from alma.files import atomic_write, make_directory
from alma.metrics import bits_per_byte, perplexity
from alma.schema import parse_json
from alma.stream import SPECIALS, Part, Stream
from alma.trainer import STAGE, TRAINED, Answer, StageTask, TextPart
from slurm.engine import children
from slurm.engine.children import Environment, Watch
from slurm.lm.plan import Plan, StageSpec, Training

_OF_PATH = {"PYTHONSAFEPATH": ""}  # `python my_trainer.py` finds the modules beside it


def training_of(plan: Plan, spec: StageSpec, training: Training, checkpoint: Path | None) -> StageTask:
    """The task of a training, from `checkpoint`; None: from scratch. UserError: damaged files."""
    stream, share = Stream.load(plan.request.stream), plan.request.replay_share
    earlier = spec.stage.earlier if share else ()
    kind, _, amount = (plan.request.budget or "").partition("=")
    own: dict[str, Any] = {"member": training.member, "seeds": (training.seed,)}
    own["train"] = [stream.megabatches[t - 1] for t in spec.stage.train_on if t not in earlier]
    own["earlier"] = [stream.megabatches[t - 1] for t in earlier]
    own["replay_share"] = share if earlier else 0.0
    own["checkpoint"] = checkpoint and str(checkpoint.resolve())
    own["budget"] = {kind: int(amount)} if amount else {}
    return _task(plan, stream, spec, training.command, **own)


def evaluation_of(plan: Plan, spec: StageSpec | None, models: Sequence[Path]) -> StageTask:
    """The task of an evaluation: of the `models` after a stage, or untrained. UserError: damaged files."""
    stream, of = Stream.load(plan.request.stream), spec or plan.stages[0]
    own: dict[str, Any] = {"evaluate": [stream.test, *_valid(stream, of), *stream.held_out]}
    own["members"] = tuple(str(model.resolve()) for model in models)
    own["seeds"] = tuple(training.seed for training in of.trainings)
    return _task(plan, stream, spec, spec.evaluate if spec else plan.untrained, **own)


def _task(
    plan: Plan, stream: Stream, spec: StageSpec | None, command: Sequence[str], **own: Any
) -> StageTask:
    request = plan.request
    own["valid"] = _valid(stream, spec or plan.stages[0])
    for name in own.keys() & {"train", "earlier", "valid", "evaluate"}:
        stream.check(own[name])
        own[name] = tuple(_text_part(stream, part) for part in own[name])
    return StageTask(
        action="train" if "train" in own else "evaluate",
        out=str(Path(command[-1]).parent),
        stream=str(stream.directory.resolve()),
        dictionary=stream.vocab_size + SPECIALS,
        learner=request.learner,
        stage=spec.stage.index if spec else None,
        t=spec.stage.last if spec else 0,
        megabatches=len(stream.megabatches),
        waiting_time=request.waiting_time,
        **own,
    )


def _valid(stream: Stream, spec: StageSpec) -> Sequence[Part]:
    """What a stage is validated on: of an ordered stream the sets of its new mega-batches."""
    return stream.held_out_valid[spec.stage.first - 1 : spec.stage.last] or (stream.valid,)


def _text_part(stream: Stream, part: Part) -> TextPart:
    files = tuple(str(stream.directory.resolve() / name) for name in part.files)
    return TextPart(part.name, part.period, part.words, part.bytes, part.tokens, files)


def answer(
    task: StageTask, command: Sequence[str], log: Path, what: str, watch: Watch, environment: Environment
) -> Answer:
    """The trainer's answer, which a killed launch may have left; else run `command`, as `children.run` does.

    UserError: trained.json is missing, or no answer to the task.
    """
    folder, text = Path(task.out), msgspec.json.format(msgspec.json.encode(task), indent=2)
    make_directory(folder)
    asked, answered = folder / STAGE, folder / TRAINED
    if not asked.exists() or asked.read_bytes() != text:
        answered.unlink(missing_ok=True)
        with atomic_write(asked, "wb") as file:
            file.write(text)
    with contextlib.suppress(UserError):
        return _read(task, answered)
    answered.unlink(missing_ok=True)
    children.run(command, log, what, watch, {**(environment or {}), **_OF_PATH})
    try:
        return _read(task, answered)
    except UserError as error:
        with children.appending(log) as output:  # for `alma status`
            output.write(f"error: {error}\n".encode())
        raise


def _read(task: StageTask, path: Path) -> Answer:
    try:
        return task.checked(parse_json(path.read_bytes()))
    except (OSError, ValueError) as error:
        why = f"the trainer ended without a whole {path} ({error})"
        raise UserError(f"{why}; correct the trainer and rerun") from None


def marker(task: StageTask, trained: Answer) -> dict[str, Any]:
    """What trained.json of ALMA keeps of a training."""
    costs = ("updates", "tokens", "validation_flops", "seconds", "peak_memory_bytes")
    flops = 6 * trained.parameters * trained.tokens if trained.flops is None else trained.flops
    training = {name: asdict(trained)[name] for name in costs} | {"flops": flops, "growth_flops": 0}
    return {"checkpoint": f"{Path(task.out).name}/{trained.checkpoint}", "training": training}


def measured(
    plan: Plan, task: StageTask, found: Answer, trainings: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """The content of untrained.json or result.json; `trainings`: the costs of the deployed models."""
    stream, (nll, tokens) = Stream.load(plan.request.stream), found.losses["test"]
    valid = [found.losses[part.name] for part in task.valid]
    on_valid = sum(loss * count for loss, count in valid) / sum(count for _, count in valid)
    flops = found.eval_flops_per_example
    record = {
        "nll": nll,
        "perplexity": perplexity(nll),
        "tokens": tokens,
        "words": stream.test.words,
        "bytes": stream.test.bytes,
        "perplexity_per_word": perplexity(nll * tokens / stream.test.words),
        "bits_per_byte": bits_per_byte(nll * tokens, stream.test.bytes),
        "valid": {"loss": on_valid, "perplexity": perplexity(on_valid)},
        "parameters": found.parameters,
        "eval_flops_per_example": 2 * found.parameters if flops is None else flops,
        "members": len(task.members or task.seeds),
        "expert_count": None,
        "training": list(trainings),
    }
    if stream.ordered:
        record["matrix"] = [perplexity(found.losses[part.name][0]) for part in stream.held_out]
        if stream.held_out[0].period:
            record["matrix_periods"] = [part.period for part in stream.held_out]
    return record
