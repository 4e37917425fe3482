"""fairseq's optimizers for --fp16, --bf16 and --amp, with what they lack in scaling and in checkpoints.

* AMP unscales each gradient once, on a CPU too, and all processes skip an update together.
* A checkpoint holds all that the next update depends on: fp32 weights and the loss scaler's state.
* --fp16's states load whether they were saved flat (as fairseq has them on a GPU) or by parameter.
"""

from typing import Any

import torch
from fairseq import optim
from fairseq.distributed import utils as distributed_utils
from torch import Tensor
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from fairseq_alma.moe.expert_parallel import ExpertParallelGroup

FP32 = "fp32_weight"
"""Where a parameter's optimizer state in a checkpoint has its fp32 weight."""
_SCALER = "scaler"
_WINDOW = ("_iter", "_last_overflow_iter", "_last_rescale_iter", "_overflows_since_rescale")
"""What a DynamicLossScaler has to know, besides its scale, to grow it when an uninterrupted run would."""


def mend(trainer, group: ExpertParallelGroup | None) -> None:
    """Give fairseq's `trainer`, which has just built its optimizer, the one of this module in its place.

    `group` is that of expert parallelism, None without. The classes keep their names: a checkpoint
    names the optimizer that it was saved with.
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
        optimizer.shapes = [_whole_shape(param, group) for param in optimizer.fp16_params]
        optimizer.optimizer.register_state_dict_post_hook(_add_weights)
        optimizer.optimizer.register_load_state_dict_post_hook(_take_weights)


def _grad_scaler(common, device: str) -> torch.amp.GradScaler:
    """fairseq's is of a GPU, and takes its growth interval from --amp-init-scale."""
    options = {"init_scale": common.fp16_init_scale}
    if common.amp_scale_window is not None:
        options["growth_interval"] = common.amp_scale_window
    if distributed_utils.get_data_parallel_world_size() == 1:
        return torch.amp.GradScaler(device, **options)
    # A gradient that overflows in one process alone is of an expert, or a shard, that only this one has.
    group = distributed_utils.get_data_parallel_group()
    return ShardedGradScaler(device, process_group=group, **options)


class AMPOptimizer(optim.AMPOptimizer):
    """fairseq's, but steps the optimizer whose gradients it has unscaled: else they are unscaled again."""

    trainer: Any

    def step(self, closure=None, scale: float = 1.0, groups=None) -> None:
        """Update the parameters, or skip that and lower the scale. Takes what others take."""
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's, the scale, and how often a batch was tried again, which fairseq counts on."""
        state = self.scaler.state_dict()
        state = {name: state[name] for name in ("scale", "_growth_tracker")}
        return super().state_dict() | {_SCALER: state | {"retries": self.trainer._amp_retries}}

    def load_state_dict(self, state_dict, optimizer_overrides=None) -> None:
        """As fairseq's; a checkpoint from before the scale was kept starts with --fp16-init-scale."""
        super().load_state_dict(state_dict, optimizer_overrides)
        saved = dict(state_dict.get(_SCALER, {}))
        self.trainer._amp_retries = saved.pop("retries", 0)
        self.scaler.load_state_dict(self.scaler.state_dict() | saved)


class _KeepsWindow:
    """An optimizer whose checkpoints have the counters of its DynamicLossScaler; none, None, with bf16."""

    scaler: Any

    def state_dict(self) -> dict[str, Any]:
        """As fairseq's, and the counters."""
        state = super().state_dict()  # type: ignore[misc]
        if self.scaler is None:
            return state
        return state | {_SCALER: {name: getattr(self.scaler, name) for name in _WINDOW}}

    def load_state_dict(self, state_dict, optimizer_overrides=None) -> None:
        """As fairseq's, and the counters, where the checkpoint has them."""
        super().load_state_dict(state_dict, optimizer_overrides)  # type: ignore[misc]
        if self.scaler is not None:
            vars(self.scaler).update(state_dict.get(_SCALER, {}))


class MemoryEfficientFP16Optimizer(_KeepsWindow, optim.MemoryEfficientFP16Optimizer):
    """fairseq's --memory-efficient-fp16 and -bf16, which have no fp32 weights."""


class FP16Optimizer(_KeepsWindow, optim.FP16Optimizer):
    """fairseq's --fp16 and --bf16, whose fp32 weights are one flat tensor or one for each parameter.

    On load, fairseq makes them of the half-precision weights: what these have rounded off would be lost.
    """

    shapes: list[torch.Size]
    """Of the parameters, with the experts of all processes."""

    def load_state_dict(self, state_dict, optimizer_overrides=None) -> None:
        """As fairseq's, from either layout."""
        laid_out = flat if self.has_flat_params else by_parameter
        super().load_state_dict(laid_out(state_dict, self.shapes), optimizer_overrides)


def _whole_shape(param: Tensor, group: ExpertParallelGroup | None) -> torch.Size:
    if group and hasattr(param, "expert"):
        return torch.Size([group.size * param.size(0), *param.shape[1:]])
    return param.shape


def _add_weights(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    for index, param in enumerate(_params(optimizer)):
        state_dict["state"][index] = {**state_dict["state"].get(index, {}), FP32: param.data}


def _take_weights(optimizer: torch.optim.Optimizer) -> None:
    for param in _params(optimizer):
        if FP32 in optimizer.state[param]:
            param.data.copy_(optimizer.state[param].pop(FP32))


def _params(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def by_parameter(state_dict: dict[str, Any], shapes: list[torch.Size]) -> dict[str, Any]:
    """An optimizer's state dict with one state for each parameter, of `shapes`; one flat state is cut up."""
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
    """The inverse of `by_parameter`. What has not the parameter's shape (Adam's step) is the same for all."""
    if len(shapes) == 1 or _count(state_dict) == 1:
        return state_dict
    states = [state_dict["state"].get(index, {}) for index in range(len(shapes))]
    joined = {}
    for key, value in states[0].items():
        of_parameters = torch.is_tensor(value) and value.shape == shapes[0]
        joined[key] = torch.cat([state[key].reshape(-1) for state in states]) if of_parameters else value
    return _with_states(state_dict, [joined])


def _count(state_dict: dict[str, Any]) -> int:
    return sum(len(group["params"]) for group in state_dict["param_groups"])


def _with_states(state_dict: dict[str, Any], states: list[dict[str, Any]]) -> dict[str, Any]:
    (group,) = state_dict["param_groups"]
    groups = [{**group, "params": list(range(len(states)))}]
    return {**state_dict, "state": dict(enumerate(states)), "param_groups": groups}
