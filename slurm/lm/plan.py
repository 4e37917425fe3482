"""Plan of a run: a request and the number of mega-batches give one `StageSpec` for each stage.

Pure functions: nothing is run, read or written. The plan is plain data, the same for every place to run it.
"""

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

from alma import averages
from alma.batches import tokens_of
from alma.epochs import warmup_of
from alma.errors import UserError
from alma.learners import DEFAULT_GROWTH, LEARNERS, LearnerSpec
from alma.options import NEVER, changed, check_ranges, flag_of, flag_words, option, options_of, recorded
from alma.protocol import TextOptions
from alma.stages import Stage, stages
from alma.trainer import STAGE
from slurm.lm.epochs import Length, length_of

Flags = Mapping[str, Sequence[str]]  # the words of each flag of fairseq-train by its name, one of them
FlagValues = Mapping[str, Any]  # the value of every flag of fairseq-train by its first name
SEED_STEP = 1000  # between members of an ensemble; the first has the seed of sm
CUT_FLAGS = ("--megabatch-words", "--megabatch-tokens", "--megabatch-seed")
ENCODER = "--gpt2-encoder-json"  # its default is a URL, which nothing here reads
FOREIGN = {"train": "model", "evaluate": "evaluation", "untrained": "untrained"}
"""Folders in which a trainer of the user's does its jobs, by kind, in those of their markers."""
_EVALUATE = (sys.executable, "-m", "fairseq_alma.evaluate")
_SET_HERE = ("--arch", "--moe-expert-count", "--tensorboard-logdir")
_EVALUATION_FLAGS: tuple[str, ...] = ("--user-dir", "--cpu", "--fp16", "--bf16", "--num-workers")
_EVALUATION_FLAGS += ("--max-tokens", "--batch-size", "--required-batch-size-multiple", "--tokens-per-sample")
_EVALUATION_FLAGS += ("--sample-break-mode", *CUT_FLAGS)


def tokens_of_batch(settings: FlagValues) -> int | None:
    """Tokens of one forward pass in one process, in full sequences; None without a limit of a batch."""
    limits = ("--batch-size", "--max-tokens", "--tokens-per-sample", "--required-batch-size-multiple")
    return tokens_of(1, *(settings[name] for name in limits))


@dataclass(frozen=True)
class Placement:
    """What each training of a run gets of its machine."""

    processes: int
    gpus: int  # of all processes; 0: a CPU
    tokens: int | None  # of an update, in full batches; None: unknown
    by_machine: bool  # whether the number of GPUs, and no flag, determines `tokens`


@dataclass(frozen=True, kw_only=True)
class Request(TextOptions):
    """What a command line, or an experiment, requests of the launcher: the options of a run."""

    stream: str = option(None, "stream that the experiments train on", metavar="STREAM", record=NEVER)
    out: Path = option(
        None, "run directory (default of an experiment: runs/FOLDER/NAME)", metavar="RUN", record=NEVER
    )
    stages: int | None = option(
        None, "train N stages, then stop; a larger N goes on (default: all)", at_least=1, record=NEVER
    )
    evaluate: str | None = option(
        None,
        "also score each stage with your own program: its last arguments are the paths of the deployed "
        "checkpoints, its last line of output is a JSON object of numbers (docs/concepts.md); "
        "'timeout 1h ...' ends one that hangs",
        metavar="COMMAND",
        record=NEVER,
    )
    flags: Flags = field(default_factory=dict)  # of fairseq-train
    settings: FlagValues = field(default_factory=dict)  # its values for `flags`; required by `make_plan`
    placement: Placement | None = None  # from `place`; None: not decided
    sizes: Sequence[int] = ()  # tokens of each mega-batch, for --max-epoch; (): unknown

    def __post_init__(self) -> None:
        check_ranges(self)

    @property
    def learner_spec(self) -> LearnerSpec:
        return LEARNERS[self.learner]

    @property
    def updates(self) -> int:
        """Of a stage; 0: no limit, or that of --max-epoch (see `lengths`)."""
        return self.settings["--max-update"] * self.update_multiplier

    def lengths(self, schedule: Sequence[Stage]) -> list[Length]:
        """Lengths of the trainings of each stage."""
        if self.updates or not self.settings.get("--max-epoch"):
            return [Length(self.updates or None)] * len(schedule)
        share = self.replay_share
        return [length_of(self.settings, self.sizes, stage, self.replay, share) for stage in schedule]

    @property
    def one_schedule(self) -> bool:
        """Whether one schedule spans all stages: optimizer and learning rate go on."""
        return self.schedule != "stage"

    @property
    def renews(self) -> bool:
        """Whether each stage trains new models."""
        return self.from_scratch or self.learner_spec.fresh

    @property
    def average_words(self) -> list[str]:
        """Flags of fairseq-train that keep what --average needs."""
        if kept := averages.last_of(self.average):
            return ["--keep-interval-updates", str(kept)]
        if not self.average:
            return []
        kind = "--ema-decay" if averages.eta_of(self.average) is None else "--ema-poly"
        return ["--store-ema", kind, str(self.average).removeprefix("poly:")]

    @property
    def command(self) -> str:
        """The shell line that requests this run alone: options that are not the default, and all flags."""
        given = changed(self)
        words = ["alma", "train", given.pop("stream")]
        words += [word for name, value in given.items() for word in flag_words(flag_of(name), value)]
        return shlex.join([*words, *(["--", *chain(*self.flags.values())] if self.flags else [])])

    def chosen(self, names: Sequence[str]) -> list[str]:
        """The words of flags of fairseq-train, by their values in `settings`."""
        return [word for name in names for word in flag_words(name, self.settings.get(name))]


@dataclass(frozen=True)
class Training:
    """One fairseq-train: a stage of a model, or of one member of an ensemble."""

    directory: Path
    arguments: tuple[str, ...]
    """Of fairseq-train but --finetune-from-model: the best checkpoint is unknown until `previous` ends."""
    previous: Path | None  # directory of the training whose model it continues; None: a new model
    updates: int | None  # of this training; None: no limit
    earlier: int = 0  # updates before it that fairseq-train counts too (one schedule)
    tokens: int | None = None  # of its epochs; None: follows from the updates
    source: Path | None = None
    """Directory of the same training in another run, whose checkpoints it takes over; None: it trains."""
    seed: int = 0
    member: int = 0
    trainer: str | None = None  # the user's command; `arguments` then only tell trainings apart

    @property
    def command(self) -> tuple[str, ...]:
        if self.trainer:
            return by_trainer(self.trainer, self.directory, "train")
        return (sys.executable, "-m", "fairseq_cli.train", *self.arguments)


@dataclass(frozen=True)
class StageSpec:
    """One stage: its trainings, then the evaluation."""

    stage: Stage
    directory: Path
    trainings: tuple[Training, ...]
    models: tuple[Path, ...]  # directories of the trainings whose models are evaluated together
    evaluate: tuple[str, ...]  # without --path: the best checkpoints are unknown until the trainings end
    settings: FlagValues  # of its trainings: the request's, with the stage's own experts, members and updates


@dataclass(frozen=True)
class Plan:
    """A run: the evaluation of the untrained model, then the stages in order."""

    request: Request
    config: dict[str, Any]
    seeds: dict[str, int]  # of the members, for alma.records
    untrained: tuple[str, ...]  # command line that evaluates the untrained model
    stages: tuple[StageSpec, ...]

    @property
    def out(self) -> Path:
        return self.request.out


def by_trainer(trainer: str, directory: Path, kind: str) -> tuple[str, ...]:
    """The command of a job that the user's own trainer does."""
    return (*shlex.split(trainer), str((directory / FOREIGN[kind]).resolve() / STAGE))


def make_plan(request: Request, megabatches: int) -> Plan:
    """Plan a run, whose settings `check` has accepted, on B = `megabatches`. Raises UserError for growths."""
    learner = LEARNERS[request.learner]
    replay_from = request.replay_from if request.replay_share else None
    schedule = stages(megabatches, request.waiting_time, request.replay, replay_from)
    whole = request  # with a value for each option of its learner
    if learner.members is not None:
        whole = replace(whole, members=request.members or learner.members)
    if learner.growth:
        growth, steps = request.grow_experts or [DEFAULT_GROWTH], len(schedule) - 1
        text = f"--grow-experts {','.join(map(str, growth))}"
        if len(growth) not in (1, steps):
            given = f"{len(growth)} growths given"
            raise UserError(f"{text}: {given}, but {steps + 1} stages grow {steps} times")
        growth = growth * steps if len(growth) == 1 else growth
        now = request.settings.get("--moe-expert-count") or 0
        for step, more in enumerate(growth, start=1):
            if more > now:
                raise UserError(f"{text}: growth {step} adds {more} to {now} experts: at most double them")
            now += more
        kept = "copy" if request.schedule != "stage" else "reset"
        router = request.grow_router or ("tree" if request.init else "preserve")
        optimizer = request.grow_optimizer or kept
        whole = replace(whole, grow_experts=growth, grow_router=router, grow_optimizer=optimizer)
    config = {"learner": request.learner, "megabatches": megabatches, **recorded(whole)}
    flags = {name: words for name, words in request.flags.items() if name not in _SET_HERE}
    if not request.trainer:
        config["arch"] = request.settings["--arch"]
        config["moe_expert_count"] = request.settings.get("--moe-expert-count")
        config["fairseq_flags"] = list(chain(*flags.values()))
    if request.init:
        config["init"] = Path(request.init).resolve().name
        config["init_sha256"] = request.settings["--init-sha256"]
    if request.placement:  # its values in place of the user's
        if request.placement.by_machine:
            config["tokens_per_update"] = request.placement.tokens
        for name in ("--distributed-world-size", "--update-freq"):
            flags[name] = flag_words(name, request.settings[name])
        # fairseq-train compares it with the tokens that it trains on.
        flags["--expect-tokens"] = flag_words("--expect-tokens", request.placement.tokens)
    board = _tensorboard(request, 0)  # of the untrained model
    lengths = whole.lengths(schedule)
    specs = tuple(_stage(whole, stage, flags, lengths) for stage in schedule[: request.stages])
    first = specs[0].trainings
    seeds = [request.seed + SEED_STEP * member for member in range(len(first))]
    untrained = [*_EVALUATE, "--untrained", "--seeds", ",".join(map(str, seeds)), "--valid"]
    untrained += flag_words("--context-window", request.context_window or None)
    untrained += ["--out", str(request.out / "untrained.json"), *first[0].arguments]
    untrained += board
    if request.trainer:
        untrained = list(by_trainer(request.trainer, request.out, "untrained"))
    members = {f"member_{k}": seed for k, seed in enumerate(seeds)} if len(seeds) > 1 else {}
    return Plan(request, config, members, tuple(untrained), specs)


def _stage(request: Request, stage: Stage, flags: Flags, lengths: Sequence[Length]) -> StageSpec:
    """A stage of a request with a value for each option; `flags`: the user's, for each stage alike;
    `lengths`: of the trainings of each stage."""
    index, learner, settings = stage.index, LEARNERS[request.learner], request.settings
    count, joint, separate = request.members or 1, learner.joint, learner.separate
    renews, one_schedule = request.renews, request.one_schedule
    updates = lengths[index].updates
    average = request.average_words
    out = request.out / f"stage_{index:02d}"

    experts: Any = settings.get("--moe-expert-count")
    grown: list[str] = []
    growth = request.grow_experts if learner.growth and index else None
    if growth:
        experts += sum(growth[:index])
        if not request.from_scratch:
            grown = ["--grow-experts", str(growth[index - 1]), "--grow-router", str(request.grow_router)]
            grown += ["--grow-optimizer", str(request.grow_optimizer)]
    sizes = ["--arch", settings["--arch"], *flag_words("--moe-expert-count", experts)]
    sizes += flag_words("--members", count if joint else None)  # of one fairseq-train
    here = [request.stream, "--task", "alma_lm", *sizes]
    here += [*flag_words("--trainer", request.trainer), *flag_words("--budget", request.budget)]
    shared = []
    for name, value in changed(request).items():
        replays = name.startswith("replay_")  # stage 0 has nothing to replay
        if options_of(request)[name].metadata["passed"] and name[:5] != "grow_" and (index or not replays):
            shared += flag_words(flag_of(name), value)
    shared += average + flag_words("--init-sha256", settings.get("--init-sha256") or None)
    # A line for every 5% of a stage or more often, for `slurm.lm.local.progress`.
    interval = min(100, max(1, (updates or 2000) // 20))
    for name, text in {"--log-format": "json", "--log-interval": str(interval)}.items():
        shared += [] if name in flags else [name, text]
    own = dict(flags)
    counted = index + 1 if one_schedule else 1
    if request.update_multiplier * counted > 1 and request.updates:
        own["--max-update"] = flag_words("--max-update", request.updates * counted)
    if one_schedule and "--warmup-updates" not in own:  # else it would grow with the updates of all stages
        warmup = settings["--warmup-updates"]
        if not request.updates and lengths[0].updates:
            warmup = warmup_of(lengths[0].updates)
        own["--warmup-updates"] = flag_words("--warmup-updates", warmup)
    if request.update_multiplier > 1 and "--total-num-update" in own:
        total = int(settings["--total-num-update"]) * request.update_multiplier
        own["--total-num-update"] = flag_words("--total-num-update", total)

    def folder(of_stage: int, member: int) -> Path:
        path = request.out / f"stage_{of_stage:02d}"
        return path / f"member_{member}" if separate else path

    members = range(count if separate else 1)
    trainings = []
    for member in members:
        seed = request.seed + SEED_STEP * (member + (index * count if learner.fresh else 0))
        directory = folder(index, member)
        words = [*here, *grown, "--stage", str(index), "--seed", str(seed), "--save-dir", str(directory)]
        words += [*shared, *_tensorboard(request, index, member)]
        words += chain(*own.values())
        previous = None if not index or renews else folder(index - 1, member)
        earlier = 0
        if one_schedule:
            earlier = sum(length.updates or 0 for length in lengths[:index])
        made = Training(directory, tuple(words), previous, updates, earlier, lengths[index].tokens)
        trainings.append(replace(made, seed=seed, member=member, trainer=request.trainer))
    oldest = 0 if learner.deployed is None else max(0, index + 1 - learner.deployed)
    models = [folder(k, member) for k in range(oldest, index + 1) for member in members]
    evaluate = _evaluation(request, index, out / "result.json")
    values = {"--moe-expert-count": experts, "--members": count if joint else 1, "--max-update": updates or 0}
    return StageSpec(stage, out, tuple(trainings), tuple(models), evaluate, {**settings, **values})


def _evaluation(request: Request, index: int, result: Path) -> tuple[str, ...]:
    """The command line that evaluates a stage, without --path."""
    if request.trainer:
        return by_trainer(request.trainer, result.parent, "evaluate")
    words = [*_EVALUATE, request.stream, "--task", "alma_lm", "--gen-subset", "test", "--valid"]
    words += ["--stage", str(index), "--waiting-time", str(request.waiting_time), "--out", str(result)]
    words += flag_words("--context-window", request.context_window or None)
    if request.average:
        words += ["--weights", str(request.average) if averages.last_of(request.average) else "average"]
    words += [*request.chosen(_EVALUATION_FLAGS), *request.flags.get(ENCODER, ())]
    return (*words, *_tensorboard(request, index))


def _tensorboard(request: Request, index: int, member: int | None = None) -> list[str]:
    """TensorBoard folder of a model, the same in all its stages; without `member`, of evaluations."""
    folder = request.settings.get("--tensorboard-logdir")
    if not folder:
        return []
    stage = [f"stage_{index:02d}"] if request.renews else []
    separate = member is not None and request.learner_spec.separate
    path = Path(folder, request.out.name, *stage, *([f"member_{member}"] if separate else []))
    return flag_words("--tensorboard-logdir", path)
