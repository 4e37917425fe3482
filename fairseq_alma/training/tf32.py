"""Which trainings compute products of fp32 in TF32 (`alma.tf32`).

A training keeps the precision with which it began: its checkpoints say which.
"""

import logging
import os

from alma.errors import UserError
from alma.tf32 import allow, is_supported
from fairseq_alma.checkpoint import memory_map

logger = logging.getLogger(__name__)


def prepare(cfg, trainer) -> None:
    """Choose the precision of products, and record the choice in the task.

    Only an fp32 training on a GPU that has TF32 chooses; others compute as before and record None,
    or what their checkpoint says. cfg: fairseq's checkpoint config. UserError: --no-tf32 is given
    to a training that began with TF32.
    """
    task = trainer.task
    restart_path = cfg.restore_file
    if restart_path == "checkpoint_last.pt":
        restart_path = os.path.join(cfg.save_dir, restart_path)
    restarts = os.path.exists(restart_path)
    choice = None
    if restarts:
        choice = _recorded(restart_path)
    elif cfg.finetune_from_model and os.path.exists(cfg.finetune_from_model):
        choice = _recorded(cfg.finetune_from_model)
    common = trainer.cfg.common
    is_fp32 = not (common.fp16 or common.bf16)
    if not is_fp32 or not is_supported(trainer.device):
        # A new stage has no TF32 products here, whatever the stage before had.
        task.tf32 = choice if restarts or choice is False else None
        if task.tf32 and is_fp32:
            logger.info("products of fp32: in full: no TF32 here; the training began with it")
        return
    if restarts and choice and task.args.no_tf32:
        remedy = "leave it out, or give another --save-dir"
        raise UserError(f"--no-tf32: {restart_path} was trained with TF32: {remedy}")
    began_in_full = choice is False
    task.tf32 = not began_in_full and not task.args.no_tf32
    allow(task.tf32)
    if task.tf32:
        logger.info("products of fp32: TF32; --no-tf32 computes them in full")
    elif began_in_full:
        logger.info("products of fp32: in full, as this training began; no TF32")
    else:
        logger.info("products of fp32: in full (--no-tf32)")


def _recorded(path: str) -> bool | None:
    """Whether the checkpoint was trained with TF32; None: on no GPU that has it, or in half
    precision. Those of earlier versions were trained in full."""
    extra_state = memory_map(path)["extra_state"] or {}
    return extra_state.get("AlmaLMTask", {}).get("tf32", False)
