"""TensorBoard over all stages of a model: x is the number of updates since training began.

fairseq starts every stage at step 0. When a training repeats steps, such as after it was
interrupted, TensorBoard shows their last pass only.
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
        """`earlier`: updates of the stages before this one.

        `done`: fairseq's update count as this process starts to train; None if it does not train.
        """
        self.earlier = earlier
        self.first = None if done is None else earlier + done + 1
        # Without it, tensorboardX would overwrite the file of a writer of the same second.
        suffix = f".{time.time_ns()}.{os.getpid()}"
        super().__init__(logdir, purge_step=self.first, flush_secs=1, filename_suffix=suffix)

    def add_text(self, tag: str, text: str) -> None:
        """Add a text at the first update of this process."""
        super().add_text(tag, text, self.first)

    def add_scalar(self, tag: str, value: Any, step: int) -> None:
        """Add a value after update `step` of fairseq's count."""
        super().add_scalar(tag, value, self.earlier + step)


def begin(trainer) -> None:
    """Log by `StageWriter` from now on. Call it once a checkpoint is loaded."""
    task = trainer.task
    previous = trainer.cfg.checkpoint.finetune_from_model
    updates = trainer.get_num_updates()
    if task.args.stage and previous and not updates:  # a resumed stage has it from its checkpoint
        task.earlier_updates = updates_so_far(previous)
    progress_bar.SummaryWriter = partial(StageWriter, earlier=task.earlier_updates, done=updates)


def add_evaluation(logdir: str, split: str, record: dict[str, Any], path: str | None) -> None:
    """Add the `record` that `stage_record.measure` made of the checkpoint `path` on `split`.

    `path` is None for an untrained model. Names and units are those of `valid`: the loss in bits
    per token, the loss of each expert in nats.
    """
    values = {"loss": record["nll"] / math.log(2), "ppl": record["perplexity"]}
    for layer, experts in record["experts"].items():
        for expert, share in enumerate(experts["share"]):
            values[f"l{layer}_share{expert}"] = share
        for expert, nll in enumerate(experts["loss"]):
            values[f"l{layer}_nll{expert}"] = nll
    step = updates_so_far(path) if path else 0
    writer = StageWriter(os.path.join(logdir, split))
    for name, value in values.items():
        writer.add_scalar(name, value, step)
    writer.close()
