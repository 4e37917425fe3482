"""TensorBoard over all stages of a run (`--tensorboard-logdir`): x is the number of epochs since it began."""

import os
import time
from pathlib import Path
from typing import Any

from alma.stages import Stage


class Board:
    """The event files of a run. A stage has the same number of steps even if training ends early.

    After an interruption, training repeats some epochs: TensorBoard hides what they logged before.
    """

    def __init__(self, logdir: Path, epochs: int, stages: int, done: int):
        """`epochs` per stage; completed so far: `stages`, and `done` epochs of the next one."""
        from tensorboardX import SummaryWriter

        self.epochs, self.begin = epochs, stages * epochs
        self.first = self.begin + min(done + 1, epochs) if stages or done else 0
        suffix = f".{time.time_ns()}.{os.getpid()}"  # else a writer of the same second would be overwritten
        self.writer = SummaryWriter(str(logdir), purge_step=self.first, filename_suffix=suffix)

    def start(self, stage: Stage) -> None:
        """Mark the start of a stage."""
        self.begin = stage.index * self.epochs
        if self.begin + 1 >= self.first:  # not resumed within it
            text = f"stage {stage.index}: mega-batches {stage.train_on[0]} to {stage.train_on[-1]}"
            self.writer.add_text("stage", text, self.begin + 1)

    def epoch(self, epoch: int, **values: float) -> None:
        """Add values after an epoch of the current stage, 1, 2, ..."""
        self._add("epoch", values, self.begin + epoch)

    def tested(self, stages: int, values: dict[str, Any]) -> None:
        """Add test results of the model after `stages` stages; values that are not numbers are left out."""
        self._add("stage", values, stages * self.epochs)

    def _add(self, group: str, values: dict[str, Any], step: int) -> None:
        for name, value in values.items():
            if isinstance(value, int | float):
                self.writer.add_scalar(f"{group}/{name}", value, step)
