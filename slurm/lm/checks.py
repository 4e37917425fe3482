"""Settings of a request that contradict its learner or each other; the length of its stream."""

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
from slurm.lm.plan import CUT_FLAGS, ENCODER, Request

_POSITIVE: tuple[str, ...] = ("--tokens-per-sample", "--required-batch-size-multiple", "--update-freq")
_POSITIVE += ("--distributed-world-size", "--batch-size", "--max-tokens")
_MOST_SEED = 2**31
_OF_FAIRSEQ = ("schedule", "average", "update_multiplier", "context_window", "init")
"""Options that a trainer of the user's lacks."""


def check(request: Request) -> None:
    """Raise UserError for settings that contradict the learner or each other."""
    for problem in _problems(request):
        raise UserError(problem)
    check_share(request.replay_share, request.replay, request.replay_from)


def _problems(request: Request) -> Iterator[str]:
    yield from _of_trainer(request)
    specs, own, settings = text_learners(), request.learner_spec, request.settings
    for name in dict.fromkeys(name for spec in specs.values() for name in spec.options):
        if name not in own.options and getattr(request, name) is not None:
            learners = " or ".join(learner for learner, spec in specs.items() if name in spec.options)
            yield f"{flag_of(name)} needs --learner {learners}, not {request.learner}: leave it out"
    parts = Stream.load(request.stream).held_out if is_stream(request.stream) else ()
    if request.cutoff and not ((request.init or request.trainer) and parts and parts[0].period):
        yield f"--cutoff {request.cutoff} needs --init MODEL, and a stream with periods: `alma data --by`"
    if request.init == "":
        yield "--init '': give the path of a checkpoint, or of a folder with a GPT-2"
    if request.init and own.joint:
        yield f"--init: {request.learner} trains its models as one, which would stay equal; give ens"
    if request.from_scratch and own.fresh:
        yield f"--from-scratch: {request.learner} trains new models in every stage; leave it out"
    if own.switch and not (arch := settings["--arch"]).startswith("switch_"):
        yield f"--arch {arch}: {request.learner} needs experts: give --arch switch_gmoe"
    for flag in _POSITIVE:
        values = settings[flag] if isinstance(settings[flag], list) else [settings[flag]]
        yield from (f"{flag} {value}: at least 1" for value in values if value is not None and value < 1)
    if not 0 <= request.seed < _MOST_SEED:
        yield f"--seed {request.seed}: below {_MOST_SEED:,}; members add to it, and NumPy takes 32 bits"
    schedule = f"--schedule {request.schedule}"
    count, updates = averages.last_of(request.average), request.updates
    if request.one_schedule:
        for flag in ("--lr-scheduler", "--total-num-update"):
            if flag in request.flags:
                experiment = "in an experiment by lr-scheduler= total-num-update="
                yield f"{flag}: {schedule} sets the rate over all stages; leave it out, {experiment}"
        if request.renews:
            cause = "--from-scratch" if request.from_scratch else request.learner
            yield f"{schedule}: {cause} trains new models in every stage; leave it out"
        if request.grow_optimizer == "reset":
            yield f"--grow-optimizer reset: {schedule} keeps the optimizer state; leave it out"
    if request.update_multiplier > 1 and not updates:
        yield "--update-multiplier multiplies --max-update: give --max-update after the `--`"
    if not request.average:
        return
    for name in ("--keep-interval-updates",) if count else ("--store-ema", "--ema-decay", "--ema-poly"):
        if name in request.flags:
            yield f"{name}: --average {request.average} sets it; leave it out"
    yield from _of_kept(request, updates)


def check_kept(request: Request, updates: int) -> None:
    """UserError: a stage of so many updates (0: unknown) saves too few checkpoints for --average last:K."""
    for problem in _of_kept(request, updates):
        raise UserError(problem)


def _of_kept(request: Request, updates: int) -> Iterator[str]:
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
        if request.budget:
            yield f"--budget {request.budget} needs --trainer; fairseq's training has `-- --max-update N`"
        return
    learner = request.learner_spec
    if learner.joint or learner.switch or learner.growth:
        yield f"--learner {request.learner} needs models of fairseq: give sm, ens or gens with --trainer"
    for flag in (*(flag_of(name) for name in _OF_FAIRSEQ if name in changed(request)), *request.flags):
        yield f"{flag} is for the training of fairseq: leave it out, a trainer takes its flags in COMMAND"
    try:
        words = shlex.split(request.trainer)
    except ValueError as error:
        yield f"--trainer {request.trainer}: {error}"
        return
    if not words or not shutil.which(words[0]):
        yield f"--trainer {request.trainer}: no such program; give a command such as 'python my_trainer.py'"


def megabatch_sizes(request: Request) -> list[int]:
    """Tokens of each mega-batch: from stream.json, or as flags cut a fairseq-preprocess directory."""
    if request.trainer or is_stream(request.stream):
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
    beside = Path(request.stream.split(":")[0], "encoder.json")
    if not (sized or ENCODER in request.flags or beside.is_file()):
        what = "no finished stream here; make one with `alma data`, or cut a fairseq-preprocess directory"
        remedy = "after the `--`, give --megabatch-words N or --megabatch-tokens N"
        gpt2 = f"with GPT-2's ids, as for RoBERTa, {ENCODER} FILE is enough"
        raise UserError(f"{request.stream}: {what}: {remedy}; {gpt2}")
    command = [sys.executable, "-m", "fairseq_alma.reshard", request.stream]
    return [*command, *request.chosen(CUT_FLAGS), *request.flags.get(ENCODER, ())]
