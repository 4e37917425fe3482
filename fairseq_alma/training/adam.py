"""fairseq's Adam on torch's fused kernel."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from fairseq.optim.adam import Adam
from torch import Tensor

_kernel: Any = getattr(torch, "_fused_adamw_", None)
"""torch's fused AdamW kernel, a private function; if it is missing, fairseq's own step runs.

The public torch.optim.adamw.adamw(fused=True) calls it and gives the same bits, but first sorts the
parameters by device and dtype, which takes 0.5 ms per step.
"""


class FusedAdam(Adam):
    """Adam that matches fairseq's up to rounding, with the same states, by torch's fused kernel.

    The kernel passes over each parameter once; fairseq's step passes over it a dozen times.
    """

    found_inf: Tensor | None = None
    """Scalar, fp32, on the parameters' device. 1: the step leaves weights and moments as they are.

    The host need not know it: if it was 1, call `undo_step` later. fairseq's step ignores it.
    """
    stepped: Sequence[Tensor] = ()
    """The parameters of the last step."""

    @property
    def is_fused(self) -> bool:
        """Whether steps take torch's kernel: not with --memory-efficient-fp16 and -bf16."""
        all_fp32 = all(_all_fp32(group["params"]) for group in self.param_groups)
        return _kernel is not None and all_fp32

    @torch.no_grad()
    def step(self, closure=None):
        """Update the parameters; half precision (--memory-efficient-fp16) takes fairseq's step."""
        trained = [(group, _with_gradients(group["params"])) for group in self.param_groups]
        in_half = any(not _all_fp32(params) for _, params in trained)
        if closure or _kernel is None or in_half:
            return super().step(closure)
        self.stepped = [param for _, params in trained for param in params]
        for group, params in trained:
            self._step_group(group, params)

    def undo_step(self) -> None:
        """Take back the step counts of the last step, which `found_inf` made do nothing else."""
        for param in self.stepped:
            self.state[param]["step"] -= 1
        self.stepped = ()

    def _step_group(self, group: dict[str, Any], params: list[Tensor]) -> None:
        """Update the `params` of one group."""
        # Parameters may differ in their step count, and one kernel call takes one step count.
        by_step = defaultdict(list)
        for param in params:
            state = self.state[param]
            if not state:
                state["step"] = 0
                state["exp_avg"] = torch.zeros_like(param)
                state["exp_avg_sq"] = torch.zeros_like(param)
            state["step"] += 1
            by_step[int(state["step"])].append(param)
        beta1, beta2 = group["betas"]
        for step, params_at_step in by_step.items():
            _kernel(
                params_at_step,
                [param.grad for param in params_at_step],
                [self.state[param]["exp_avg"] for param in params_at_step],
                [self.state[param]["exp_avg_sq"] for param in params_at_step],
                [],
                [torch.full((), float(step), device=params[0].device)] * len(params_at_step),
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                beta1=beta1,
                beta2=beta2,
                # torch adds eps after the second moment's bias correction, fairseq before it.
                eps=group["eps"] / (1 - beta2**step) ** 0.5,
                amsgrad=False,
                maximize=False,
                found_inf=self.found_inf,
            )


def _with_gradients(params: Iterable[Tensor]) -> list[Tensor]:
    return [param for param in params if param.grad is not None]


def _all_fp32(params: Iterable[Tensor]) -> bool:
    return all(param.dtype == torch.float32 for param in params)
