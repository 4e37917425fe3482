"""TensorBoard over all stages of a run (`--tensorboard-logdir`): x counts from the beginning of the run.

After an interruption, training repeats some steps: TensorBoard hides what the first pass logged of them.
"""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Board:
    """Writes an event file in `logdir`; it hides earlier files' points from step `first` on."""

    def __init__(self, logdir: str | Path, first: int | None = None):
        from tensorboardX import SummaryWriter

        # Without the suffix, tensorboardX would overwrite the file of a writer that began in the same second.
        suffix = f".{time.time_ns()}.{os.getpid()}"
        self.writer = SummaryWriter(str(logdir), purge_step=first, flush_secs=1, filename_suffix=suffix)
        self.flush, self.close = self.writer.flush, self.writer.close

    def add(self, values: Mapping[str, Any], step: int, group: str = "") -> None:
        """Add those of the values that are numbers."""
        for name, value in values.items():
            if isinstance(value, int | float):
                self.writer.add_scalar(group + name, value, step)
