"""fairseq's optimizers for --fp16, --bf16 and --amp, with correct scaling and complete checkpoints.

* --amp runs on a CPU too, and skips an update on all processes or on none. It unscales each gradient once;
  fairseq does so twice (no upstream issue known). The scale grows every --amp-scale-window updates; fairseq
  mistakes --amp-init-scale for this window (https://github.com/facebookresearch/fairseq/issues/5342).
* Checkpoints include the fp32 weights and the loss scaler's state, so that training resumes, on a CPU bit
  for bit.
* The states of --fp16 load from either layout: flat (fairseq's on a GPU) or one per parameter.

Unnecessary once fairseq's own do the same; for the last two points no upstream issue is known.
"""

from typing import Any

import torch
from fairseq import optim
from fairseq.distributed import utils as distributed_utils

from fairseq_alma.moe.expert_parallel import ExpertParallelGroup, params_of

FP32 = "fp32_weight"
"""Key of the fp32 weight in a parameter's saved optimizer state."""
_SCALER = "scaler"
_WINDOW = ("_iter", "_last_overflow_iter", "_last_rescale_iter", "_overflows_since_rescale")
"""Counters of a DynamicLossScaler that decide when it next grows its scale."""


def replace_optimizer(trainer, group: ExpertParallelGroup | None) -> None:
    """Turn the optimizer that fairseq's `trainer` has just built into the one of this module.

    `group`: the processes that share the experts, None without expert parallelism. The object changes its
    class, because Trainer names the classes in code; the names stay the same, because a checkpoint records
    the optimizer's name.
    """
    optimizer = trainer.optimizer
    if type(optimizer) is optim.AMPOptimizer:
        optimizer.__class__ = AMPOptimizer
        optimizer.trainer = trainer
        optimizer._grad_scaler = _grad_scaler(trainer.cfg.common, trainer.device.type)
    elif type(optimizer) is optim.MemoryEfficientFP16Optimizer:
        optimizer.__class__ = MemoryEfficientFP16Optimizer
    elif type(optimizer) is optim.FP16Optimizer:
        optimizer.__class__ = FP16Optimizer
        optimizer.shapes = [param.shape for param in optimizer.fp16_params]
        for index, param in enumerate(optimizer.fp16_params):
            if group and hasattr(param, "expert"):
                optimizer.shapes[index] = torch.Size([group.size * len(param), *param.shape[1:]])
        optimizer.optimizer.register_state_dict_post_hook(_add_weights)
        optimizer.optimizer.register_load_state_dict_post_hook(_take_weights)


def _grad_scaler(common, device: str) -> torch.amp.GradScaler:
    """A scaler for `device` with the growth interval of --amp-scale-window."""
    options = {"init_scale": common.fp16_init_scale}
    if common.amp_scale_window is not None:
        options["growth_interval"] = common.amp_scale_window
    if distributed_utils.get_data_parallel_world_size() == 1:
        return torch.amp.GradScaler(device, **options)
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler  # a second of imports

    # An expert that only one process holds can overflow there alone, yet all must skip the update.
    group = distributed_utils.get_data_parallel_group()
    return ShardedGradScaler(device, process_group=group, **options)


class AMPOptimizer(optim.AMPOptimizer):
    """--amp. The scaler steps the torch optimizer that clipping has unscaled, so it unscales only once."""

    trainer: Any

    def step(self, closure=None, scale: float = 1.0, groups=None) -> None:
        """Update the parameters, or skip the update and lower the scale; fairseq's arguments are unused."""
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def state_dict(self) -> dict[str, Any]:
        """Add the scale, its growth counter and fairseq's count of retries of the current batch."""
        state = self.scaler.state_dict()
        state = {name: state[name] for name in ("scale", "_growth_tracker")}
        return super().state_dict() | {_SCALER: state | {"retries": self.trainer._amp_retries}}

    def load_state_dict(self, state_dict, optimizer_overrides=None) -> None:
        """Restore them; a checkpoint of an earlier version has no scale: start with --fp16-init-scale."""
        super().load_state_dict(state_dict, optimizer_overrides)
        saved = dict(state_dict.get(_SCALER, {}))
        self.trainer._amp_retries = saved.pop("retries", 0)
        self.scaler.load_state_dict(self.scaler.state_dict() | saved)


class _SavesScaler:
    """Mixin: save the counters of the DynamicLossScaler, which is None with bf16."""

    scaler: Any

    def state_dict(self) -> dict[str, Any]:
        """Add the counters."""
        state = super().state_dict()  # type: ignore[misc]
        if self.scaler is None:
            return state
        return state | {_SCALER: {name: getattr(self.scaler, name) for name in _WINDOW}}

    def load_state_dict(self, state_dict, optimizer_overrides=None) -> None:
        """Restore the counters if the checkpoint has them; those of earlier versions do not."""
        super().load_state_dict(state_dict, optimizer_overrides)  # type: ignore[misc]
        if self.scaler is not None:
            for name, value in state_dict.get(_SCALER, {}).items():
                setattr(self.scaler, name, value)


class MemoryEfficientFP16Optimizer(_SavesScaler, optim.MemoryEfficientFP16Optimizer):
    """--memory-efficient-fp16 and -bf16, which have no fp32 weights."""


class FP16Optimizer(_SavesScaler, optim.FP16Optimizer):
    """--fp16 and --bf16, with fp32 weights in one flat tensor or one tensor per parameter.

    fairseq restores the fp32 weights from the half-precision ones and so loses their lower bits.
    """

    shapes: list[torch.Size]
    """Shapes of the parameters, with the experts of all processes."""

    def load_state_dict(self, state_dict, optimizer_overrides=None) -> None:
        """Load a state dict of either layout."""
        laid_out = flat if self.has_flat_params else by_parameter
        super().load_state_dict(laid_out(state_dict, self.shapes), optimizer_overrides)


def _add_weights(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    for index, param in enumerate(params_of(optimizer)):
        state_dict["state"][index] = {**state_dict["state"].get(index, {}), FP32: param.data}


def _take_weights(optimizer: torch.optim.Optimizer) -> None:
    for param in params_of(optimizer):
        if FP32 in optimizer.state[param]:
            param.data.copy_(optimizer.state[param].pop(FP32))


def by_parameter(state_dict: dict[str, Any], shapes: list[torch.Size]) -> dict[str, Any]:
    """Split the flat state in an optimizer's state dict into one state per parameter, of `shapes`."""
    if len(shapes) == 1 or _count(state_dict) > 1:
        return state_dict
    states: list[dict[str, Any]] = [{} for _ in shapes]
    sizes = [shape.numel() for shape in shapes]
    for key, value in state_dict["state"].get(0, {}).items():
        whole = torch.is_tensor(value) and value.numel() == sum(sizes)
        pieces = value.view(-1).split(sizes) if whole else [value] * len(shapes)
        for state, shape, piece in zip(states, shapes, pieces, strict=True):
            state[key] = piece.view(shape) if whole else piece
    return _with_states(state_dict, states)


def flat(state_dict: dict[str, Any], shapes: list[torch.Size]) -> dict[str, Any]:
    """The inverse of `by_parameter`; values without the parameter's shape (Adam's step) are equal in all."""
    if len(shapes) == 1 or _count(state_dict) == 1:
        return state_dict
    states = [state_dict["state"].get(index, {}) for index in range(len(shapes))]
    joined = {}
    for key, value in states[0].items():
        whole = torch.is_tensor(value) and value.shape == shapes[0]
        joined[key] = torch.cat([state[key].reshape(-1) for state in states]) if whole else value
    return _with_states(state_dict, [joined])


def _count(state_dict: dict[str, Any]) -> int:
    return sum(len(group["params"]) for group in state_dict["param_groups"])


def _with_states(state_dict: dict[str, Any], states: list[dict[str, Any]]) -> dict[str, Any]:
    (group,) = state_dict["param_groups"]
    groups = [{**group, "params": list(range(len(states)))}]
    return {**state_dict, "state": dict(enumerate(states)), "param_groups": groups}
