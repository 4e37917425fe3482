"""The elements of a plan: stages, their trainings, and the command lines of both."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from alma.stages import Stage
from alma.trainer import STAGE
from slurm.lm.run_options import FlagValues

FOREIGN = {"train": "model", "evaluate": "evaluation", "untrained": "untrained"}
"""Name of the folder in which a program of `engines` works, by the kind of job; it is inside the
folder of the job's marker."""


@dataclass(frozen=True)
class Training:
    """One fairseq-train: a stage of a model, or of one member of an ensemble."""

    directory: Path
    arguments: tuple[str, ...]
    """Arguments of fairseq-train; --finetune-from-model is added later, because the best checkpoint
    of `previous` is unknown until it has trained."""
    previous: Path | None  # directory of the training whose model it continues; None: a new model
    updates: int | None  # number of updates of this training; None: no limit
    earlier: int = 0  # updates before it that fairseq-train counts too (one schedule)
    tokens: int | None = None  # tokens of all epochs; None: follows from the updates
    source: Path | None = None
    """Directory of an equal training in another run, whose checkpoints are linked."""
    seed: int = 0
    member: int = 0
    program: tuple[str, ...] | None = None
    """What trains in place of fairseq (`engines`); `arguments` then identify the training."""

    @property
    def command(self) -> tuple[str, ...]:
        if self.program:
            return by_program(self.program, self.directory, "train")
        return (sys.executable, "-m", "fairseq_cli.train", *self.arguments)


@dataclass(frozen=True)
class StageSpec:
    """One stage: its trainings, then the evaluation."""

    stage: Stage
    directory: Path
    trainings: tuple[Training, ...]
    models: tuple[Path, ...]  # directories of the trainings whose models are evaluated together
    evaluate: tuple[str, ...]
    """Command line of the evaluation; --path is added when the trainings have ended."""
    settings: FlagValues
    """Values of all flags: those of the request, with the stage's experts, members and updates."""


def by_program(program: Sequence[str], directory: Path, kind: str) -> tuple[str, ...]:
    """Command of a job for a program of `engines`; `kind`: a key of FOREIGN."""
    return program_command(program, directory / FOREIGN[kind])


def program_command(program: Sequence[str], folder: Path) -> tuple[str, ...]:
    """Command of a program of `engines` for the task in `folder`."""
    return (*program, str(folder.resolve() / STAGE))
