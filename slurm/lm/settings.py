"""What a user requests of the launcher, for one run."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from alma import averages
from alma.batches import tokens_of
from alma.learners import LEARNERS, LearnerSpec
from alma.options import NEVER, changed, check_ranges, flag_of, flag_words, option, options_of
from alma.protocol import TextOptions

Flags = Mapping[str, Sequence[str]]
"""The words of each flag of fairseq-train by its name, which is one of them."""
FlagValues = Mapping[str, Any]
"""The value of every flag of fairseq-train by its first name."""


@dataclass(frozen=True)
class Placement:
    """What each training of a run gets of its machine."""

    processes: int
    gpus: int
    """Of all processes; 0: a CPU."""
    tokens: int | None
    """Of an update, in full batches; None: unknown."""
    by_machine: bool
    """Whether the number of GPUs, and no flag, determines `tokens`."""


def tokens_of_batch(settings: FlagValues) -> int | None:
    """Tokens of one forward pass in one process, in full sequences; None without a limit of a batch."""
    limits = ("--batch-size", "--max-tokens", "--tokens-per-sample", "--required-batch-size-multiple")
    return tokens_of(1, *(settings[name] for name in limits))


@dataclass(frozen=True, kw_only=True)
class Request(TextOptions):
    """What a command line, or an experiment, requests of the launcher: the options of a run."""

    stream: str = option(None, "stream that the experiments train on", metavar="STREAM", record=NEVER)
    out: Path = option(
        None,
        "run directory to create or resume (default of an experiment: runs/FOLDER/NAME)",
        metavar="RUN",
        record=NEVER,
    )
    stages: int | None = option(
        None,
        "train N stages, then stop; rerun with a larger N to go on (default: all stages)",
        at_least=1,
        record=NEVER,
    )
    flags: Flags = field(default_factory=dict)
    """Of fairseq-train."""
    settings: FlagValues = field(default_factory=dict)
    """fairseq-train's values for `flags`; required by `make_plan`."""
    placement: Placement | None = None
    """What its trainings get of the machine, from `place`; None: not decided."""

    def __post_init__(self) -> None:
        check_ranges(self)

    @property
    def learner_spec(self) -> LearnerSpec:
        return LEARNERS[self.learner]

    @property
    def arch(self) -> str:
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
        return averages.last_of(self.average)

    def option_words(self, index: int) -> list[str]:
        """The words of the options that fairseq-train has too, in stage `index`; the plan sets the growth."""
        elsewhere = ("grow_",) if index else ("grow_", "replay_")  # stage 0 has nothing to replay
        values, options = changed(self), options_of(self)
        shared = [name for name in values if options[name].metadata["passed"]]
        here = [name for name in shared if not name.startswith(elsewhere)]
        return [word for name in here for word in flag_words(flag_of(name), values[name])]

    @property
    def average_words(self) -> list[str]:
        if kept := self.averaged_checkpoints:
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

    @property
    def renews(self) -> bool:
        return self.from_scratch or self.learner_spec.fresh

    def directory(self, index: int, member: int) -> Path:
        """Of the training of a stage's member."""
        stage = self.out / f"stage_{index:02d}"
        return stage / f"member_{member}" if self.learner_spec.separate else stage
