"""What the processes of one training have in common: who is first, and when all of them stop."""

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TypeVar

import torch
from torch import distributed

from alma.trainer import stop_requests
from transformers_alma.worker import STOP_FILE, is_worker

Value = TypeVar("Value")


def is_first() -> bool:
    """Whether this process writes the files of the training."""
    return not is_worker() or os.environ["RANK"] == "0"


def wait_for_all() -> None:
    """Wait until all processes are here."""
    if is_worker():
        distributed.barrier(group=_group())


def of_first(compute: Callable[[], Value]) -> Value:
    """The value that the first process computes; the others get it from there."""
    values: list[Value | None] = [compute() if is_first() else None]
    if is_worker():
        distributed.broadcast_object_list(values, src=0, group=_group())
    value: Value = values[0]  # type: ignore[assignment]
    return value


class StopVote:
    """Says to all processes in the same update that the training is to stop."""

    def __init__(self) -> None:
        self.is_signalled: Callable[[], bool]
        """Whether this process was asked to stop."""
        if is_worker():
            stop_file = Path(os.environ[STOP_FILE])
            self.is_signalled = stop_file.exists
        else:
            self.is_signalled = stop_requests()

    def __call__(self) -> bool:
        """Whether one of the processes was asked to stop. All of them call it in each update."""
        if not is_worker():
            return self.is_signalled()
        votes = torch.tensor([int(self.is_signalled())])
        distributed.all_reduce(votes, distributed.ReduceOp.MAX, group=_group())
        return bool(votes)


def leave() -> None:
    """Wait for the others, then take leave of them."""
    if is_worker():
        wait_for_all()
        distributed.destroy_process_group()


@cache
def _group() -> distributed.ProcessGroup:
    """All processes, by gloo: on GPUs, NCCL would wait for the device."""
    return distributed.new_group(backend="gloo")
