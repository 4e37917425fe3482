"""What to run: a request and the number of mega-batches become one restartable `StageSpec` per stage.

Pure: nothing is run, read or written here. A cluster needs from this module only the specs, which are
plain data and independent of where they run.
"""

import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from alma.errors import UserError
from alma.stages import Stage, stages
from slurm.lm.flags import Flags, Settings, chosen, flag, words_of

LEARNERS = ("sm", "moe", "ens", "umix", "gens", "gmoe")
ROUTERS = ("preserve", "copy", "tree")
MEMBERS = 2  # of ens and umix, as in most rows of the paper's Table 2
SEED_STEP = 1000  # between the members of an ensemble; the first has the seed that sm would have
_OF_LEARNERS = {
    "members": ("ens", "umix"),
    "grow_experts": ("gmoe",),
    "grow_router": ("gmoe",),
    "grow_optimizer": ("gmoe",),
}
_CUT_FLAGS = ("--megabatch-words", "--megabatch-tokens", "--megabatch-seed")
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


@dataclass(frozen=True)
class Request:
    """What the user asked for. None: not given."""

    stream: str
    out: Path
    learner: str  # one of LEARNERS
    flags: Flags
    members: int | None = None
    waiting_time: int = 1
    replay: bool = False
    from_scratch: bool = False
    update_multiplier: int = 1
    seed: int = 0
    grow_experts: str | None = None
    grow_router: str | None = None
    grow_optimizer: str | None = None
    context_window: int = 0
    stages: int | None = None
    name: str | None = None
    settings: Settings = field(default_factory=dict)
    """What fairseq-train makes of `flags`; a plan needs it."""


@dataclass(frozen=True)
class Training:
    """One run of fairseq-train: a stage of a model, or of one member of an ensemble."""

    directory: Path
    command: tuple[str, ...]
    """Without --finetune-from-model: which checkpoint of `previous` is best, only its training tells."""
    previous: Path | None
    """Directory of the training that this one goes on from; None for a new model."""
    title: str


@dataclass(frozen=True)
class StageSpec:
    """One stage to run: all its pieces may be killed at any moment and simply run again."""

    stage: Stage
    directory: Path
    trainings: tuple[Training, ...]
    models: tuple[Path, ...]
    """Directories of the trainings whose models are evaluated, as one where there are several."""
    evaluate: tuple[str, ...]
    """Without --path, as `Training.command` is."""
    title: str
    settings: Settings
    """Of its trainings: the request's, with what this stage has of its own."""


@dataclass(frozen=True)
class Plan:
    """Everything to run, in this order: the untrained model's evaluation, then the stages."""

    out: Path
    config: dict[str, Any]  # for alma.records
    seeds: dict[str, int]  # of the members, for the same
    untrained: tuple[str, ...]
    stages: tuple[StageSpec, ...]
    max_update: int | None  # of each training; None: no limit


def make_plan(request: Request, megabatches: int) -> Plan:
    """The plan for a stream of B = `megabatches`. UserError: settings that contradict each other."""
    _check(request)
    schedule = stages(megabatches, request.waiting_time, request.replay)
    experts = request.settings.get("--moe-expert-count")  # of the first stage; None: a dense model
    growth = _growth(request, len(schedule) - 1, experts)
    specs = []
    for stage in schedule[: request.stages]:
        count = None if experts is None else experts + sum(growth[: stage.index])
        sizes = ["--arch", _arch(request), *flag("--moe-expert-count", count)]
        sizes += flag("--members", _jointly(request))
        if growth and stage.index and not request.from_scratch:
            sizes += _grow_flags(request, growth[stage.index - 1])
        specs.append(_spec(request, stage, sizes, count))
    first = specs[0].trainings
    seeds = [_seed(request, k) for k in range(len(first))]
    untrained = _module("fairseq_alma.evaluate", "--untrained", "--seeds", ",".join(map(str, seeds)))
    untrained += ("--valid", *_context(request), "--out", str(request.out / "untrained.json"))
    return Plan(
        request.out,
        _config(request, megabatches, growth),
        {f"member_{k}": seed for k, seed in enumerate(seeds)} if len(seeds) > 1 else {},
        (*untrained, *first[0].command[3:]),
        tuple(specs),
        _updates(request) or None,
    )


def reshard_command(request: Request) -> list[str]:
    """What tells into how many mega-batches the flags cut an ordinary fairseq-preprocess directory."""
    if not (request.settings["--megabatch-words"] or request.settings["--megabatch-tokens"]):
        raise UserError(
            f"{request.stream}: no finished stream here; make one with `python -m data_prep`, or cut a "
            f"fairseq-preprocess directory with --megabatch-words N after the `--`"
        )
    return list(_module("fairseq_alma.reshard", request.stream, *chosen(request.settings, _CUT_FLAGS)))


def _check(request: Request) -> None:
    """UserError for settings that do not go with the learner or with each other."""
    for setting, learners in _OF_LEARNERS.items():
        if getattr(request, setting) is not None and request.learner not in learners:
            raise UserError(
                f"--{setting.replace('_', '-')} is of --learner {' or '.join(learners)}, "
                f"not of {request.learner}: leave it out"
            )
    for setting, least in (("members", 1), ("update_multiplier", 1), ("context_window", 0), ("stages", 1)):
        given = getattr(request, setting)
        if given is not None and given < least:
            raise UserError(f"--{setting.replace('_', '-')} {given}: give {least} or more")
    if request.from_scratch and request.learner == "gens":
        raise UserError("--from-scratch: every member of gens is new in its stage; leave it out")
    if request.learner in ("umix", "moe", "gmoe") and not _arch(request).startswith("switch_"):
        raise UserError(f"--arch {_arch(request)}: {request.learner} is made of experts: --arch switch_gmoe")
    if request.update_multiplier > 1 and not request.settings["--max-update"]:
        raise UserError("--update-multiplier multiplies --max-update: give that after the `--`")


def _config(request: Request, megabatches: int, growth: list[int]) -> dict[str, Any]:
    """Every setting that changes results; those that were left as they are only where they always count."""
    config: dict[str, Any] = {
        "learner": request.learner,
        "megabatches": megabatches,
        "waiting_time": request.waiting_time,
        "replay": request.replay,
        "seed": request.seed,
        "arch": _arch(request),
        "moe_expert_count": request.settings.get("--moe-expert-count"),
        "fairseq_flags": words_of(_passed(request.flags)),
    }
    if request.learner in _OF_LEARNERS["members"]:
        config["members"] = _members(request)
    if request.learner == "gmoe":
        router, optimizer = _grow_modes(request)
        config |= {"grow_experts": growth, "grow_router": router, "grow_optimizer": optimizer}
    if request.update_multiplier > 1:
        config["update_multiplier"] = request.update_multiplier
    for setting in ("from_scratch", "context_window", "name"):
        if getattr(request, setting):
            config[setting] = getattr(request, setting)
    return config


def _spec(request: Request, stage: Stage, sizes: list[str], experts: int | None) -> StageSpec:
    directory = _directory(request, stage.index)
    members = _members(request) if request.learner == "ens" else 1
    trainings = tuple(_training(request, stage, k, sizes) for k in range(members))
    models = tuple(training.directory for training in trainings)
    if request.learner == "gens":
        models = tuple(_directory(request, index) for index in range(stage.index + 1))
    evaluate = [request.stream, "--task", "alma_lm", "--gen-subset", "test", "--valid"]
    evaluate += ["--out", str(directory / "result.json"), *_context(request)]
    evaluate += chosen(request.settings, _EVALUATION_FLAGS)
    command = _module("fairseq_alma.evaluate", *evaluate)
    own = {"--moe-expert-count": experts, "--members": _jointly(request) or 1}
    own["--max-update"] = _updates(request)
    settings = {**request.settings, **own}
    return StageSpec(stage, directory, trainings, models, command, _title(stage), settings)


def _training(request: Request, stage: Stage, member: int, sizes: list[str]) -> Training:
    """Of member k of ens; of the only model of other learners, or the new one of gens."""
    inside = f"member_{member}" if request.learner == "ens" else ""
    directory = _directory(request, stage.index) / inside
    new = not stage.index or request.from_scratch or request.learner == "gens"
    seed = _seed(request, stage.index if request.learner == "gens" else member)
    train = [request.stream, "--task", "alma_lm", *sizes, "--stage", str(stage.index)]
    train += ["--waiting-time", str(request.waiting_time), *(["--replay"] if request.replay else [])]
    train += ["--seed", str(seed), "--save-dir", str(directory)]
    train += [*_log_flags(request), *words_of(_multiplied(request))]
    previous = None if new else _directory(request, stage.index - 1) / inside
    of = f", member {member + 1} of {_members(request)}" if request.learner == "ens" else ""
    return Training(directory, _module("fairseq_cli.train", *train), previous, _title(stage) + of)


def _title(stage: Stage) -> str:
    arrived = f"{stage.first}-{stage.last}" if stage.last > stage.first else str(stage.last)
    return f"stage {stage.index} (mega-batch {arrived})"


def _seed(request: Request, member: int) -> int:
    return request.seed + SEED_STEP * member


def _members(request: Request) -> int:
    """N of ens and umix."""
    return request.members or MEMBERS


def _jointly(request: Request) -> int | None:
    """N of umix, whose members are one model to fairseq-train."""
    return _members(request) if request.learner == "umix" else None


def _arch(request: Request) -> str:
    return request.settings["--arch"]


def _updates(request: Request) -> int:
    """Of a stage; 0: no limit."""
    return request.settings["--max-update"] * request.update_multiplier


def _growth(request: Request, steps: int, experts: int | None) -> list[int]:
    """Experts added before each stage but the first."""
    if request.learner != "gmoe":
        return []
    text = request.grow_experts or "2"
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", text):
        raise UserError(f"--grow-experts {text}: give a number, or one for each growth, such as 2 or 2,2,4")
    numbers = [int(each) for each in text.split(",")]
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


def _multiplied(request: Request) -> Flags:
    """The flags that are passed on, with --update-multiplier times the updates, and the schedule as long.

    Without --total-num-update the schedule is as long as the training.
    """
    flags = dict(_passed(request.flags))
    if request.update_multiplier > 1:
        flags["--max-update"] = flag("--max-update", _updates(request))
        if "--total-num-update" in flags:
            total = int(request.settings["--total-num-update"]) * request.update_multiplier
            flags["--total-num-update"] = flag("--total-num-update", total)
    return flags


def _passed(flags: Flags) -> Flags:
    """Without those that the launcher changes from stage to stage."""
    return {name: words for name, words in flags.items() if name not in ("--arch", "--moe-expert-count")}


def _log_flags(request: Request) -> list[str]:
    """fairseq's log as `slurm.lm.progress` reads it, a line for every 5% of a stage or more often."""
    interval = min(100, max(1, (_updates(request) or 2000) // 20))
    wanted = {"--log-format": "json", "--log-interval": interval}
    return [word for name, each in wanted.items() if name not in request.flags for word in flag(name, each)]


def _context(request: Request) -> list[str]:
    return flag("--context-window", request.context_window or None)


def _directory(request: Request, index: int) -> Path:
    return request.out / f"stage_{index:02d}"


def _module(name: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-m", name, *arguments)
