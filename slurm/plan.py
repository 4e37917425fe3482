"""What to run: a request and the number of mega-batches become one restartable `StageSpec` per stage.

Pure: nothing is run, read or written here. A cluster needs from this module only the specs, which are
plain data and independent of where they run.
"""

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alma.errors import UserError
from alma.stages import Stage, stages

LEARNERS = ("sm", "gmoe")
EXPERTS = 4  # of the first stage, as in the paper's Table 2
_CUT_FLAGS = ("--megabatch-words", "--megabatch-tokens", "--megabatch-seed")

_EVERY_STAGE = "leave it out, the launcher sets it for every stage"
_LAUNCHER_FLAGS = {
    "--save-dir": "give --out RUN before the `--`",
    "--task": "leave it out, it is always alma_lm",
    "--stage": _EVERY_STAGE,
    "--finetune-from-model": _EVERY_STAGE,
    "--restore-file": _EVERY_STAGE,
    **{
        flag: f"give {flag} before the `--`"
        for flag in (
            "--waiting-time",
            "--replay",
            "--seed",
            "--grow-experts",
            "--grow-router",
            "--grow-optimizer",
        )
    },
}
_EVALUATION_FLAGS = (
    "--user-dir",
    "--cpu",
    "--fp16",
    "--bf16",
    "--num-workers",
    "--max-tokens",
    "--batch-size",
    "--required-batch-size-multiple",
    "--tokens-per-sample",
    "--sample-break-mode",
    "--add-bos-token",
    *_CUT_FLAGS,
)

Flags = Mapping[str, Sequence[str]]
"""Flags for fairseq-train by name: the words of each as they were given, its name included."""


@dataclass(frozen=True)
class Request:
    """What the user asked for. The grow_* settings are None where they were not given."""

    stream: str
    out: Path
    learner: str  # one of LEARNERS
    flags: Flags
    waiting_time: int = 1
    replay: bool = False
    seed: int = 0
    grow_experts: str | None = None
    grow_router: str | None = None
    grow_optimizer: str | None = None
    name: str | None = None


@dataclass(frozen=True)
class StageSpec:
    """One stage to run: `stage.run_stage` may be killed at any moment and simply called again."""

    stage: Stage
    directory: Path
    train: tuple[str, ...]
    """Without --finetune-from-model: which checkpoint of `previous` is best, only its training tells."""
    evaluate: tuple[str, ...]
    """Without --path, for the same reason."""
    previous: Path | None
    """Directory of the stage whose model this one continues; None for the first."""


@dataclass(frozen=True)
class Plan:
    """Everything to run, in this order: the untrained model's evaluation, then the stages."""

    out: Path
    config: dict[str, Any]  # for alma.records
    untrained: tuple[str, ...]
    stages: tuple[StageSpec, ...]
    max_update: int | None  # of each stage, where the flags tell


def read_flags(words: Sequence[str]) -> Flags:
    """The words after `--` by flag. UserError: no flag, or one that the launcher sets itself."""
    flags: dict[str, list[str]] = {}
    for word in words:
        if re.match(r"--?[A-Za-z]", word):
            name = word.partition("=")[0]
            name = "--arch" if name == "-a" else name
            if name in _LAUNCHER_FLAGS:
                raise UserError(f"{name} is not for fairseq-train here: {_LAUNCHER_FLAGS[name]}")
            flags.setdefault(name, []).append(word)
        elif flags:
            flags[name].append(word)
        else:
            raise UserError(f"{word!r}: after `--` come flags of fairseq-train, such as --max-update 400")
    return flags


def make_plan(request: Request, megabatches: int) -> Plan:
    """The plan for a stream of B = `megabatches`. UserError: settings that contradict each other."""
    schedule = stages(megabatches, request.waiting_time, request.replay)
    arch = _value(request.flags, "--arch") or "switch_gmoe"
    experts = _number(request.flags, "--moe-expert-count")
    if experts is None and (request.learner == "gmoe" or arch.startswith("switch_")):
        experts = EXPERTS
    growth = _growth(request, len(schedule) - 1, experts)
    passed = {k: words for k, words in request.flags.items() if k not in ("--arch", "--moe-expert-count")}
    specs = []
    for stage in schedule:
        count = None if experts is None else experts + sum(growth[: stage.index])
        grow = _grow_flags(request, growth[stage.index - 1]) if growth and stage.index else []
        specs.append(_spec(request, stage, arch, _flag("--moe-expert-count", count) + grow, passed))
    config = {
        "learner": request.learner,
        "megabatches": megabatches,
        "waiting_time": request.waiting_time,
        "replay": request.replay,
        "seed": request.seed,
        "arch": arch,
        "moe_expert_count": experts,
        "fairseq_flags": _words(passed),
    }
    if request.learner == "gmoe":
        router, optimizer = _grow_modes(request)
        config |= {"grow_experts": growth, "grow_router": router, "grow_optimizer": optimizer}
    if request.name:
        config["name"] = request.name
    untrained = _module("fairseq_alma.evaluate", "--untrained", *specs[0].train[3:])
    return Plan(
        request.out,
        config,
        (*untrained, "--out", str(request.out / "untrained.json")),
        tuple(specs),
        _number(request.flags, "--max-update") or None,  # 0 is fairseq's "no limit"
    )


def reshard_command(request: Request) -> list[str]:
    """What tells into how many mega-batches the flags cut an ordinary fairseq-preprocess directory."""
    if not request.flags.keys() & {"--megabatch-words", "--megabatch-tokens"}:
        raise UserError(
            f"{request.stream}: no finished stream here; make one with `python -m data_prep`, or cut a "
            f"fairseq-preprocess directory with --megabatch-words N after the `--`"
        )
    return list(_module("fairseq_alma.reshard", request.stream, *_chosen(request.flags, _CUT_FLAGS)))


def _spec(request: Request, stage: Stage, arch: str, experts: list[str], passed: Flags) -> StageSpec:
    directory = _directory(request, stage.index)
    common = [request.stream, "--task", "alma_lm"]
    schedule = ["--stage", str(stage.index), "--waiting-time", str(request.waiting_time)]
    schedule += ["--replay"] if request.replay else []
    train = [*common, "--arch", arch, *schedule, "--seed", str(request.seed)]
    train += ["--save-dir", str(directory), *experts]
    evaluate = [*common, "--gen-subset", "test", "--out", str(directory / "result.json")]
    evaluate += _chosen(passed, _EVALUATION_FLAGS)
    return StageSpec(
        stage,
        directory,
        _module("fairseq_cli.train", *train, *_log_flags(passed), *_words(passed)),
        _module("fairseq_alma.evaluate", *evaluate),
        _directory(request, stage.index - 1) if stage.index else None,
    )


def _growth(request: Request, steps: int, experts: int | None) -> list[int]:
    """Experts added before each stage but the first."""
    if request.learner != "gmoe":
        for flag in ("grow_experts", "grow_router", "grow_optimizer"):
            if getattr(request, flag) is not None:
                raise UserError(
                    f"--{flag.replace('_', '-')} is of --learner gmoe: {request.learner} does not grow"
                )
        return []
    text = request.grow_experts or "2"
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", text):
        raise UserError(f"--grow-experts {text}: give a number, or one for each growth, such as 2 or 2,2,4")
    numbers = [int(number) for number in text.split(",")]
    growth = numbers * steps if len(numbers) == 1 else numbers
    if len(growth) != steps:
        raise UserError(
            f"--grow-experts {text}: {len(numbers)} growths given, but {steps + 1} stages grow {steps} times"
        )
    now = experts or 0
    for step, more in enumerate(growth, start=1):
        if more > now:
            raise UserError(
                f"--grow-experts {text}: growth {step} adds {more} to {now} experts: at most double them"
            )
        now += more
    return growth


def _grow_modes(request: Request) -> tuple[str, str]:
    return request.grow_router or "preserve", request.grow_optimizer or "reset"


def _grow_flags(request: Request, more: int) -> list[str]:
    router, optimizer = _grow_modes(request)
    return ["--grow-experts", str(more), "--grow-router", router, "--grow-optimizer", optimizer]


def _log_flags(passed: Flags) -> list[str]:
    """fairseq's log as `slurm.progress` reads it, a line for every 5% of a stage or more often."""
    interval = min(100, max(1, (_number(passed, "--max-update") or 2000) // 20))
    wanted = {"--log-format": "json", "--log-interval": interval}
    return [word for flag, value in wanted.items() if flag not in passed for word in _flag(flag, value)]


def _directory(request: Request, index: int) -> Path:
    return request.out / f"stage_{index:02d}"


def _module(name: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-m", name, *arguments)


def _flag(name: str, value: object | None) -> list[str]:
    return [] if value is None else [name, str(value)]


def _chosen(flags: Flags, names: Sequence[str]) -> list[str]:
    return [word for name in names for word in flags.get(name, ())]


def _words(flags: Flags) -> list[str]:
    return [word for words in flags.values() for word in words]


def _value(flags: Flags, name: str) -> str | None:
    """The value of a flag given as `--name value` or `--name=value`; the last one counts, as in fairseq."""
    return flags[name][-1].removeprefix(f"{name}=") if name in flags else None


def _number(flags: Flags, name: str) -> int | None:
    text = _value(flags, name)
    if text is not None and not text.isdecimal():
        raise UserError(f"{name} needs a whole number")
    return None if text is None else int(text)
