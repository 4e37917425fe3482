"""What a plan consists of: stages, their trainings, and the command lines of both."""

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from alma.stages import Stage
from alma.trainer import STAGE
from slurm.lm.run_options import FlagValues

FOREIGN = {"train": "model", "evaluate": "evaluation", "untrained": "untrained"}
"""Folder of each kind of job of the user's own trainer, inside the folder of the job's marker."""


@dataclass(frozen=True)
class Training:
    """One fairseq-train: a stage of a model, or of one member of an ensemble."""

    directory: Path
    arguments: tuple[str, ...]
    """Of fairseq-train, without --finetune-from-model: the best checkpoint is unknown until
    `previous` ends."""
    previous: Path | None  # directory of the training whose model it continues; None: a new model
    updates: int | None  # of this training; None: no limit
    earlier: int = 0  # updates before it that fairseq-train counts too (one schedule)
    tokens: int | None = None  # of its epochs; None: follows from the updates
    source: Path | None = None
    """Directory of the same training in another run, whose checkpoints it takes over."""
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
    evaluate: tuple[str, ...]
    """Without --path: the best checkpoints are unknown until the trainings end."""
    settings: FlagValues
    """Of its trainings: the request's, with the experts, members and updates of the stage."""


def by_trainer(trainer: str, directory: Path, kind: str) -> tuple[str, ...]:
    """Command of a job for the user's own trainer; `kind`: a key of FOREIGN."""
    return trainer_command(trainer, directory / FOREIGN[kind])


def trainer_command(trainer: str, folder: Path) -> tuple[str, ...]:
    """Command of the user's own trainer for the task in `folder`."""
    return (*shlex.split(trainer), str(folder.resolve() / STAGE))
