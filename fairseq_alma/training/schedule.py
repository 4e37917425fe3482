"""What a new stage keeps of the stage before it besides the weights (`--schedule`, `--grow-optimizer`).

By default nothing, as with --finetune-from-model. --schedule continuous keeps optimizer, update count and
learning rate; growth may copy the optimizer state alone.
"""

import os
from typing import Any

from alma.errors import UserError
from fairseq_alma.checkpoint import memory_map


def keeps_optimizer(args) -> bool:
    """Whether a new stage keeps the optimizer state; `args`: the task's config."""
    return args.schedule != "stage" or (args.grow_experts > 0 and args.grow_optimizer == "copy")


def prepare(cfg, trainer) -> bool:
    """Whether training starts a stage from the one before; else it is new, or resumes.

    If so, `cfg`, a copy of fairseq's checkpoint config, changes to load what the stage keeps. UserError: the
    checkpoint has no optimizer state, or as many updates as --max-update allows.
    """
    args, path, limit = trainer.task.args, cfg.finetune_from_model, trainer.cfg.optimization.max_update
    last = os.path.join(cfg.save_dir, "checkpoint_last.pt")
    if not path or cfg.restore_file != "checkpoint_last.pt" or os.path.exists(last):
        return False
    if not keeps_optimizer(args):
        return True
    state = memory_map(path)
    check_optimizer(path, state.get("last_optimizer_state"))
    done = state["optimizer_history"][-1]["num_updates"]
    if limit and done >= limit:
        what = f"{path} has {done} updates, which --schedule {args.schedule} counts too"
        remedy = f"give --max-update {done} plus the updates of this stage"
        raise UserError(f"--max-update {limit}: {what}: {remedy}")
    cfg.finetune_from_model, cfg.restore_file = None, path
    cfg.reset_meters = cfg.reset_dataloader = True
    cfg.reset_lr_scheduler = True  # the rate follows from the update count
    return True


def check_optimizer(path: str, state: dict[str, Any] | None) -> None:
    """UserError: the checkpoint `path` has no optimizer state."""
    if state is None:
        remedy = "use --schedule stage and --grow-optimizer reset, or train the stage before with it"
        raise UserError(f"{path} has no optimizer state (--no-save-optimizer-state): {remedy}")


def begin(trainer, extra_state: dict[str, Any] | None) -> None:
    """Record where a new stage begins, once its checkpoint is loaded; `extra_state`: of that checkpoint."""
    task = trainer.task
    done = trainer.get_num_updates()
    task.first_update = done
    if done:
        task.average_from = (extra_state or {}).get(type(task).__name__, {}).get("average_from", 0)
