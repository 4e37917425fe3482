"""Settings of a request that contradict its learner or each other; the length of its stream."""

import json
import sys
from pathlib import Path

from alma.errors import UserError
from alma.learners import text_learners
from alma.stages import check_share
from alma.stream import Stream, is_stream
from slurm.engine import children
from slurm.engine.terminal import say
from slurm.lm.settings import Request

CUT_FLAGS = ("--megabatch-words", "--megabatch-tokens", "--megabatch-seed")
_POSITIVE = (
    *("--tokens-per-sample", "--required-batch-size-multiple", "--distributed-world-size"),
    *("--update-freq", "--batch-size", "--max-tokens"),
)
_MOST_SEED = 2**31
ENCODER = "--gpt2-encoder-json"  # its default is a URL, which nothing here reads


def check(request: Request) -> None:
    """Raise UserError for settings that contradict the learner or each other."""
    for setting in dict.fromkeys(option for spec in text_learners().values() for option in spec.options):
        if setting not in request.learner_spec.options and getattr(request, setting) is not None:
            learners = " or ".join(name for name, spec in text_learners().items() if setting in spec.options)
            option = f"--{setting.replace('_', '-')}"
            raise UserError(f"{option} needs --learner {learners}, not {request.learner}: leave it out")
    if request.from_scratch and request.learner_spec.fresh:
        raise UserError(f"--from-scratch: {request.learner} trains new models in every stage; leave it out")
    if request.learner_spec.switch and not request.arch.startswith("switch_"):
        raise UserError(f"--arch {request.arch}: {request.learner} needs experts: give --arch switch_gmoe")
    for flag in ("--no-save", "--no-last-checkpoints"):
        if request.settings[flag]:
            raise UserError(f"{flag}: a run needs the last checkpoint of each stage; leave it out")
    if "--checkpoint-suffix" in request.flags:
        raise UserError("--checkpoint-suffix: a run finds its checkpoints by their names; leave it out")
    _check_numbers(request)
    check_share(request.replay_share, request.replay, request.replay_from)
    if request.one_schedule:
        _check_one_schedule(request)
    if request.average:
        _check_average(request)
    if request.cooldown:
        _check_cooldown(request)
    if request.update_multiplier > 1 and not request.settings["--max-update"]:
        raise UserError("--update-multiplier multiplies --max-update: give that after the `--`")


def _check_numbers(request: Request) -> None:
    """UserError: a number that fairseq-train takes and that no training can have."""
    for flag in _POSITIVE:
        values = request.settings[flag]
        for value in values if isinstance(values, list) else [values]:
            if value is not None and value < 1:
                raise UserError(f"{flag} {value}: at least 1")
    if not 0 <= request.seed < _MOST_SEED:
        raise UserError(
            f"--seed {request.seed}: below {_MOST_SEED:,}; members add to it, and NumPy takes 32 bits"
        )


def _check_one_schedule(request: Request) -> None:
    for flag in ("--lr-scheduler", "--total-num-update"):
        if flag in request.flags:
            raise UserError(
                f"{flag}: --schedule {request.schedule} sets the rate over all stages; leave it out, in an "
                "experiment by lr-scheduler= total-num-update="
            )
    if request.renews:
        cause = "--from-scratch" if request.from_scratch else request.learner
        raise UserError(
            f"--schedule {request.schedule}: {cause} trains new models in every stage; leave it out"
        )
    if request.schedule == "autoregressive" and not request.updates:
        raise UserError(
            "--schedule autoregressive needs the length of a stage: give --max-update after the `--`"
        )
    if request.grow_optimizer == "reset":
        raise UserError(
            f"--grow-optimizer reset: --schedule {request.schedule} keeps the optimizer state; leave it out"
        )


def _check_average(request: Request) -> None:
    count = request.averaged_checkpoints
    taken = ("--keep-interval-updates",) if count else ("--store-ema", "--ema-decay", "--ema-poly")
    for name in taken:
        if name in request.flags:
            raise UserError(f"{name}: --average {request.average} sets it; leave it out")
    if not count:
        return
    interval = request.settings["--save-interval-updates"]
    if not interval or (request.updates and count * interval > request.updates):
        number = f"{request.updates // count} or less" if request.updates >= count else "N"
        raise UserError(
            f"--average {request.average} needs {count} checkpoints of each stage: give "
            f"--save-interval-updates {number} after the `--`"
        )


def _check_cooldown(request: Request) -> None:
    share = request.cooldown
    if not 0 < share < 1:
        raise UserError(f"--cooldown {share:g}: a share of the updates of a stage, below 1, such as .1")
    if request.schedule not in ("continuous", "rsqrt"):
        raise UserError("--cooldown needs --schedule continuous or rsqrt; the others end at 0 already")
    if not request.updates:
        raise UserError(f"--cooldown {share:g} needs a length of stages: --max-update after the `--`")
    if request.averaged_checkpoints:
        raise UserError(f"--cooldown {share:g}: leave out --average {request.average}, or give another kind")


def count_megabatches(request: Request) -> int:
    """B: from stream.json, or from the flags that cut a fairseq-preprocess directory."""
    if is_stream(request.stream):
        return len(Stream.load(request.stream).megabatches)
    say(f"cutting {request.stream} into mega-batches")
    found = json.loads(children.ask(reshard_command(request), "cutting the data"))
    if found["note"]:
        say(f"{request.stream}: {found['note']}")
    return found["megabatches"]


def reshard_command(request: Request) -> list[str]:
    """Command that counts the mega-batches into which flags cut a fairseq-preprocess directory."""
    sized = request.settings["--megabatch-words"] or request.settings["--megabatch-tokens"]
    beside = Path(request.stream.split(":")[0], "encoder.json")
    if not (sized or ENCODER in request.flags or beside.is_file()):
        raise UserError(
            f"{request.stream}: no finished stream here; make one with `alma data`, or cut a "
            "fairseq-preprocess directory: after the `--`, give --megabatch-words N or --megabatch-tokens N; "
            f"with GPT-2's ids, as for RoBERTa, {ENCODER} FILE is enough"
        )
    command = [sys.executable, "-m", "fairseq_alma.reshard", request.stream]
    return [*command, *request.chosen(CUT_FLAGS), *request.flags.get(ENCODER, ())]
