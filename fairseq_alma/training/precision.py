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
    """--fp16 and --bf16, with fp32 weights, which fairseq restores from the half-precision ones.

    Gradients and weights are copied by one kernel for many tensors; fairseq launches one for each.
    The fp32 gradients are not zeroed, because each update overwrites all of them.
    """

    def zero_grad(self) -> None:
        """Drop the gradients; without a backward pass the next fp32 ones are 0."""
        for param in self.fp16_params:
            param.grad = None
        self._needs_sync = True
        if self.scaler is not None:
            self._multiply_factor = 1.0 / float(self.scaler.loss_scale)

    def clip_grad_norm(self, max_norm: float, aggregate_norm_fn=None) -> torch.Tensor:
        """Clip the gradients and update the loss scale; returns the norm.

        With a loss scale it is on the host, after one wait for the GPU; fairseq waits four times.
        Raises OverflowError and FloatingPointError as fairseq does.
        """
        if self.scaler is None:
            return super().clip_grad_norm(max_norm, aggregate_norm_fn)
        self._sync_fp16_grads_to_fp32()
        scaled_norm = self.fp32_optimizer.clip_grad_norm(0, aggregate_norm_fn)
        norm = self._multiply_factor * scaled_norm
        if isinstance(self._multiply_factor, torch.Tensor):
            self._multiply_factor = self._multiply_factor.to(norm.device)
        norm_on_host = norm.cpu()
        if norm_on_host > max_norm > 0.0:
            self._multiply_factor *= max_norm / norm
        self.scaler.check_overflow(norm_on_host)
        return norm_on_host

    def _sync_fp16_grads_to_fp32(self) -> None:
        """Copy the gradients to fp32, once after each `zero_grad`; missing ones are 0."""
        if not self._needs_sync:
            return
        self._needs_sync = False
        gradients = []
        in_fp32 = []
        missing = []
        for param, fp32_param in self._trained():
            if fp32_param.grad is None:
                fp32_param.grad = torch.empty_like(fp32_param)
            if param.grad is None:
                missing.append(fp32_param.grad)
            else:
                gradients.append(param.grad)
                in_fp32.append(fp32_param.grad)
        if gradients:
            torch._foreach_copy_(in_fp32, gradients)
        if missing:
            torch._foreach_zero_(missing)

    @torch.no_grad()
    def _sync_fp32_params_to_fp16(self) -> None:
        """Copy the fp32 weights to the half-precision ones."""
        pairs = self._trained()
        if pairs:
            torch._foreach_copy_([param for param, _ in pairs], [weight for _, weight in pairs])

    def _trained(self) -> list[tuple[torch.nn.Parameter, torch.nn.Parameter]]:
        """The half-precision and fp32 copies of each parameter that is not frozen."""
        pairs = zip(self.fp16_params, self.fp32_params, strict=True)
        return [(param, fp32_param) for param, fp32_param in pairs if param.requires_grad]


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
