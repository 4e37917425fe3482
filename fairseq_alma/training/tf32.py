"""TF32 products of fp32 trainings, on GPUs that have them (Ampere and later).

A matrix product then rounds its fp32 inputs to 10 bits of mantissa and adds in fp32. A training
keeps the precision with which it began: its checkpoints say which.
"""

import logging
import os

import torch

from alma.errors import UserError
from fairseq_alma.checkpoint import memory_map

logger = logging.getLogger(__name__)

AMPERE = 8  # major compute capability


def is_supported(device: torch.device) -> bool:
    """Whether the device computes TF32 products."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= AMPERE


def allow(allowed: bool) -> None:
    """Allow or forbid TF32 in products and convolutions of this process.

    By torch's older interface: the newer one is missing in 2.7, and both must not be mixed.
    """
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    torch.backends.cudnn.allow_tf32 = allowed


def prepare(cfg, trainer) -> None:
    """Choose the precision of products, and record the choice in the task; on a CPU do nothing.

    cfg: fairseq's checkpoint config. UserError: --no-tf32 is given to a training that began with
    TF32.
    """
    task = trainer.task
    common = trainer.cfg.common
    is_fp32 = not (common.fp16 or common.bf16)
    if not is_fp32 or not is_supported(trainer.device):
        return
    restart_path = cfg.restore_file
    if restart_path == "checkpoint_last.pt":
        restart_path = os.path.join(cfg.save_dir, restart_path)
    restarts = os.path.exists(restart_path)
    began_with_tf32 = True
    if restarts:
        began_with_tf32 = _is_recorded(restart_path)
    elif cfg.finetune_from_model:
        began_with_tf32 = _is_recorded(cfg.finetune_from_model)
    if restarts and began_with_tf32 and task.args.no_tf32:
        remedy = "leave it out, or give another --save-dir"
        raise UserError(f"--no-tf32: {restart_path} was trained with TF32: {remedy}")
    task.tf32 = began_with_tf32 and not task.args.no_tf32
    allow(task.tf32)
    if task.tf32:
        logger.info("products of fp32: TF32; --no-tf32 computes them in full")
    elif not began_with_tf32:
        logger.info("products of fp32: in full, as this training began; no TF32")
    else:
        logger.info("products of fp32: in full (--no-tf32)")


def _is_recorded(path: str) -> bool:
    """Whether the checkpoint was trained with TF32; those of earlier versions were not."""
    extra_state = memory_map(path)["extra_state"]
    return bool(extra_state.get("AlmaLMTask", {}).get("tf32", False))
