"""What a run was asked for: its options, and the flags of fairseq-train.

`slurm.lm.plan` makes a plan of it.
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

from alma import averages
from alma.learners import LEARNERS, LearnerSpec
from alma.options import changed, check_ranges, flag_of, flag_words
from alma.stages import Stage
from slurm.lm.engines import program_of
from slurm.lm.epochs import Length, length_in_blocks, length_of
from slurm.lm.run_options import Flags, FlagValues, Placement, RunOptions


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
    def average_words(self) -> list[str]:
        """Flags of fairseq-train that keep what --average needs."""
        checkpoints = averages.last_of(self.average)
        if checkpoints:
            return ["--keep-interval-updates", str(checkpoints)]
        if not self.average:
            return []
        kind = "--ema-decay" if averages.eta_of(self.average) is None else "--ema-poly"
        return ["--store-ema", kind, str(self.average).removeprefix("poly:")]

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
