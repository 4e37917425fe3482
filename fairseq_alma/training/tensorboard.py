"""TensorBoard over the stages of a model: x is the number of updates since the model was new.

fairseq starts every stage at step 0. TensorBoard hides the first pass of steps that a training repeats.
"""

import math
import os
import time
from functools import partial
from typing import Any

from fairseq.logging import progress_bar
from tensorboardX import SummaryWriter

from fairseq_alma.checkpoint import updates_so_far


class StageWriter(SummaryWriter):
    """Fairseq's SummaryWriter in a process that trains or evaluates a stage."""

    def __init__(self, logdir: str, earlier: int = 0, done: int | None = None) -> None:
        """`done`: fairseq's update count when this process starts to train; `earlier`: updates before it."""
        self.earlier, self.first = earlier, None if done is None else earlier + done + 1
        # Without the suffix, tensorboardX would overwrite the file of a writer that began in the same second.
        suffix = f".{time.time_ns()}.{os.getpid()}"
        super().__init__(logdir, purge_step=self.first, flush_secs=1, filename_suffix=suffix)

    def add_text(self, tag: str, text: str) -> None:
        """Add a text at the first update of this process."""
        super().add_text(tag, text, self.first)

    def add_scalar(self, tag: str, value: Any, step: int) -> None:
        """Add a value after update `step` of fairseq's count."""
        super().add_scalar(tag, value, self.earlier + step)


def begin(trainer) -> None:
    """Once a checkpoint is loaded: count the updates of earlier stages, let fairseq log by `StageWriter`."""
    task, previous, done = trainer.task, trainer.cfg.checkpoint.finetune_from_model, trainer.get_num_updates()
    if task.args.stage and previous and not done:  # a resumed stage has it from its checkpoint
        task.earlier_updates = updates_so_far(previous)
    progress_bar.SummaryWriter = partial(StageWriter, earlier=task.earlier_updates, done=done)


def add_evaluation(logdir: str, split: str, record: dict[str, Any], path: str | None) -> None:
    """Add the `record` of `stage_record.measure` for checkpoint `path` (None: untrained) on `split`.

    Names and units are those of `valid`: the loss in bits per token, the loss of each expert in nats.
    """
    values = {"loss": record["nll"] / math.log(2), "ppl": record["perplexity"]}
    for layer, experts in record["experts"].items():
        for name, key in (("share", "share"), ("nll", "loss")):
            values |= {f"l{layer}_{name}{number}": value for number, value in enumerate(experts[key])}
    writer = StageWriter(os.path.join(logdir, split))
    for name, value in values.items():
        writer.add_scalar(name, value, updates_so_far(path) if path else 0)
    writer.close()
