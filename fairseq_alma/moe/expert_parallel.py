"""Expert parallelism: each of W data-parallel processes holds E / W experts (GShard, Lepikhin et
al., 2020).

Each process routes its own batch with its own capacity, so training computes the same as data
parallelism. An all-to-all exchanges the rows of all experts, R = E * C per process. Checkpoints do
not depend on W.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from fairscale.nn.moe.moe_layer import _AllToAll
from torch import Tensor

from alma.errors import UserError
from fairseq_alma.moe.dispatchers import PaddedDispatcher
from fairseq_alma.moe.router import Routing


@dataclass
class ExpertParallelGroup:
    """The W processes that share the experts; process w holds experts w * E / W to (w + 1) * E / W
    - 1."""

    process_group: Any  # torch.distributed.ProcessGroup

    def __deepcopy__(self, memo) -> "ExpertParallelGroup":
        """Return self: process groups cannot be copied, and a copied model uses the same one."""
        return self

    @property
    def size(self) -> int:
        """W."""
        return dist.get_world_size(self.process_group)

    def local(self, whole: Tensor) -> Tensor:
        """The part of `whole` (E, ...) on this process, (E / W, ...)."""
        return whole.chunk(self.size)[dist.get_rank(self.process_group)].clone()

    def gather(self, local: Tensor) -> Tensor:
        """All experts (E, ...) on the CPU of process 0; elsewhere `local` (E / W, ...).
        Collective."""
        local = local.contiguous()
        parts = None
        if dist.get_rank(self.process_group) == 0:
            parts = [torch.empty_like(local) for _ in range(self.size)]
        dist.gather(local, parts, dst=0, group=self.process_group)
        if parts is None:
            return local
        return torch.cat([part.cpu() for part in parts])

    def largest(self, number: Tensor) -> int:
        """The maximum over processes of a scalar. Collective; syncs with the host."""
        number = number.clone()
        dist.all_reduce(number, dist.ReduceOp.MAX, group=self.process_group)
        return int(number)


def _swap(x_RD: Tensor, outer: int, inner: int) -> Tensor:
    """Reorder the rows x_RD from (outer, inner, C) to (inner, outer, C); R = outer * inner * C."""
    return x_RD.view(outer, inner, -1, x_RD.size(-1)).transpose(0, 1).reshape(x_RD.shape)


class ExpertParallelDispatcher(PaddedDispatcher):
    """C rows per expert of every process; `capacity` must be the same on all."""

    def __init__(self, routing: Routing, capacity: int, group: ExpertParallelGroup):
        super().__init__(routing, capacity)
        self.group = group
        self.local_experts = len(routing.counts_E) // group.size

    def to_rows(self, x_SD: Tensor) -> Tensor:
        """The tokens of all processes for the local experts, (R, D). Collective."""
        x_RD = _AllToAll.apply(self.group.process_group, super().to_rows(x_SD))
        return _swap(x_RD, self.group.size, self.local_experts)

    def to_tokens(self, y_RD: Tensor, gate_S: Tensor) -> Tensor:
        """Gated outputs of this process's tokens, (S, D), fetched from the processes that hold
        their experts. Collective."""
        y_RD = _swap(y_RD, self.local_experts, self.group.size)
        return super().to_tokens(_AllToAll.apply(self.group.process_group, y_RD), gate_S)


def check(cfg) -> None:
    """Raise a UserError for options in fairseq's `cfg` that expert parallelism does not support."""
    if cfg.checkpoint.no_last_checkpoints:
        # Process 0 would skip some checkpoints while the others wait to send their experts.
        raise UserError("--moe-expert-parallel does not support --no-last-checkpoints")


def params_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    """The parameters in the order of the optimizer's state dict."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def whole_states(optimizer: torch.optim.Optimizer, group: ExpertParallelGroup) -> None:
    """Register hooks so that the optimizer's state dict holds all experts, as the model's does.

    state_dict() gathers them on process 0, load_state_dict() takes this process's share. Both
    become collectives.
    """
    optimizer.register_state_dict_post_hook(partial(_replace, group.gather, 1))
    optimizer.register_load_state_dict_pre_hook(partial(_replace, group.local, group.size))


def _replace(
    function, processes: int, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]
) -> None:
    """Apply `function` to every state tensor of the experts in `state_dict`, in place.

    `processes` says how many processes' experts such a tensor holds: 1, or W if it is complete.
    """
    params = params_of(optimizer)
    for index, state in state_dict["state"].items():
        if not hasattr(params[index], "expert"):
            continue
        experts, *shape = params[index].shape
        expected = (processes * experts, *shape)
        replaced = dict(state)  # a new dict: the old one is the optimizer's own
        for key, value in state.items():
            if torch.is_tensor(value) and value.shape == expected:
                replaced[key] = function(value)
        state_dict["state"][index] = replaced
