"""Plan of a run: a request and the number of mega-batches give one `StageSpec` for each stage.

Pure functions: nothing is run, read or written. The plan is plain data, the same for every place to
run it.
"""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

from alma import averages
from alma.epochs import warmup_of
from alma.learners import DEFAULT_GROWTH, LEARNERS, LearnerSpec
from alma.options import changed, check_ranges, flag_of, flag_words, options_of, recorded
from alma.stages import Stage, stage_folder, stages
from slurm.lm.engines import program_of
from slurm.lm.epochs import Length, length_in_blocks, length_of
from slurm.lm.growth import growth_of_steps
from slurm.lm.planned import StageSpec, Training, by_program
from slurm.lm.run_options import ENCODER, EVALUATION_FLAGS, Flags, FlagValues, Placement, RunOptions

SEED_STEP = 1000  # difference of seeds between members of an ensemble; the first has sm's seed
_EVALUATE = (sys.executable, "-m", "fairseq_alma.evaluate")
_SET_HERE = ("--arch", "--moe-expert-count", "--tensorboard-logdir")
_OF_GROWTH = ("grow_router", "grow_optimizer")  # passed only to a stage that grows
_OF_REPLAY = ("replay_share", "replay_from")  # passed to all stages but the first
_LOG_EVERY = 100  # most updates between two lines of the log, from which progress is shown
_LINES_OF_A_STAGE = 20
_UNKNOWN_UPDATES = 2000  # assumed length of a stage without a limit, for its logging interval


@dataclass(frozen=True, kw_only=True)
class Request(RunOptions):
    """A run as requested: its options, and the flags of fairseq-train with their values."""

    flags: Flags = field(default_factory=dict)  # of fairseq-train
    settings: FlagValues = field(default_factory=dict)  # values of all flags, from `resolved`
    placement: Placement | None = None  # from `place`; None: not placed yet
    sizes: Sequence[int] = ()  # tokens of each mega-batch, for --max-epoch; (): unknown

    def __post_init__(self) -> None:
        check_ranges(self)

    @property
    def learner_spec(self) -> LearnerSpec:
        return LEARNERS[self.learner]

    @property
    def updates(self) -> int:
        """Updates of a stage; 0: no limit, or that of --max-epoch (see `lengths`)."""
        return self.settings["--max-update"] * self.update_multiplier

    def lengths(self, schedule: Sequence[Stage]) -> list[Length]:
        """Lengths of the trainings of each stage."""
        if self.updates or not self.settings.get("--max-epoch"):
            return [Length(self.updates or None)] * len(schedule)
        of_stage = length_in_blocks if self.engine else length_of
        lengths = []
        for stage in schedule:
            length = of_stage(self.settings, self.sizes, stage, self.replay, self.replay_share)
            lengths.append(length)
        return lengths

    @property
    def by_fairseq(self) -> bool:
        """Whether fairseq trains and evaluates, not a program of `engines`."""
        return not (self.engine or self.trainer)

    @property
    def program(self) -> tuple[str, ...] | None:
        """What trains and evaluates in place of fairseq."""
        return None if self.by_fairseq else program_of(self, self.flags, self.settings)

    @property
    def one_schedule(self) -> bool:
        """Whether one schedule spans all stages (--schedule continuous)."""
        return self.schedule != "stage"

    @property
    def renews(self) -> bool:
        """Whether each stage trains new models."""
        return self.from_scratch or self.learner_spec.fresh

    @property
    def models_of_stage(self) -> int:
        """Models that a stage trains, together or apart."""
        return self.members or self.new_members or 1

    @property
    def separate(self) -> bool:
        """Whether a stage trains its models apart, in folders member_0, member_1, ..."""
        return self.learner_spec.separate or (self.learner_spec.fresh and self.models_of_stage > 1)

    @property
    def command(self) -> str:
        """The shell command that requests this single run: changed options and all flags."""
        options = changed(self)
        words = ["alma", "train", options.pop("stream")]
        for name, value in options.items():
            words += flag_words(flag_of(name), value)
        if self.flags:
            words += ["--", *chain(*self.flags.values())]
        return shlex.join(words)

    def chosen(self, names: Sequence[str]) -> list[str]:
        """The words of flags of fairseq-train, by their values in `settings`."""
        return [word for name in names for word in flag_words(name, self.settings.get(name))]


@dataclass(frozen=True)
class Plan:
    """A run: the evaluation of the untrained model, then the stages in order."""

    request: Request
    config: dict[str, Any]
    seeds: dict[str, int]  # seeds of the members, recorded in run.json
    untrained: tuple[str, ...]  # command line that evaluates the untrained model
    stages: tuple[StageSpec, ...]
    tests_only: bool = False  # whether to test what is trained, and train nothing (`alma test`)

    @property
    def out(self) -> Path:
        return self.request.out


def make_plan(request: Request, megabatches: int) -> Plan:
    """Plan a run on B = `megabatches`; `slurm.lm.checks.check` has accepted its settings.

    UserError: --grow-experts does not fit the number of stages or of experts.
    """
    replay_from = request.replay_from if request.replay_share else None
    schedule = stages(megabatches, request.waiting_time, request.replay, replay_from)
    complete = _with_defaults_of_learner(request, len(schedule))
    user_flags = {name: words for name, words in request.flags.items() if name not in _SET_HERE}
    config = _config(complete, megabatches, user_flags)
    flags = {**user_flags, **_placement_flags(request)}
    lengths = complete.lengths(schedule)
    specs = [_stage(complete, stage, flags, lengths) for stage in schedule[: request.stages]]
    first_trainings = specs[0].trainings
    seeds = [request.seed + SEED_STEP * member for member in range(len(first_trainings))]
    untrained = _untrained(request, seeds, first_trainings[0].arguments)
    seed_of_member: dict[str, int] = {}
    if len(seeds) > 1:
        seed_of_member = {f"member_{member}": seed for member, seed in enumerate(seeds)}
    return Plan(request, config, seed_of_member, untrained, tuple(specs))


def _with_defaults_of_learner(request: Request, stage_count: int) -> Request:
    """The request with a value for each option of its learner. UserError: impossible growth."""
    learner = request.learner_spec
    if learner.members is not None:
        request = replace(request, members=request.members or learner.members)
    if not learner.growth:
        return request
    router = "tree" if request.init else "preserve"
    optimizer = "copy" if request.one_schedule else "reset"
    return replace(
        request,
        grow_experts=growth_of_steps(
            request.grow_experts or [DEFAULT_GROWTH],
            request.settings.get("--moe-expert-count") or 0,
            stage_count,
        ),
        grow_router=request.grow_router or router,
        grow_optimizer=request.grow_optimizer or optimizer,
    )


def _config(request: Request, megabatches: int, user_flags: Flags) -> dict[str, Any]:
    """The configuration that run.json records."""
    config = {"learner": request.learner, "megabatches": megabatches, **recorded(request)}
    if request.engine:
        config["arch"] = request.settings["--arch"]
        config["transformers_flags"] = list(chain(*user_flags.values()))
    elif not request.trainer:
        config["arch"] = request.settings["--arch"]
        config["moe_expert_count"] = request.settings.get("--moe-expert-count")
        config["fairseq_flags"] = list(chain(*user_flags.values()))
    if request.init:
        config["init"] = Path(request.init).resolve().name
        config["init_sha256"] = request.settings["--init-sha256"]
    if request.placement and request.placement.by_machine:
        config["tokens_per_update"] = request.placement.tokens
    return config


def _placement_flags(request: Request) -> Flags:
    """Flags that replace the user's, so that an update keeps its batch on this machine."""
    if not request.placement:
        return {}
    flags = {}
    for name in ("--distributed-world-size", "--update-freq"):
        flags[name] = flag_words(name, request.settings[name])
    # In the training, `fairseq_alma.hooks` compares it with the tokens of its updates.
    flags["--expect-tokens"] = flag_words("--expect-tokens", request.placement.tokens)
    return flags


def _untrained(request: Request, seeds: Sequence[int], arguments: Sequence[str]) -> tuple[str, ...]:
    """Command line that evaluates the untrained model; `arguments`: of the first training."""
    if request.program:
        return by_program(request.program, request.out, "untrained")
    words = [*_EVALUATE, "--untrained", "--seeds", ",".join(map(str, seeds)), "--valid"]
    if request.context_window:
        words += ["--context-window", str(request.context_window)]
    words += ["--out", str(request.out / "untrained.json"), *arguments]
    return (*words, *_tensorboard(request, 0))


def _stage(request: Request, stage: Stage, flags: Flags, lengths: Sequence[Length]) -> StageSpec:
    """Plan one stage.

    request: has a value for each option of its learner. flags: flags of fairseq-train that all
    stages share. lengths: length of the training of each stage of the run.
    """
    learner = request.learner_spec
    index = stage.index
    directory = _folder(request, index)
    members = request.members or 1
    experts = _expert_count(request, index)
    trainings = _trainings(request, index, experts, flags, lengths)

    first_deployed = 0
    if learner.deployed is not None:
        first_deployed = max(0, index + 1 - learner.deployed)
    models = [
        _folder(request, deployed_stage, training.member)
        for deployed_stage in range(first_deployed, index + 1)
        for training in trainings
    ]
    values = {
        "--moe-expert-count": experts,
        "--members": members if learner.joint else 1,
        "--max-update": lengths[index].updates or 0,
    }
    return StageSpec(
        stage=stage,
        directory=directory,
        trainings=tuple(trainings),
        models=tuple(models),
        evaluate=_evaluation(request, index, directory / "result.json"),
        settings={**request.settings, **values},
    )


def _trainings(
    request: Request, index: int, experts: int | None, flags: Flags, lengths: Sequence[Length]
) -> list[Training]:
    """The trainings of a stage: one, or one for each member that is trained by itself."""
    learner = request.learner_spec
    members = request.models_of_stage
    model_words = _model_words(request, index, experts)
    stage_words = _stage_words(request, index, flags, lengths[index].updates)
    flag_lists = _flags_of_stage(request, index, flags, lengths).values()
    earlier_updates = 0
    if request.one_schedule:
        earlier_updates = sum(length.updates or 0 for length in lengths[:index])

    trainings = []
    for member in range(members if request.separate else 1):
        seed = request.seed + SEED_STEP * member
        if learner.fresh:  # each stage trains new models, which join the ensemble
            seed += SEED_STEP * index * members
        directory = _folder(request, index, member)
        words = [*model_words, "--stage", str(index), "--seed", str(seed)]
        words += ["--save-dir", str(directory), *stage_words]
        words += [*_tensorboard(request, index, member), *chain(*flag_lists)]
        previous = None
        if index and not request.renews:
            previous = _folder(request, index - 1, member)
        training = Training(
            directory=directory,
            arguments=tuple(words),
            previous=previous,
            updates=lengths[index].updates,
            earlier=earlier_updates,
            tokens=lengths[index].tokens,
            seed=seed,
            member=member,
            program=request.program,
        )
        trainings.append(training)
    return trainings


def _folder(request: Request, index: int, member: int | None = None) -> Path:
    """The folder of a stage, or of one `member` in it if members are trained one by one."""
    folder = stage_folder(request.out, index)
    if member is None or not request.separate:
        return folder
    return folder / f"member_{member}"


def _growth_before(request: Request, index: int) -> list[int]:
    """Experts added by each growth up to this stage; [] for a learner that does not grow."""
    if not request.learner_spec.growth or not request.grow_experts:
        return []
    return request.grow_experts[:index]


def _expert_count(request: Request, index: int) -> int | None:
    """Experts in a stage; None: the model has none."""
    experts: int | None = request.settings.get("--moe-expert-count")
    growth = _growth_before(request, index)
    return (experts or 0) + sum(growth) if growth else experts


def _model_words(request: Request, index: int, experts: int | None) -> list[str]:
    """Words of fairseq-train about the data and the model of a stage."""
    words = [request.stream, "--task", "alma_lm", "--arch", request.settings["--arch"]]
    if experts is not None:
        words += ["--moe-expert-count", str(experts)]
    if request.learner_spec.joint:  # one fairseq-train trains all members
        words += ["--members", str(request.members or 1)]
    if request.program:
        words += request.program
    if request.budget is not None:
        words += ["--budget", request.budget]
    growth = _growth_before(request, index)
    if growth and not request.from_scratch:
        words += ["--grow-experts", str(growth[-1])]
        words += ["--grow-router", str(request.grow_router)]
        words += ["--grow-optimizer", str(request.grow_optimizer)]
    return words


def _stage_words(request: Request, index: int, flags: Flags, updates: int | None) -> list[str]:
    """Words of fairseq-train that the launcher adds to a stage: changed options, average, log."""
    words: list[str] = []
    for name, value in changed(request).items():
        is_passed = options_of(request)[name].metadata["passed"] and name not in _OF_GROWTH
        if is_passed and (index > 0 or name not in _OF_REPLAY):  # stage 0 has nothing to replay
            words += flag_words(flag_of(name), value)
    words += averages.training_flags(request.average)
    if request.settings.get("--init-sha256"):
        words += ["--init-sha256", request.settings["--init-sha256"]]
    interval = (updates or _UNKNOWN_UPDATES) // _LINES_OF_A_STAGE
    interval = min(_LOG_EVERY, max(1, interval))
    for name, text in {"--log-format": "json", "--log-interval": str(interval)}.items():
        if name not in flags:
            words += [name, text]
    return words


def _flags_of_stage(request: Request, index: int, flags: Flags, lengths: Sequence[Length]) -> Flags:
    """The user's flags with the updates, warm-up and decay of a stage.

    With one schedule over all stages, --max-update includes the updates of earlier stages.
    """
    changed_flags = dict(flags)
    counted_stages = index + 1 if request.one_schedule else 1
    if request.updates and request.update_multiplier * counted_stages > 1:
        updates = request.updates * counted_stages
        changed_flags["--max-update"] = flag_words("--max-update", updates)
    # Without the flag, the warm-up would grow with the updates of all stages.
    if request.one_schedule and "--warmup-updates" not in flags:
        warmup = request.settings["--warmup-updates"]
        if not request.updates and lengths[0].updates:
            warmup = warmup_of(lengths[0].updates)
        changed_flags["--warmup-updates"] = flag_words("--warmup-updates", warmup)
    if request.update_multiplier > 1 and "--total-num-update" in flags:
        total = int(request.settings["--total-num-update"]) * request.update_multiplier
        changed_flags["--total-num-update"] = flag_words("--total-num-update", total)
    return changed_flags


def _evaluation(request: Request, index: int, result: Path) -> tuple[str, ...]:
    """The command line that evaluates a stage, without --path."""
    if request.program:
        return by_program(request.program, result.parent, "evaluate")
    words = [*_EVALUATE, request.stream, "--task", "alma_lm", "--gen-subset", "test", "--valid"]
    words += ["--stage", str(index), "--waiting-time", str(request.waiting_time)]
    words += ["--out", str(result), "--item-losses", str(request.out)]
    if request.context_window:
        words += ["--context-window", str(request.context_window)]
    if averages.last_of(request.average):
        words += ["--weights", str(request.average)]
    elif request.average:
        words += ["--weights", "average"]
    words += [*request.chosen(EVALUATION_FLAGS), *request.flags.get(ENCODER, ())]
    return (*words, *_tensorboard(request, index))


def _tensorboard(request: Request, index: int, member: int | None = None) -> list[str]:
    """Words for the TensorBoard folder of a model over all its stages, or of evaluations (None)."""
    folder = request.settings.get("--tensorboard-logdir")
    if not folder:
        return []
    path = Path(folder, request.out.name)
    if request.renews:
        path = stage_folder(path, index)
    if member is not None and request.separate:
        path /= f"member_{member}"
    return flag_words("--tensorboard-logdir", path)
