"""Plan of a run: a request and the number of mega-batches give one `StageSpec` for each stage.

Pure functions: nothing is run, read or written. The plan is plain data, the same for every place to run it.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from alma.errors import UserError
from alma.learners import DEFAULT_GROWTH
from alma.options import flag_words, recorded
from alma.stages import Stage, stages
from slurm.lm.checks import CUT_FLAGS, ENCODER
from slurm.lm.settings import Flags, FlagValues, Request

COOLDOWN = "cooldown"
"""Folder of a cool-down, in that of its training."""
SEED_STEP = 1000  # between members of an ensemble; the first has the seed of sm
_EVALUATE = (sys.executable, "-m", "fairseq_alma.evaluate")
_SET_HERE = ("--arch", "--moe-expert-count", "--tensorboard-logdir")
_OF_OTHER_SCHEDULERS = ("--warmup-init-lr", "--lr-shrink")  # which polynomial_decay lacks
_EVALUATION_FLAGS: tuple[str, ...] = ("--user-dir", "--cpu", "--fp16", "--bf16", "--num-workers")
_EVALUATION_FLAGS += ("--max-tokens", "--batch-size", "--required-batch-size-multiple", "--tokens-per-sample")
_EVALUATION_FLAGS += ("--sample-break-mode", "--add-bos-token", *CUT_FLAGS)


@dataclass(frozen=True)
class Training:
    """One fairseq-train: a stage of a model, or of one member of an ensemble."""

    directory: Path
    arguments: tuple[str, ...]
    """Of fairseq-train, but for --finetune-from-model: the best checkpoint of `previous` is not known yet."""
    previous: Path | None
    """Directory of the training whose model it continues; None: a new model."""
    title: str
    updates: int | None
    """Of this training; None: no limit."""
    earlier: int = 0
    """Updates before it that fairseq-train counts too (one schedule)."""
    cools: bool = False
    """Whether it is a cool-down, from the end of the same stage."""
    source: Path | None = None
    """Directory of the same training in another run, whose checkpoints it takes over; None: it trains."""

    @property
    def command(self) -> tuple[str, ...]:
        return (sys.executable, "-m", "fairseq_cli.train", *self.arguments)


@dataclass(frozen=True)
class StageSpec:
    """One stage: its trainings, then the evaluation."""

    stage: Stage
    directory: Path
    trainings: tuple[Training, ...]
    models: tuple[Path, ...]
    """Directories of the trainings whose models are evaluated, together if there are several."""
    evaluate: tuple[str, ...]
    """Command line without --path, which `Training.arguments` explains."""
    title: str
    settings: FlagValues
    """Of its trainings: those of the request, with the stage's own experts, members and updates."""


@dataclass(frozen=True)
class Plan:
    """A run: the evaluation of the untrained model, then the stages in order."""

    request: Request
    config: dict[str, Any]
    seeds: dict[str, int]
    """Of the members, for alma.records."""
    untrained: tuple[str, ...]
    """Command line that evaluates the untrained model."""
    stages: tuple[StageSpec, ...]

    @property
    def out(self) -> Path:
        return self.request.out

    @property
    def stream(self) -> str:
        return self.request.stream


def make_plan(request: Request, megabatches: int) -> Plan:
    """Plan a run, whose settings `check` has accepted, on B = `megabatches`. Raises UserError for growths."""
    replay_from = request.replay_from if request.replay_share else None
    schedule = stages(megabatches, request.waiting_time, request.replay, replay_from)
    experts = request.settings.get("--moe-expert-count")  # of the first stage; None: a dense model
    growth = _growth(request, len(schedule) - 1, experts)
    router, optimizer = _grow_modes(request)
    specs = []
    for stage in schedule[: request.stages]:
        count = None if experts is None else experts + sum(growth[: stage.index])
        grown = []
        if growth and stage.index and not request.from_scratch:
            grown = ["--grow-experts", str(growth[stage.index - 1])]
            grown += ["--grow-router", router, "--grow-optimizer", optimizer]
        specs.append(_spec(request, stage, grown, count))
    first = [training for training in specs[0].trainings if not training.cools]
    seeds = [_seed(request, 0, member) for member in range(len(first))]
    untrained = [*_EVALUATE, "--untrained", "--seeds", ",".join(map(str, seeds)), "--valid"]
    untrained += [*_context(request), "--out", str(request.out / "untrained.json"), *first[0].arguments]
    return Plan(
        request,
        _config(request, megabatches, growth),
        {f"member_{k}": seed for k, seed in enumerate(seeds)} if len(seeds) > 1 else {},
        (*untrained, *_tensorboard(request, 0)),
        tuple(specs),
    )


def _config(request: Request, megabatches: int, growth: list[int]) -> dict[str, Any]:
    """Every setting that changes results; defaults only where they always apply."""
    if request.learner_spec.members is not None:
        request = replace(request, members=request.models)
    if request.learner_spec.growth:
        router, optimizer = _grow_modes(request)
        request = replace(request, grow_experts=growth, grow_router=router, grow_optimizer=optimizer)
    config = {"learner": request.learner, "megabatches": megabatches, **recorded(request)}
    config["arch"] = request.arch
    config["moe_expert_count"] = request.settings.get("--moe-expert-count")
    config["fairseq_flags"] = list(chain(*_passed(request.flags).values()))
    if request.placement and request.placement.by_machine:
        config["tokens_per_update"] = request.placement.tokens
    return config


def _spec(request: Request, stage: Stage, grown: list[str], experts: int | None) -> StageSpec:
    directory = request.out / f"stage_{stage.index:02d}"
    members = range(request.models if request.learner_spec.separate else 1)
    deployed = request.learner_spec.deployed
    oldest = 0 if deployed is None else max(0, stage.index + 1 - deployed)
    models = [request.directory(k, member) for k in range(oldest, stage.index + 1) for member in members]
    evaluate = [*_EVALUATE, request.stream, "--task", "alma_lm", "--gen-subset", "test", "--valid"]
    evaluate += ["--stage", str(stage.index), "--waiting-time", str(request.waiting_time)]
    evaluate += ["--out", str(directory / "result.json"), *_context(request)]
    if request.average:
        weights = request.average if request.averaged_checkpoints else "average"
        evaluate += ["--weights", str(weights)]
    evaluate += [*request.chosen(_EVALUATION_FLAGS), *request.flags.get(ENCODER, ())]
    evaluate += _tensorboard(request, stage.index)
    jointly = request.models if request.learner_spec.joint else None  # members of one fairseq-train
    own = {"--moe-expert-count": experts, "--members": jointly or 1, "--max-update": request.updates}
    sizes = ["--arch", request.arch, *flag_words("--moe-expert-count", experts)]
    sizes += flag_words("--members", jointly)
    trainings = [_training(request, stage, member, [*sizes, *grown]) for member in members]
    if request.cooldown:
        trainings += [_cooldown(request, stage, member, sizes) for member in members]
        models = [training.directory for training in trainings if training.cools]
    settings = {**request.settings, **own}
    return StageSpec(
        stage, directory, tuple(trainings), tuple(models), tuple(evaluate), _title(stage), settings
    )


def _training(request: Request, stage: Stage, member: int, sizes: list[str]) -> Training:
    directory = request.directory(stage.index, member)
    new = not stage.index or request.renews
    return Training(
        directory,
        (
            *_stage_words(request, stage, member, directory, sizes),
            *_tensorboard(request, stage.index, member),
            *chain(*_multiplied(request, stage.index).values()),
        ),
        None if new else request.directory(stage.index - 1, member),
        _title(stage) + _of(request, member),
        request.updates or None,
        request.updates * stage.index if request.one_schedule else 0,
    )


def _cooldown(request: Request, stage: Stage, member: int, sizes: list[str]) -> Training:
    """Linear decay of the learning rate to 0 from the end of a stage; the next stage does not see it."""
    trunk = request.directory(stage.index, member)
    done = request.updates * (stage.index + 1)
    updates = max(1, round(request.cooldown * request.updates))
    rate, warmup = request.settings["--lr"][0], request.settings["--warmup-updates"]
    if done < warmup:
        rate *= done / warmup
    elif request.schedule == "rsqrt":  # as fairseq's inverse_sqrt
        rate *= math.sqrt(warmup / done)
    decay = {"--lr-scheduler": "polynomial_decay", "--lr": rate, "--warmup-updates": done}
    decay |= {"--max-update": done + updates, "--total-num-update": done + updates}
    flags = _placed(request) | {name: flag_words(name, value) for name, value in decay.items()}
    for name in _OF_OTHER_SCHEDULERS:
        flags.pop(name, None)
    return Training(
        trunk / COOLDOWN,
        (*_stage_words(request, stage, member, trunk / COOLDOWN, sizes), *chain(*flags.values())),
        trunk,
        f"{_title(stage)}{_of(request, member)}, cool-down",
        updates,
        done,
        cools=True,
    )


def _stage_words(
    request: Request, stage: Stage, member: int, directory: Path, sizes: list[str]
) -> tuple[str, ...]:
    """Words of fairseq-train that a stage and its cool-down share."""
    words = [request.stream, "--task", "alma_lm", *sizes, "--stage", str(stage.index)]
    words += ["--seed", str(_seed(request, stage.index, member)), "--save-dir", str(directory)]
    return (*words, *request.option_words(stage.index), *request.average_words, *_log_flags(request))


def _of(request: Request, member: int) -> str:
    return f", member {member + 1} of {request.models}" if request.learner_spec.separate else ""


def _title(stage: Stage) -> str:
    arrived = f"{stage.first}-{stage.last}" if stage.last > stage.first else str(stage.last)
    return f"stage {stage.index} (mega-batch {arrived})"


def _seed(request: Request, index: int, member: int) -> int:
    models_before = index * request.models if request.learner_spec.fresh else 0
    return request.seed + SEED_STEP * (models_before + member)


def _growth(request: Request, steps: int, experts: int | None) -> list[int]:
    if not request.learner_spec.growth:
        return []
    numbers = request.grow_experts or [DEFAULT_GROWTH]
    text = f"--grow-experts {','.join(map(str, numbers))}"
    growth = numbers * steps if len(numbers) == 1 else numbers
    if len(growth) != steps:
        raise UserError(f"{text}: {len(numbers)} growths given, but {steps + 1} stages grow {steps} times")
    now = experts or 0
    for step, more in enumerate(growth, start=1):
        if more > now:
            raise UserError(f"{text}: growth {step} adds {more} to {now} experts: at most double them")
        now += more
    return growth


def _grow_modes(request: Request) -> tuple[str, str]:
    kept = "copy" if request.one_schedule else "reset"
    return request.grow_router or "preserve", request.grow_optimizer or kept


def _multiplied(request: Request, index: int) -> Flags:
    """The flags to pass on to stage `index`: --max-update and --total-num-update times --update-multiplier.

    Without --total-num-update the learning-rate schedule has the length of the training. With one schedule
    for all stages, --max-update includes the updates of earlier stages.
    """
    flags = _placed(request)
    counted = index + 1 if request.one_schedule else 1
    if request.update_multiplier * counted > 1 and request.updates:
        flags["--max-update"] = flag_words("--max-update", request.updates * counted)
    if request.one_schedule and "--warmup-updates" not in flags:  # else it would grow with --max-update
        flags["--warmup-updates"] = request.chosen(["--warmup-updates"])
    if request.update_multiplier > 1 and "--total-num-update" in flags:
        total = int(request.settings["--total-num-update"]) * request.update_multiplier
        flags["--total-num-update"] = flag_words("--total-num-update", total)
    return flags


def _placed(request: Request) -> dict[str, Sequence[str]]:
    """The flags to pass on, with those of the placement in place of the user's.

    fairseq-train compares --expect-tokens with the tokens that it trains on.
    """
    flags = dict(_passed(request.flags))
    if request.placement:
        flags |= {name: request.chosen([name]) for name in ("--distributed-world-size", "--update-freq")}
        flags["--expect-tokens"] = flag_words("--expect-tokens", request.placement.tokens)
    return flags


def _passed(flags: Flags) -> Flags:
    """The flags without those that the plan sets for each stage."""
    return {name: words for name, words in flags.items() if name not in _SET_HERE}


def _log_flags(request: Request) -> list[str]:
    """Log format for `slurm.lm.progress`, with a line for every 5% of a stage or more often."""
    interval = min(100, max(1, (request.updates or 2000) // 20))
    wanted = {"--log-format": "json", "--log-interval": str(interval)}
    return [word for pair in wanted.items() if pair[0] not in request.flags for word in pair]


def _tensorboard(request: Request, index: int, member: int | None = None) -> list[str]:
    """TensorBoard folder of a model, the same in all its stages; without `member`, of evaluations."""
    folder = request.settings.get("--tensorboard-logdir")
    if not folder:
        return []
    stage = [f"stage_{index:02d}"] if request.renews else []
    separate = member is not None and request.learner_spec.separate
    path = Path(folder, request.out.name, *stage, *([f"member_{member}"] if separate else []))
    return flag_words("--tensorboard-logdir", path)


def _context(request: Request) -> list[str]:
    return flag_words("--context-window", request.context_window or None)
