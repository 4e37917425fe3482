"""State that a new stage inherits from the previous one besides the weights.

By default none, as with --finetune-from-model. --schedule continuous inherits the optimizer state,
the update count and the learning rate; --grow-optimizer copy inherits the optimizer state only.
"""

import os
from typing import Any

from alma.errors import UserError
from fairseq_alma.checkpoint import memory_map


def keeps_optimizer(args) -> bool:
    """Whether a new stage keeps the optimizer state; `args`: the task's config."""
    return args.schedule != "stage" or (args.grow_experts > 0 and args.grow_optimizer == "copy")


def prepare(cfg, trainer) -> bool:
    """Set up loading the previous stage's state; return whether the stage inherits any.

    False for a first stage and for a resumed one. If True, `cfg`, a copy of fairseq's checkpoint
    config, is changed to load the state. Raises UserError if the checkpoint has no optimizer state,
    or already has the updates of --max-update.
    """
    args = trainer.task.args
    path = cfg.finetune_from_model
    last = os.path.join(cfg.save_dir, "checkpoint_last.pt")
    if not path or cfg.restore_file != "checkpoint_last.pt" or os.path.exists(last):
        return False
    if not keeps_optimizer(args):
        return True
    state = memory_map(path)
    check_optimizer(path, state.get("last_optimizer_state"))
    updates = state["optimizer_history"][-1]["num_updates"]
    limit = trainer.cfg.optimization.max_update
    if limit and updates >= limit:
        problem = f"{path} has {updates} updates, which --schedule {args.schedule} counts too"
        remedy = f"give --max-update {updates} plus the updates of this stage"
        raise UserError(f"--max-update {limit}: {problem}: {remedy}")
    cfg.finetune_from_model = None
    cfg.restore_file = path
    cfg.reset_meters = True
    cfg.reset_dataloader = True
    cfg.reset_lr_scheduler = True  # the rate follows from the update count
    return True


def check_optimizer(path: str, state: dict[str, Any] | None) -> None:
    """Raise a UserError if the checkpoint `path` has no optimizer state."""
    if state is None:
        remedy = (
            "use --schedule stage and --grow-optimizer reset, or train the stage before with it"
        )
        raise UserError(f"{path} has no optimizer state (--no-save-optimizer-state): {remedy}")


def begin(trainer, extra_state: dict[str, Any] | None) -> None:
    """Record the update count at which a new stage begins; call it once the checkpoint is loaded.

    `extra_state` is the dict of that name in the checkpoint; None if none was loaded.
    """
    task = trainer.task
    updates = trainer.get_num_updates()
    task.first_update = updates
    if updates:
        saved = (extra_state or {}).get(type(task).__name__, {})
        task.average_from = saved.get("average_from", 0)
