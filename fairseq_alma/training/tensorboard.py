"""TensorBoard over the stages of a model: x is the number of updates since the model was new.

fairseq starts every stage at step 0, unless the schedule is continuous. Here the steps of a stage follow
those of the stage before it; a text and a scalar, `stage`, mark its start.
"""

import math
import os
from functools import partial
from typing import Any

from fairseq.logging import progress_bar

from alma.board import Board
from fairseq_alma.checkpoint import updates_so_far


class StageWriter(Board):
    """Fairseq's SummaryWriter in a process that trains a stage."""

    def __init__(self, logdir: str, stage: int, earlier: int, done: int, resumed: bool) -> None:
        """`done`: fairseq's update count when this process starts; `earlier`: updates before that count."""
        self.stage, self.earlier = stage, earlier
        self.first = self.newest = earlier + done + 1
        super().__init__(logdir, self.first)
        self.add_text("stage", f"stage {stage}" + (f", resumed after update {done}" if resumed else ""))
        self.add({"stage": stage}, self.first)

    def add_text(self, tag: str, text: str) -> None:
        """Add a text at the first update of this process."""
        self.writer.add_text(tag, text, self.first)

    def add_scalar(self, tag: str, value: Any, step: int) -> None:
        """Add a value after update `step`, and once for each step the number of the stage."""
        step += self.earlier
        self.writer.add_scalar(tag, value, step)
        if step > self.newest:
            self.add({"stage": self.stage}, step)
            self.newest = step


def begin(trainer) -> None:
    """Count the updates of earlier stages and let fairseq log by `StageWriter`.

    Call it after the checkpoint, if any, is loaded.
    """
    task, previous, done = trainer.task, trainer.cfg.checkpoint.finetune_from_model, trainer.get_num_updates()
    if task.args.stage and previous and not done:  # a resumed stage has it from its checkpoint
        task.earlier_updates = updates_so_far(previous)
    stage, resumed = task.args.stage, done > task.first_update
    progress_bar.SummaryWriter = partial(
        StageWriter, stage=stage, earlier=task.earlier_updates, done=done, resumed=resumed
    )


def add_evaluation(logdir: str, split: str, record: dict[str, Any], path: str | None) -> None:
    """Add the evaluation of checkpoint `path` (None: an untrained model) on `split`.

    `record`: from `stage_record.measure`. Names and units are those of `valid`: the loss in bits per token,
    the loss of each expert in nats.
    """
    values = {"loss": record["nll"] / math.log(2), "ppl": record["perplexity"]}
    for layer, experts in record["experts"].items():
        for name, key in (("share", "share"), ("nll", "loss")):
            values |= {f"l{layer}_{name}{number}": value for number, value in enumerate(experts[key])}
    board = Board(os.path.join(logdir, split))
    board.add(values, updates_so_far(path) if path else 0)
    board.close()
