"""TensorBoard over the stages of a model: x is the number of updates since the model was new.

fairseq starts every stage at step 0, unless the schedule is continuous. Here the steps of a stage follow
those of the stage before it.
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

    def __init__(self, logdir: str, earlier: int, done: int) -> None:
        """`done`: fairseq's update count when this process starts; `earlier`: updates before that count."""
        self.earlier, self.first = earlier, earlier + done + 1
        super().__init__(logdir, self.first)

    def add_text(self, tag: str, text: str) -> None:
        """Add a text at the first update of this process."""
        self.writer.add_text(tag, text, self.first)

    def add_scalar(self, tag: str, value: Any, step: int) -> None:
        """Add a value after update `step` of fairseq's count."""
        self.writer.add_scalar(tag, value, self.earlier + step)


def begin(trainer) -> None:
    """Count the updates of earlier stages and let fairseq log by `StageWriter`.

    Call it after the checkpoint, if any, is loaded.
    """
    task, previous, done = trainer.task, trainer.cfg.checkpoint.finetune_from_model, trainer.get_num_updates()
    if task.args.stage and previous and not done:  # a resumed stage has it from its checkpoint
        task.earlier_updates = updates_so_far(previous)
    progress_bar.SummaryWriter = partial(StageWriter, earlier=task.earlier_updates, done=done)


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
