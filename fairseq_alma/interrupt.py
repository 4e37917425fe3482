"""SIGUSR1 or SIGUSR2: fairseq-train finishes its update, saves, and exits with code 75 (EX_TEMPFAIL).

submitit lets SLURM send SIGUSR2 before a job's time limit. The same command resumes as if never stopped.
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

from fairseq_alma.task import AlmaLMTask

EXIT_CODE = os.EX_TEMPFAIL  # training stopped for a signal; run the same command again
SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)

logger = logging.getLogger(__name__)

_received: list[ctypes.c_bool] = []  # the `flag` of this process, if it has one
os.register_at_fork(after_in_child=_received.clear)  # memory that is shared with a sibling would end both


def flag() -> ctypes.c_bool:
    """What the signal handler sets, in memory that child processes share."""
    if not _received:
        _received.append(multiprocessing.get_context("spawn").RawValue(ctypes.c_bool, False))
    return _received[0]


def install(of_parent: ctypes.c_bool | None = None) -> None:
    """Handle the signals, unless the process already has a handler of its own; set the parent's `flag`."""
    _received[:] = [flag() if of_parent is None else of_parent]
    if threading.current_thread() is not threading.main_thread():
        return  # Python sets handlers in the main thread only
    for number in SIGNALS:
        if signal.getsignal(number) in (signal.SIG_DFL, signal.SIG_IGN):
            signal.signal(number, _note)
            signal.siginterrupt(number, False)  # restart system calls, so that no library sees EINTR
            # At exit Python restores default handlers, and a late signal would kill the process.
            atexit.register(signal.signal, number, signal.SIG_IGN)


def _note(number, frame) -> None:
    flag().value = True


def is_train(main) -> bool:
    """Whether `main` is that of fairseq_cli.train, by its globals: the module may be named __main__."""
    return "validate_and_save" in getattr(main, "__globals__", {})


def watch(main) -> None:
    """Check after every update of `main`, if that trains, whether a signal has arrived; keep its patience.

    Training stops after any validation and saving that is due; a stage that is complete ends as usual.
    """
    original = main.__globals__["validate_and_save"] if is_train(main) else None
    if original is None or hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def validate_and_save(cfg, trainer, task, epoch_itr, valid_subsets, end_of_epoch):
        losses, finished = original(cfg, trainer, task, epoch_itr, valid_subsets, end_of_epoch)
        last_epoch = epoch_itr.epoch >= (cfg.optimization.max_epoch or math.inf)
        if not isinstance(task, AlmaLMTask) or finished or (end_of_epoch and last_epoch):
            return losses, finished
        received, together = flag().value, torch.distributed.is_initialized()
        if together:  # if any process received the signal, all must stop after the same update
            any_of = torch.tensor([received], dtype=torch.int32, device=trainer.device)
            distributed_utils.all_reduce(any_of, distributed_utils.get_global_group(), op="max")
            received = bool(any_of.item())
        if not received:
            return losses, finished
        saves, updates = cfg.checkpoint, trainer.get_num_updates()
        every = saves.save_interval_updates
        saved = (end_of_epoch and epoch_itr.epoch % saves.save_interval == 0) or (  # fairseq's condition
            every > 0 and 0 < updates >= cfg.dataset.validate_after_updates and updates % every == 0
        )
        if not (saved or saves.no_save or saves.no_last_checkpoints):
            only_last = copy.deepcopy(saves)
            only_last.no_epoch_checkpoints, only_last.save_interval_updates = True, 0
            checkpoint_utils.save_checkpoint(only_last, trainer, epoch_itr, None)  # no loss: not the best
        logger.info(f"stopped by a signal after update {updates}, exit code {EXIT_CODE}: run it again")
        if together:
            # A launcher kills the other processes when the first one exits: wait until all have written.
            torch.distributed.barrier(distributed_utils.get_global_group())
        sys.exit(EXIT_CODE)

    main.__globals__["validate_and_save"] = validate_and_save
    AlmaLMTask.early_stop = vars(main.__globals__["should_stop_early"])
