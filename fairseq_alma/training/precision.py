"""fairseq's optimizers for --fp16 and --bf16, with complete checkpoints.

A checkpoint includes the fp32 weights and the state of the loss scaler. No upstream issue known;
unnecessary once fairseq's own optimizers save them. `hooks` sets --fp16-no-flatten-grads, so that
there is one fp32 tensor per parameter: a checkpoint does not depend on the device, and growth and
expert parallelism find the state of each parameter.
"""

from typing import Any

import torch
from fairseq import optim

from fairseq_alma.moe.expert_parallel import params_of

FP32 = "fp32_weight"  # key of the fp32 weight in a parameter's saved optimizer state
_SCALER = "scaler"
_WINDOW = ("_iter", "_last_overflow_iter", "_last_rescale_iter", "_overflows_since_rescale")
"""Attributes of a DynamicLossScaler that decide when its scale changes next."""


def replace_optimizer(trainer, of_torch: torch.optim.Optimizer) -> None:
    """Change the class of the trainer's mixed-precision optimizer to the one in this module.

    `of_torch` is the torch optimizer that it wraps; with --zero-sharding, the one of this process's
    share. The object is not rebuilt, because fairseq's Trainer hard-codes its classes and a
    checkpoint records the class name.
    """
    optimizer = trainer.optimizer
    if type(optimizer) is optim.MemoryEfficientFP16Optimizer:
        optimizer.__class__ = MemoryEfficientFP16Optimizer
    elif type(optimizer) is optim.FP16Optimizer:
        optimizer.__class__ = FP16Optimizer
        of_torch.register_state_dict_post_hook(_add_weights)
        of_torch.register_load_state_dict_post_hook(_take_weights)


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
        """Restore the counters; --bf16 saves none."""
        super().load_state_dict(state_dict, optimizer_overrides)  # type: ignore[misc]
        if self.scaler is not None:
            vars(self.scaler).update(state_dict.get(_SCALER, {}))


class MemoryEfficientFP16Optimizer(_SavesScaler, optim.MemoryEfficientFP16Optimizer):
    """--memory-efficient-fp16 and -bf16, which have no fp32 weights."""


class FP16Optimizer(_SavesScaler, optim.FP16Optimizer):
    """--fp16 and --bf16, with fp32 weights, which fairseq restores from the half-precision ones."""


def _add_weights(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    for index, param in enumerate(params_of(optimizer)):
        state_dict["state"][index] = {**state_dict["state"].get(index, {}), FP32: param.data}


def _take_weights(optimizer: torch.optim.Optimizer) -> None:
    params = params_of(optimizer)
    take_weights(params, {index: optimizer.state[param] for index, param in enumerate(params)})


def take_weights(params: list[Any], states: dict[int, dict[str, Any]]) -> None:
    """Move the fp32 weights from the optimizer's `states` into `params`.

    Keys of `states` are indices into `params`. After growth, or without FP16Optimizer, there are no
    fp32 weights, and nothing happens.
    """
    for index, state in states.items():
        if FP32 in state:
            params[index].data.copy_(state.pop(FP32))
