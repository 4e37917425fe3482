"""SIGUSR1 or SIGUSR2 to fairseq-train: save after the update at hand and exit with code 75, "run me again".

The second is what submitit has SLURM send to all processes of a job before its end.
What comes before the signal and after the same command's next start is what one run would have computed.
"""

import atexit
import copy
import ctypes
import functools
import logging
import math
import multiprocessing
import os
import signal
import sys
import threading

import torch
from fairseq import checkpoint_utils
from fairseq.distributed import utils as distributed_utils
from fairseq.file_io import PathManager
from fairseq.optim.lr_scheduler.reduce_lr_on_plateau import ReduceLROnPlateauLRSchedule

from fairseq_alma.task import AlmaLMTask

EXIT_CODE = os.EX_TEMPFAIL
SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)

logger = logging.getLogger(__name__)

_asked = ctypes.c_bool(False)  # whether the signal has come


def install() -> None:
    """Note the signals from now on; a handler that somebody else has set stays."""
    if threading.current_thread() is not threading.main_thread():
        return  # where signals cannot be handled
    for number in SIGNALS:
        if signal.getsignal(number) in (signal.SIG_DFL, signal.SIG_IGN):
            signal.signal(number, _note)
            signal.siginterrupt(number, False)  # no system call of a library fails for it
            # While Python shuts down it gives signals with handlers of ours their default action: death.
            atexit.register(signal.signal, number, signal.SIG_IGN)


def _note(number, frame) -> None:
    _asked.value = True


def shared() -> ctypes.c_bool:
    """The flag, from now on in memory that the processes to which this one gives it share with it."""
    flag = multiprocessing.get_context("spawn").RawValue(ctypes.c_bool, False)
    _use(flag)
    return flag


def _use(flag: ctypes.c_bool) -> None:
    global _asked
    earlier, _asked = _asked, flag
    if earlier.value:  # read last: a signal up to here is in one of the two
        flag.value = True


def watch(main, flag: ctypes.c_bool) -> None:
    """Have `main`, if it is fairseq-train's, look at `flag` after every update.

    Its module may go by other names: `__main__` (`python -m fairseq_cli.train`), `__mp_main__` (spawned).
    """
    _use(flag)
    module = getattr(main, "__globals__", {})
    original = module.get("validate_and_save")
    if original and not hasattr(original, "__wrapped__"):
        module["validate_and_save"] = _stop_when_asked(original)


def _stop_when_asked(original):
    """After what is due anyway, which an uninterrupted run does too; a stage that is finished just ends."""

    @functools.wraps(original)
    def validate_and_save(cfg, trainer, task, epoch_itr, valid_subsets, end_of_epoch):
        losses, finished = original(cfg, trainer, task, epoch_itr, valid_subsets, end_of_epoch)
        last_epoch = epoch_itr.epoch >= (cfg.optimization.max_epoch or math.inf)
        over = finished or (end_of_epoch and last_epoch)
        if isinstance(task, AlmaLMTask) and not over and _asked_anywhere(trainer.device):
            saved = _saved(cfg, epoch_itr.epoch, trainer.get_num_updates(), end_of_epoch)
            if end_of_epoch and isinstance(trainer.lr_scheduler, ReduceLROnPlateauLRSchedule):
                trainer.lr_step(epoch_itr.epoch, losses[0])  # what main does next; no resume knows this loss
                saved = False
            _stop(cfg, trainer, epoch_itr, saved)
        return losses, finished

    return validate_and_save


def _asked_anywhere(device) -> bool:
    """Whether the signal has come to any process of the job: all must stop at the same update."""
    if not torch.distributed.is_initialized():
        return _asked.value
    flag = torch.tensor([_asked.value], dtype=torch.int32, device=device)
    distributed_utils.all_reduce(flag, distributed_utils.get_global_group(), op="max")
    return bool(flag.item())


def _stop(cfg, trainer, epoch_itr, saved: bool) -> None:
    updates, saves = trainer.get_num_updates(), cfg.checkpoint
    if saves.no_save or saves.no_last_checkpoints:
        flag = "--no-save" if saves.no_save else "--no-last-checkpoints"
        what = f"nothing is saved ({flag}), the same command starts anew"
    else:
        what = "the same command goes on from here"
        if not saved:
            only_last = copy.deepcopy(saves)
            only_last.no_epoch_checkpoints, only_last.save_interval_updates = True, 0
            checkpoint_utils.save_checkpoint(only_last, trainer, epoch_itr, None)  # no loss: not the best
    if saves.write_checkpoints_asynchronously:
        PathManager.async_close()
    logger.info(f"asked by a signal: stopped after update {updates}, exit code {EXIT_CODE}; {what}")
    if torch.distributed.is_initialized():
        # The first process to end has its launcher end the others: not while one of them writes.
        torch.distributed.barrier(distributed_utils.get_global_group())
    sys.exit(EXIT_CODE)


def _saved(cfg, epoch: int, updates: int, end_of_epoch: bool) -> bool:
    """Whether fairseq's validate_and_save has saved here, if training goes on; the condition is its own."""
    every = cfg.checkpoint.save_interval_updates
    return (end_of_epoch and epoch % cfg.checkpoint.save_interval == 0) or (
        every > 0 and 0 < updates >= cfg.dataset.validate_after_updates and updates % every == 0
    )
