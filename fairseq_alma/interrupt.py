"""SIGUSR1 or SIGUSR2: fairseq-train finishes its update, saves, and exits with code 75
(EX_TEMPFAIL).

submitit lets SLURM send SIGUSR2 before a job's time limit. The same command resumes as if never
stopped.
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
from fairseq_alma.training import late

EXIT_CODE = os.EX_TEMPFAIL  # training stopped for a signal; run the same command again
SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)

logger = logging.getLogger(__name__)

_answers: list[late.HostCopy] = []  # of `_any_process_received`, not read yet
_received: list[ctypes.c_bool] = []  # the `flag` of this process, if it has one
os.register_at_fork(
    after_in_child=_received.clear
)  # a forked process must not share its parent's flag: a signal to one would stop both


def flag() -> ctypes.c_bool:
    """The flag that the signal handler sets, in memory that child processes share."""
    if not _received:
        _received.append(multiprocessing.get_context("spawn").RawValue(ctypes.c_bool, False))
    return _received[0]


def install(of_parent: ctypes.c_bool | None = None) -> None:
    """Handle the signals, unless the process already handles them itself.

    `of_parent` is the parent's `flag`; if given, the handler sets it instead of an own one.
    """
    _received[:] = [flag() if of_parent is None else of_parent]
    if threading.current_thread() is not threading.main_thread():
        return  # Python sets handlers in the main thread only
    for number in SIGNALS:
        if signal.getsignal(number) in (signal.SIG_DFL, signal.SIG_IGN):
            signal.signal(number, _note)
            signal.siginterrupt(
                number, False
            )  # restart system calls, so that no library sees EINTR
            # At exit Python restores default handlers, and a late signal would kill the process.
            atexit.register(signal.signal, number, signal.SIG_IGN)


def _note(number, frame) -> None:
    flag().value = True


def is_train(main) -> bool:
    """Whether `main` is fairseq_cli.train.main.

    Tested by its module's globals, because the module may be loaded under the name __main__.
    """
    return "validate_and_save" in getattr(main, "__globals__", {})


def watch(main) -> None:
    """If `main` trains, check after every update whether a signal has arrived.

    Training then stops after the validation and checkpoint that are due at this update; a complete
    stage ends as usual. Also gives the task fairseq's counters of --patience, so that checkpoints
    keep them.
    """
    original = main.__globals__["validate_and_save"] if is_train(main) else None
    if original is None or hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def validate_and_save(cfg, trainer, task, epoch_itr, valid_subsets, end_of_epoch):
        losses, finished = original(cfg, trainer, task, epoch_itr, valid_subsets, end_of_epoch)
        if end_of_epoch or finished:
            late.settle(trainer)  # fairseq logs the epoch next
        last_epoch = epoch_itr.epoch >= (cfg.optimization.max_epoch or math.inf)
        if not isinstance(task, AlmaLMTask) or finished or (end_of_epoch and last_epoch):
            return losses, finished
        if not _any_process_received(trainer.device):
            return losses, finished
        _save_if_unsaved(cfg, trainer, epoch_itr, end_of_epoch)
        updates = trainer.get_num_updates()
        logger.info(
            f"stopped by a signal after update {updates}, exit code {EXIT_CODE}: run it again"
        )
        if torch.distributed.is_initialized():
            # A launcher kills the other processes when the first one exits: wait until all have
            # written.
            torch.distributed.barrier(distributed_utils.get_global_group())
        sys.exit(EXIT_CODE)

    main.__globals__["validate_and_save"] = validate_and_save
    AlmaLMTask.early_stop = vars(main.__globals__["should_stop_early"])


def _any_process_received(device: torch.device) -> bool:
    """Whether a signal has reached any process: all must stop after the same update. Collective.

    Several GPUs read the answer of the call before, for which they need not wait; so they stop an
    update later.
    """
    received = flag().value
    if not torch.distributed.is_initialized():
        return received
    largest = torch.tensor([received], dtype=torch.int32).to(device, non_blocking=True)
    distributed_utils.all_reduce(largest, distributed_utils.get_global_group(), op="max")
    _answers.append(late.HostCopy([largest]))
    if device.type != "cpu" and len(_answers) == 1:
        return False
    (answer,) = _answers.pop(0).read()
    return bool(answer)


def _save_if_unsaved(cfg, trainer, epoch_itr, end_of_epoch: bool) -> None:
    """Save the last checkpoint, unless fairseq has just done so, or is not to save any."""
    saves = cfg.checkpoint
    updates = trainer.get_num_updates()
    interval = saves.save_interval_updates
    # fairseq's condition for saving:
    saved_epoch = end_of_epoch and epoch_itr.epoch % saves.save_interval == 0
    saved_update = (
        interval > 0
        and 0 < updates >= cfg.dataset.validate_after_updates
        and updates % interval == 0
    )
    if saved_epoch or saved_update or saves.no_save or saves.no_last_checkpoints:
        return
    only_last = copy.deepcopy(saves)
    only_last.no_epoch_checkpoints = True
    only_last.save_interval_updates = 0
    no_loss = None  # not validated, so it cannot become the best checkpoint
    checkpoint_utils.save_checkpoint(only_last, trainer, epoch_itr, no_loss)
