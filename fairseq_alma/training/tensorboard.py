"""TensorBoard over the stages of a model (`--tensorboard-logdir`): x is the updates since the model was new.

fairseq starts every stage at step 0, unless the schedule is continuous. Here the steps of a stage follow
those of the stage before it; a text and a scalar, `stage`, mark its start. After a resume, TensorBoard hides
the points that training repeats.
"""

import math
import os
import time
from functools import partial
from typing import Any

from fairseq.logging import progress_bar

from fairseq_alma.checkpoint import updates_so_far

_Writer: Any = progress_bar.SummaryWriter
"""Of torch.utils.tensorboard, or of tensorboardX if TensorBoard is not installed."""


class StageWriter(_Writer):
    """A SummaryWriter for one process that trains a stage, in fairseq's calls."""

    def __init__(self, logdir: str, stage: int, earlier: int, done: int, resumed: bool) -> None:
        """`done`: fairseq's update count when this process starts; `earlier`: updates before that count."""
        self.stage, self.earlier = stage, earlier
        self.first = self.newest = earlier + done + 1
        super().__init__(logdir, purge_step=self.first, flush_secs=1, filename_suffix=_suffix())
        self.add_text("stage", f"stage {stage}" + (f", resumed after update {done}" if resumed else ""))
        super().add_scalar("stage", stage, self.first)

    def add_text(self, tag: str, text: str) -> None:
        """Add a text at the first update of this process."""
        super().add_text(tag, text, self.first)

    def add_scalar(self, tag: str, value: Any, step: int) -> None:
        """Add a value after update `step`, and once for each step the number of the stage."""
        step += self.earlier
        super().add_scalar(tag, value, step)
        if step > self.newest:
            super().add_scalar("stage", self.stage, step)
            self.newest = step


def begin(trainer) -> None:
    """Count the updates of earlier stages and let fairseq log by `StageWriter`.

    Call it after the checkpoint, if any, is loaded.
    """
    task, previous, done = trainer.task, trainer.cfg.checkpoint.finetune_from_model, trainer.get_num_updates()
    if task.args.stage and previous and not done:  # a resumed stage has it from its checkpoint
        task.earlier_updates = updates_so_far(previous)
    progress_bar.SummaryWriter = partial(
        StageWriter,
        stage=task.args.stage,
        earlier=task.earlier_updates,
        done=done,
        resumed=done > task.first_update,
    )


def add_evaluation(logdir: str, split: str, record: dict[str, Any], path: str | None) -> None:
    """Add the evaluation of checkpoint `path` (None: an untrained model) on `split`.

    `record`: from `stage_record.measure`. Names and units are those of `valid`: the loss in bits per token,
    the loss of each expert in nats.
    """
    step = updates_so_far(path) if path else 0
    values = {"loss": record["nll"] / math.log(2), "ppl": record["perplexity"]}
    for layer, experts in record["experts"].items():
        for name, key in (("share", "share"), ("nll", "loss")):
            values |= {f"l{layer}_{name}{number}": value for number, value in enumerate(experts[key])}
    with _Writer(os.path.join(logdir, split), filename_suffix=_suffix()) as writer:
        for name, value in values.items():
            writer.add_scalar(name, value, step)


def _suffix() -> str:
    """Of an event file: tensorboardX would overwrite the file of a writer that began in the same second."""
    return f".{time.time_ns()}.{os.getpid()}"
