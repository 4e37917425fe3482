"""Run a program of `engines`: write the task file, start the command, read its answer."""

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from alma.errors import UserError
from alma.evaluations import item_losses_file, read_item_losses, write_item_losses
from alma.files import atomic_write, make_directory
from alma.metrics import bits_per_byte, perplexity
from alma.schema import parse_json
from alma.stream import SPECIALS, Part, Stream
from alma.trainer import STAGE, TRAINED, Answer, StageTask, TextPart
from slurm.engine import children
from slurm.engine.children import Environment, Watch
from slurm.lm.plan import Plan
from slurm.lm.planned import StageSpec, Training

_OF_PATH = {"PYTHONSAFEPATH": ""}  # lets `python my_trainer.py` import modules beside it


def training_of(
    plan: Plan, spec: StageSpec, training: Training, checkpoint: Path | None
) -> StageTask:
    """The task of a training, from `checkpoint`; None: from scratch. UserError: damaged files."""
    stream = Stream.load(plan.request.stream)
    share = plan.request.replay_share
    earlier = spec.stage.earlier if share else ()
    new = [t for t in spec.stage.train_on if t not in earlier]
    return _task(
        plan,
        stream,
        spec,
        training.command,
        action="train",
        member=training.member,
        seeds=(training.seed,),
        train=_text_parts(stream, [stream.megabatches[t - 1] for t in new]),
        earlier=_text_parts(stream, [stream.megabatches[t - 1] for t in earlier]),
        replay_share=share if earlier else 0.0,
        checkpoint=str(checkpoint.resolve()) if checkpoint else None,
        budget=_budget_of(plan, training),
    )


def _budget_of(plan: Plan, training: Training) -> dict[Any, int]:
    """The amount of a training: that of --budget, or the updates that are planned."""
    kind, _, amount = (plan.request.budget or "").partition("=")
    if amount:
        return {kind: int(amount)}
    if plan.request.engine and training.updates:
        return {"updates": training.updates}
    return {}


def evaluation_of(plan: Plan, spec: StageSpec | None, models: Sequence[Path]) -> StageTask:
    """The task of an evaluation after a stage; without `spec` and models: of the untrained model.

    UserError: damaged files.
    """
    stream = Stream.load(plan.request.stream)
    parts = [stream.test, *_valid(stream, spec or plan.stages[0]), *stream.held_out]
    command = spec.evaluate if spec else plan.untrained
    return _evaluation(plan, stream, spec, models, parts, command)


def test_of(
    plan: Plan,
    spec: StageSpec | None,
    models: Sequence[Path],
    megabatches: Sequence[int],
    command: Sequence[str],
) -> StageTask:
    """As `evaluation_of`, by `command`, on the held-out parts of `megabatches` alone."""
    stream = Stream.load(plan.request.stream)
    parts = [stream.held_out[megabatch - 1] for megabatch in megabatches]
    return _evaluation(plan, stream, spec, models, parts, command)


def _evaluation(
    plan: Plan,
    stream: Stream,
    spec: StageSpec | None,
    models: Sequence[Path],
    parts: Sequence[Part],
    command: Sequence[str],
) -> StageTask:
    """The task of an evaluation on `parts` by `command`."""
    stage = spec or plan.stages[0]
    return _task(
        plan,
        stream,
        spec,
        command,
        action="evaluate",
        evaluate=_text_parts(stream, parts),
        members=tuple(str(model.resolve()) for model in models),
        seeds=tuple(training.seed for training in stage.trainings),
    )


def _task(
    plan: Plan, stream: Stream, spec: StageSpec | None, command: Sequence[str], **fields: Any
) -> StageTask:
    """A task with the `fields` of its action and those that all tasks have."""
    return StageTask(
        out=str(Path(command[-1]).parent),
        stream=str(stream.directory.resolve()),
        dictionary=_dictionary(stream),
        learner=plan.request.learner,
        stage=spec.stage.index if spec else None,
        t=spec.stage.last if spec else 0,
        megabatches=len(stream.megabatches),
        waiting_time=plan.request.waiting_time,
        valid=_text_parts(stream, _valid(stream, spec or plan.stages[0])),
        **fields,
    )


def _dictionary(stream: Stream) -> int:
    """The number of ids in what a trainer reads.

    UserError: an earlier version made the stream by a model's tokenizer.
    """
    if stream.end_token is not None:
        return stream.vocab_size
    if {"tokenizer.json", "vocab.json"} & stream.files.keys():
        problem = "an earlier version made it, without the model's end of text"
        raise UserError(f"{stream.directory}: {problem}; make it again by `alma data`")
    return stream.vocab_size + SPECIALS


def _valid(stream: Stream, spec: StageSpec) -> Sequence[Part]:
    """Validation sets of a stage: those of its new mega-batches, or that of the stream."""
    return stream.held_out_valid[spec.stage.first - 1 : spec.stage.last] or (stream.valid,)


def _text_parts(stream: Stream, parts: Sequence[Part]) -> tuple[TextPart, ...]:
    """The parts as a task names them. UserError: their files are damaged."""
    stream.check(parts)
    return tuple(_text_part(stream, part) for part in parts)


def _text_part(stream: Stream, part: Part) -> TextPart:
    files = tuple(str(stream.directory.resolve() / name) for name in part.files)
    return TextPart(
        name=part.name,
        period=part.period,
        words=part.words,
        bytes=part.bytes,
        tokens=part.tokens,
        files=files,
        documents=part.documents,
        end_token=stream.end_token,
    )


def answer(
    task: StageTask,
    command: Sequence[str],
    log: Path,
    name: str,
    watch: Watch,
    environment: Environment,
) -> Answer:
    """Run `command` for a task and return its answer; an answer left by a killed launch is reused.

    name, log, watch, environment: as for `children.run`, which raises if the command fails. Raises
    UserError if trained.json is missing or does not answer the task.
    """
    answer_file = Path(task.out, TRAINED)
    _write(task)
    with contextlib.suppress(UserError):
        return _read(task, answer_file)
    answer_file.unlink(missing_ok=True)
    children.run(command, log, name, watch, {**(environment or {}), **_OF_PATH})
    try:
        return _read(task, answer_file)
    except UserError as error:
        with children.appending(log) as output:  # for `alma status`
            output.write(f"error: {error}\n".encode())
        raise


def take_part(task: StageTask, command: Sequence[str], log: Path, name: str) -> None:
    """Run `command` on a node that is not the first: it trains along, and another one answers.

    Raises as `children.run`.
    """
    _write(task)
    with contextlib.suppress(UserError):
        _read(task, Path(task.out, TRAINED))
        return  # as on the first node
    children.run(command, log, name, None, _OF_PATH)


def _write(task: StageTask) -> None:
    """Write the task file, unless it is there; remove the answer to another task."""
    text = msgspec.json.format(msgspec.json.encode(task), indent=2)
    folder = Path(task.out)
    task_file = folder / STAGE
    make_directory(folder)
    if not task_file.exists() or task_file.read_bytes() != text:
        (folder / TRAINED).unlink(missing_ok=True)
        with atomic_write(task_file, "wb") as file:
            file.write(text)


def _read(task: StageTask, path: Path) -> Answer:
    try:
        return task.checked(parse_json(path.read_bytes()))
    except (OSError, ValueError) as error:
        problem = f"the program ended without a whole {path} ({error})"
        raise UserError(f"{problem}; does it call task.finish? Correct it and rerun") from None


def marker(task: StageTask, trained: Answer) -> dict[str, Any]:
    """The marker of a training, from the trainer's answer: its checkpoint and its costs."""
    costs = ("updates", "tokens", "validation_flops", "seconds", "peak_memory_bytes")
    training = {name: getattr(trained, name) for name in costs}
    training["flops"] = trained.flops
    if trained.flops is None:
        training["flops"] = 6 * trained.parameters * trained.tokens
    training["growth_flops"] = 0
    return {"checkpoint": f"{Path(task.out).name}/{trained.checkpoint}", "training": training}


def measured(
    plan: Plan, task: StageTask, evaluated: Answer, trainings: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """The content of untrained.json or result.json, from the trainer's answer.

    evaluated: the answer, with losses in nats per token. trainings: the costs of the trainings of
    the deployed models.
    """
    stream = Stream.load(plan.request.stream)
    nll, tokens = evaluated.losses["test"]
    valid = [evaluated.losses[part.name] for part in task.valid]
    valid_tokens = sum(count for _, count in valid)
    valid_nll = sum(loss * count for loss, count in valid) / valid_tokens
    flops = evaluated.eval_flops_per_example
    record = {
        "nll": nll,
        "perplexity": perplexity(nll),
        "tokens": tokens,
        "words": stream.test.words,
        "bytes": stream.test.bytes,
        "perplexity_per_word": perplexity(nll * tokens / stream.test.words),
        "bits_per_byte": bits_per_byte(nll * tokens, stream.test.bytes),
        "valid": {"loss": valid_nll, "perplexity": perplexity(valid_nll)},
        "parameters": evaluated.parameters,
        "eval_flops_per_example": 2 * evaluated.parameters if flops is None else flops,
        "members": len(task.members or task.seeds),
        "expert_count": None,
        "training": list(trainings),
    }
    if stream.ordered:
        cells = measured_parts(plan, task, evaluated, range(1, _held_out_parts(task, stream) + 1))
        record["matrix"] = [cell["value"] for cell in cells]
        if stream.held_out[0].period:
            record["matrix_periods"] = [cell["period"] for cell in cells]
    return record


def _held_out_parts(task: StageTask, stream: Stream) -> int:
    """How many held-out parts a task has; the stream may have grown since."""
    names = {part.name for part in task.evaluate}
    return sum(part.name in names for part in stream.held_out)


def measured_parts(
    plan: Plan, task: StageTask, evaluated: Answer, megabatches: Sequence[int]
) -> list[dict[str, Any]]:
    """The cells of the evaluation matrix of held-out parts, as `fairseq_alma.evaluate` has them.

    evaluated: the answer to `task`, whose losses by document are written to the run.
    """
    held_out = Stream.load(plan.request.stream).held_out
    cells = []
    for megabatch in megabatches:
        part = held_out[megabatch - 1]
        nll, tokens = evaluated.losses[part.name]
        cell: dict[str, Any] = {"megabatch": megabatch, "value": perplexity(nll), "tokens": tokens}
        if part.period:
            cell["period"] = part.period
        cells.append(cell)
        if task.stage is not None and part.name in evaluated.documents:
            losses = read_item_losses(Path(task.out, evaluated.documents[part.name]))
            if losses is not None:
                write_item_losses(item_losses_file(plan.out, task.stage, megabatch), losses)
    return cells


def remove_documents(task: StageTask, evaluated: Answer) -> None:
    """Remove the trainer's files with losses by document, which the run now has."""
    for name in evaluated.documents.values():
        Path(task.out, name).unlink(missing_ok=True)
