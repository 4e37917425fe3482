"""Checks before a training begins: its plan (--expect-gpus, --expect-tokens), its folder."""

import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

from alma.batches import tokens_of
from alma.errors import UserError
from alma.files import make_directory, patiently_locked


def check_gpus(cfg) -> None:
    """UserError: torch can use fewer GPUs than planned for this command, such as none with an old driver."""
    wanted = cfg.task.expect_gpus
    # Without a usable driver device_count() may still count the GPUs.
    usable = torch.cuda.device_count() if torch.cuda.is_available() and not cfg.common.cpu else 0
    if not usable and cfg.distributed_training.ddp_backend == "fully_sharded":
        raise UserError("--ddp-backend fully_sharded needs a GPU: leave it out, or give pytorch_ddp")
    if usable < wanted:
        what = f"{wanted} GPU{'s' * (wanted != 1)} here, but torch {torch.__version__} can use {usable}"
        remedy = "install a torch build for the driver that nvidia-smi shows, or train on a CPU with --cpu"
        raise UserError(f"planned: {what}: {remedy}")


def check_batch(cfg) -> None:
    """UserError: the processes that have joined this training have another batch than planned."""
    if not cfg.task.expect_tokens:
        return
    joined = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    data, freq, planned = cfg.dataset, cfg.optimization.update_freq[0], cfg.task.expect_tokens
    limits = (data.batch_size, data.max_tokens, cfg.task.tokens_per_sample, data.required_batch_size_multiple)
    tokens = tokens_of(freq, *limits)
    if tokens is None or tokens * joined == planned:
        return
    names = [name for name in ("RANK", "WORLD_SIZE", "SLURM_NTASKS") if name in os.environ]
    what = f"{planned:,} tokens an update in {planned / tokens:g} processes"
    found = f"{joined} joined, with {joined * tokens:,} tokens"
    unset = f"unset {', '.join(names)}, or " if names else ""
    raise UserError(f"planned: {what}, but {found}: {unset}plan with --distributed-world-size {joined}")


def alone(cfg) -> AbstractContextManager:
    """Hold the checkpoint folder: another training would write the same files. UserError: one does already.

    For the first process of a training; the others hold nothing.
    """
    if torch.distributed.is_initialized() and torch.distributed.get_rank():
        return nullcontext()
    folder = Path(cfg.checkpoint.save_dir)
    make_directory(folder)
    return patiently_locked(folder, ".training.lock")
