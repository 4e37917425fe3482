"""Check a request for settings that contradict its learner or each other; sizes of mega-batches."""

import json
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from alma import averages
from alma.errors import UserError
from alma.learners import text_learners
from alma.options import changed, flag_of
from alma.stages import check_share
from alma.stream import Stream, is_stream
from slurm.engine import children
from slurm.engine.terminal import say
from slurm.lm.plan import Request
from slurm.lm.run_options import CUT_FLAGS, ENCODER

_POSITIVE = (
    "--tokens-per-sample",
    "--required-batch-size-multiple",
    "--update-freq",
    "--distributed-world-size",
    "--batch-size",
    "--max-tokens",
)
_MOST_SEED = 2**31
_OF_FAIRSEQ = ("schedule", "average", "update_multiplier", "context_window", "init")
"""Options that need fairseq's training, not the user's own trainer."""


def check(request: Request) -> None:
    """Raise UserError for settings that contradict the learner or each other."""
    for problem in _problems(request):
        raise UserError(problem)
    check_share(request.replay_share, request.replay, request.replay_from)


def _problems(request: Request) -> Iterator[str]:
    """All problems of a request, in the order in which they are reported."""
    yield from _of_trainer(request)
    if request.engine:
        yield from _of_engine(request)
    yield from _of_learner(request)
    yield from _of_numbers(request)
    if request.one_schedule:
        yield from _of_one_schedule(request)
    if request.update_multiplier > 1 and not request.updates:
        flag = "--max_steps" if request.engine else "--max-update"
        yield f"--update-multiplier multiplies {flag}: give {flag} after the `--`"
    if request.average and request.by_fairseq:
        yield from _of_average(request)
        yield from _of_kept(request, request.updates)


def _of_learner(request: Request) -> Iterator[str]:
    """Problems: options that the learner does not have, or that contradict how it trains."""
    learner = request.learner_spec
    learners_of_option: dict[str, list[str]] = {}
    for learner_name, spec in text_learners().items():
        for option_name in spec.options:
            learners_of_option.setdefault(option_name, []).append(learner_name)
    for option_name, learner_names in learners_of_option.items():
        if option_name not in learner.options and getattr(request, option_name) is not None:
            needed = f"{flag_of(option_name)} needs --learner {' or '.join(learner_names)}"
            yield f"{needed}, not {request.learner}: leave it out"
    has_periods = _has_periods(request.stream)
    starts_trained = request.init or request.trainer
    if request.cutoff and not (starts_trained and has_periods):
        needed = "needs --init MODEL, and a stream with periods: `alma data --by`"
        yield f"--cutoff {request.cutoff} {needed}"
    if request.init == "":
        yield "--init '': give the path of a folder of Hugging Face, or of a checkpoint"
    if request.init and learner.joint:
        one_model = "trains its models as one, which would stay equal"
        yield f"--init: {request.learner} {one_model}; give ens"
    if request.from_scratch and learner.fresh:
        yield f"--from-scratch: {request.learner} trains new models in every stage; leave it out"
    arch = request.settings["--arch"]
    if learner.switch and not arch.startswith("switch_"):
        yield f"--arch {arch}: {request.learner} needs experts: give --arch switch_gmoe"


def _has_periods(stream: str) -> bool:
    """Whether the held-out sets of a stream are of periods. UserError: the stream is damaged."""
    if not is_stream(stream):
        return False
    held_out = Stream.load(stream).held_out
    return bool(held_out and held_out[0].period)


def _of_numbers(request: Request) -> Iterator[str]:
    """Problems: numbers out of range."""
    for flag in _POSITIVE:
        values = request.settings[flag]
        if not isinstance(values, list):
            values = [values]
        for value in values:
            if value is not None and value < 1:
                yield f"{flag} {value}: at least 1"
    if not 0 <= request.seed < _MOST_SEED:
        reason = "members add to it, and NumPy takes 32 bits"
        yield f"--seed {request.seed}: below {_MOST_SEED:,}; {reason}"


def _of_one_schedule(request: Request) -> Iterator[str]:
    """Problems: settings that contradict a single schedule over all stages."""
    schedule = f"--schedule {request.schedule}"
    for flag in ("--lr-scheduler", "--total-num-update"):
        if flag in request.flags:
            experiment = "in an experiment by lr-scheduler= total-num-update="
            yield f"{flag}: {schedule} sets the rate over all stages; leave it out, {experiment}"
    if request.renews:
        cause = "--from-scratch" if request.from_scratch else request.learner
        yield f"{schedule}: {cause} trains new models in every stage; leave it out"
    if request.grow_optimizer == "reset":
        yield f"--grow-optimizer reset: {schedule} keeps the optimizer state; leave it out"


def _of_average(request: Request) -> Iterator[str]:
    """Problems: flags of fairseq-train that --average sets itself."""
    flags: tuple[str, ...] = ("--store-ema", "--ema-decay", "--ema-poly")
    if averages.last_of(request.average):
        flags = ("--keep-interval-updates",)
    for flag in flags:
        if flag in request.flags:
            yield f"{flag}: --average {request.average} sets it; leave it out"


def check_kept(request: Request, updates: int) -> None:
    """Check that a stage of `updates` (0: unknown) saves K checkpoints for --average last:K.

    UserError: it saves fewer.
    """
    for problem in _of_kept(request, updates):
        raise UserError(problem)


def _of_kept(request: Request, updates: int) -> Iterator[str]:
    """Problems: stages of `updates` (0: unknown) save too few checkpoints for --average last:K."""
    count = averages.last_of(request.average)
    if not count:
        return
    interval = request.settings["--save-interval-updates"]
    if not interval or (updates and count * interval > updates):
        number = f"{updates // count} or less" if updates >= count else "N"
        needed = f"needs {count} checkpoints of each stage: give --save-interval-updates {number}"
        yield f"--average {request.average} {needed} after the `--`"


def _of_trainer(request: Request) -> Iterator[str]:
    """Problems of --trainer and --budget."""
    if not request.trainer:
        if request.budget and not request.engine:
            remedy = "fairseq's training has `-- --max-update N`"
            yield f"--budget {request.budget} needs --trainer; {remedy}"
        return
    learner = request.learner_spec
    if learner.joint or learner.switch or learner.growth:
        remedy = "give sm, ens or gens with --trainer"
        yield f"--learner {request.learner} needs models of fairseq: {remedy}"
    changed_options = changed(request)
    flags_of_options = [flag_of(name) for name in _OF_FAIRSEQ if name in changed_options]
    for flag in (*flags_of_options, *request.flags):
        remedy = "leave it out, a trainer takes its flags in COMMAND"
        yield f"{flag} is for the training of fairseq: {remedy}"
    try:
        words = shlex.split(request.trainer)
    except ValueError as error:
        yield f"--trainer {request.trainer}: {error}"
        return
    if not words or not shutil.which(words[0]):
        remedy = "give a command such as 'python my_trainer.py'"
        yield f"--trainer {request.trainer}: no such program; {remedy}"


def _of_engine(request: Request) -> Iterator[str]:
    """Problems: what the engine transformers does not have."""
    learner = request.learner_spec
    if learner.joint or learner.switch or learner.growth:
        remedy = "give sm, ens or gens"
        engine = f"and transformers trains {request.init}"
        yield f"--learner {request.learner} needs models of fairseq, {engine}: {remedy}"
    remedies = {
        "schedule": "give `-- --lr_scheduler_type constant_with_warmup`, of each stage",
        "context_window": "leave it out",
        "no_tf32": "leave it out: fp32 is computed in full without `-- --tf32 True`",
        "budget": "give `-- --max_steps N`",
    }
    changed_options = changed(request)
    for name, remedy in remedies.items():
        if name in changed_options:
            yield f"{flag_of(name)} is not for the engine transformers: {remedy}"


def megabatch_sizes(request: Request) -> list[int]:
    """Tokens of each mega-batch, from stream.json or from cutting a fairseq-preprocess directory.

    UserError: the stream is damaged, of images, or no flag says how to cut the directory.
    """
    if not request.by_fairseq or is_stream(request.stream):
        stream = Stream.load(request.stream)
        if not (request.trainer or stream.files):
            raise UserError(f"{request.stream}: a stream of images: give --trainer COMMAND")
        return [part.tokens for part in stream.megabatches]
    say(f"cutting {request.stream} into mega-batches")
    answer = json.loads(children.ask(reshard_command(request), "cutting the data"))
    if answer["note"]:
        say(f"{request.stream}: {answer['note']}")
    return answer["tokens"]


def reshard_command(request: Request) -> list[str]:
    """Command that counts the mega-batches into which flags cut a fairseq-preprocess directory."""
    sized = request.settings["--megabatch-words"] or request.settings["--megabatch-tokens"]
    encoder = Path(request.stream.split(":")[0], "encoder.json")
    if not (sized or ENCODER in request.flags or encoder.is_file()):
        problem = "no finished stream here; make one with `alma data`"
        problem += ", or cut a fairseq-preprocess directory"
        remedy = "after the `--`, give --megabatch-words N or --megabatch-tokens N"
        gpt2 = f"with GPT-2's ids, as for RoBERTa, {ENCODER} FILE is enough"
        raise UserError(f"{request.stream}: {problem}: {remedy}; {gpt2}")
    command = [sys.executable, "-m", "fairseq_alma.reshard", request.stream]
    return [*command, *request.chosen(CUT_FLAGS), *request.flags.get(ENCODER, ())]
