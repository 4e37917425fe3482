"""What a user requests of the launcher, for one run."""

import shlex
from dataclasses import dataclass, field, fields
from pathlib import Path

from alma import averages
from alma.learners import LEARNERS, LearnerSpec
from slurm.lm.flags import Flags, FlagValues, flag, words_of
from slurm.lm.options import SCHEDULES


@dataclass(frozen=True)
class Placement:
    """What each training of a run gets of its machine."""

    processes: int
    gpus: int
    """Of all processes; 0: a CPU."""
    update_freq: tuple[int, ...]
    tokens: int | None
    """Of an update, in full batches; None: unknown."""
    by_machine: bool
    """Whether the number of GPUs, and no flag, determines `tokens`."""

    @property
    def flags(self) -> Flags:
        """For fairseq-train, which compares the tokens with those it trains on."""
        values = {
            "--distributed-world-size": self.processes,
            "--update-freq": list(self.update_freq),
            "--expect-tokens": self.tokens,
        }
        return {name: flag(name, value) for name, value in values.items()}


@dataclass(frozen=True)
class Request:
    """A command line, or an experiment, of the launcher. None: not given."""

    stream: str
    out: Path
    learner: str
    """Key of LEARNERS."""
    flags: Flags
    members: int | None = None
    waiting_time: int = 1
    replay: bool = False
    replay_share: float = 0.0
    replay_from: str | None = None
    from_scratch: bool = False
    update_multiplier: int = 1
    schedule: str = SCHEDULES[0]
    cooldown: float = 0.0
    """Updates of a cool-down, as a share of those of a stage."""
    average: float | str | None = None
    """Decay of the moving average, `poly:ETA` or `last:K`."""
    seed: int = 0
    grow_experts: list[int] | None = None
    grow_router: str | None = None
    grow_optimizer: str | None = None
    context_window: int = 0
    stages: int | None = None
    name: str | None = None
    settings: FlagValues = field(default_factory=dict)
    """fairseq-train's values for `flags`; required by `make_plan`."""
    placement: Placement | None = None
    """What its trainings get of the machine, from `place`; None: not decided."""

    @property
    def learner_spec(self) -> LearnerSpec:
        """The entry of its learner."""
        return LEARNERS[self.learner]

    @property
    def arch(self) -> str:
        """Value of --arch."""
        return self.settings["--arch"]

    @property
    def models(self) -> int:
        """Members trained in each stage; 1 for a learner without --members."""
        return self.members or self.learner_spec.members or 1

    @property
    def updates(self) -> int:
        """Of a stage; 0: no limit."""
        return self.settings["--max-update"] * self.update_multiplier

    @property
    def one_schedule(self) -> bool:
        """Whether one schedule spans all stages: optimizer and learning rate go on."""
        return self.schedule != "stage"

    @property
    def averaged_checkpoints(self) -> int:
        """K of --average last:K, else 0."""
        average = str(self.average)
        return int(average.removeprefix("last:")) if average.startswith("last:") else 0

    @property
    def training_words(self) -> list[str]:
        """Flags of fairseq-train, the same for every stage, that follow from options."""
        words = ["--schedule", self.schedule] if self.one_schedule else []
        if kept := self.averaged_checkpoints:
            return [*words, "--keep-interval-updates", str(kept)]
        if self.average is None:
            return words
        kind = "--ema-decay" if averages.eta_of(self.average) is None else "--ema-poly"
        return [*words, "--store-ema", kind, str(self.average).removeprefix("poly:")]

    @property
    def command(self) -> str:
        """The shell line that requests this run alone: options that are not the default, and all flags."""
        words = ["alma", "train", self.stream]
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name not in ("stream", "flags", "settings", "placement") and value != each.default:
                words += flag(f"--{each.name.replace('_', '-')}", value)
        return shlex.join([*words, *(["--", *words_of(self.flags)] if self.flags else [])])

    @property
    def renews(self) -> bool:
        """Whether each stage trains new models."""
        return self.from_scratch or self.learner_spec.fresh

    def directory(self, index: int, member: int) -> Path:
        """Of the training of a stage's member."""
        stage = self.out / f"stage_{index:02d}"
        return stage / f"member_{member}" if self.learner_spec.separate else stage
