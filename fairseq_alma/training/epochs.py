"""`--max-epoch` without `--max-update`: the schedule spans the updates of the epochs.

The number of updates depends on the number of batches, which fairseq knows only after it has built
the schedule. `begin` therefore puts the placeholder `_UNKNOWN` into the configuration, and `plan`
replaces it and builds the schedule again.
"""

import logging

from fairseq.data.iterators import EpochBatchIterator
from fairseq.optim import lr_scheduler
from fairseq.trainer import Trainer
from omegaconf import open_dict

from alma.epochs import passes_in, updates_of_epoch, warmup_of
from alma.errors import UserError

logger = logging.getLogger(__name__)

PLANNED_WARMUP = -1
"""Placeholder for --warmup-updates until the number of updates is known."""
_UNKNOWN = 2**30
_LENGTHS = ("max_update", "total_num_update")  # settings that hold the length of a schedule


def begin(trainer: Trainer) -> bool:
    """Whether epochs end the training. If so, call `plan` once the checkpoint is loaded."""
    optimization = trainer.cfg.optimization
    if optimization.max_update or not optimization.max_epoch:
        return False
    with open_dict(trainer.cfg):
        optimization.max_update = _UNKNOWN
        schedule = trainer.cfg.lr_scheduler
        for name in _LENGTHS:
            if hasattr(schedule, name) and not getattr(schedule, name):
                setattr(schedule, name, _UNKNOWN)
    return True


def plan(trainer: Trainer, iterator: EpochBatchIterator) -> None:
    """Set the number of updates, and build the schedule again with it.

    `iterator` is fairseq's over the epochs, at the position where training begins or resumes.
    UserError: the epochs have no full update.
    """
    schedule = trainer.cfg.lr_scheduler
    optimization = trainer.cfg.optimization
    updates = trainer.get_num_updates() + _remaining_updates(trainer, iterator)
    if not updates:
        problem = "an epoch has no full update; give a smaller --update-freq"
        raise UserError(f"--max-epoch {optimization.max_epoch}: {problem}")
    with open_dict(trainer.cfg):
        optimization.max_update = updates
        for name in _LENGTHS:
            if getattr(schedule, name, None) == _UNKNOWN:
                setattr(schedule, name, updates)
        if getattr(schedule, "warmup_updates", None) == PLANNED_WARMUP:
            schedule.warmup_updates = warmup_of(updates)
    logger.info(f"--max-epoch {optimization.max_epoch}: {updates} updates")
    state = trainer.lr_scheduler.state_dict()
    trainer._lr_scheduler = lr_scheduler.build_lr_scheduler(schedule, trainer.optimizer)
    trainer.lr_scheduler.load_state_dict(state)
    trainer.lr_step_update()


def _remaining_updates(trainer: Trainer, iterator: EpochBatchIterator) -> int:
    """Updates from the iterator's position to the end of the last epoch."""
    optimization = trainer.cfg.optimization
    skip = optimization.skip_remainder_batch
    batches = len(iterator)
    if trainer.cfg.dataset.grouped_shuffling:
        # fairseq drops the last group of batches if it has no batch for every process.
        batches = len(iterator.frozen_batches) // iterator.num_shards
    first = iterator.next_epoch_idx
    updates = 0
    for epoch in range(first, optimization.max_epoch + 1):
        updates += updates_of_epoch(batches, passes_in(epoch, optimization.update_freq), skip)
    if first <= optimization.max_epoch:
        updates -= iterator.iterations_in_epoch // passes_in(first, optimization.update_freq)
    return updates
