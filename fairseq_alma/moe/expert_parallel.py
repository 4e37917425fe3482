"""Expert parallelism: each of W data-parallel processes holds E / W experts (GShard, Lepikhin et al., 2020).

Tokens go to the process of their expert and back by two all-to-alls. Routing and capacity are those of each
process's own batch, as where every process holds all experts, so that both train alike. Checkpoints have all
experts, in one file: they load at any number of processes, with or without expert parallelism.

Shapes: W processes, E experts, C rows of an expert, D model.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from fairscale.nn.moe.moe_layer import _AllToAll
from torch import Tensor

from alma.errors import UserError

_BACKENDS = ("pytorch_ddp", "c10d", "legacy_ddp", "no_c10d")


@dataclass
class Shards:
    """The processes that share out the experts: each has E / W, in order."""

    group: Any
    """torch.distributed's process group."""
    tokens: int = 0
    """Those of the largest batch that any process has in this forward pass; see `agree`."""

    def __deepcopy__(self, memo) -> "Shards":
        """A copy of a model shares its experts out to the same processes."""
        return self

    @property
    def size(self) -> int:
        """W."""
        return dist.get_world_size(self.group)

    def mine(self, whole: Tensor) -> Tensor:
        """This process's part of `whole` (E, …): (E / W, …)."""
        return whole.chunk(self.size)[dist.get_rank(self.group)].clone()

    def whole(self, part: Tensor) -> Tensor:
        """All processes' parts (E / W, …) on the CPU of process 0, (E, …); elsewhere `part`. All call it."""
        part = part.contiguous()
        first = dist.get_rank(self.group) == 0
        parts = [torch.empty_like(part) for _ in range(self.size)] if first else None
        dist.gather(part, parts, dst=0, group=self.group)
        return torch.cat([each.cpu() for each in parts]) if parts else part

    def agree(self, tokens: int, device: torch.device) -> None:
        """Find the largest batch of this forward pass, this process's has `tokens`. All call it, once a pass.

        Each Switch layer knows from it how many rows all have where there is a capacity, without another
        wait for the device, and so does its recomputation.
        """
        self.tokens = self.largest(torch.tensor(tokens, device=device))

    def largest(self, number: Tensor) -> int:
        """The largest `number` (a scalar) that any process has; waits for the device. All call it."""
        number = number.clone()
        dist.all_reduce(number, dist.ReduceOp.MAX, group=self.group)
        return int(number)

    def send(self, rows: Tensor, experts: int) -> Tensor:
        """Rows for all experts (E * C, D) to those of all processes for `experts` (= E / W), as many."""
        return _regroup(_AllToAll.apply(self.group, rows), self.size, experts)

    def send_back(self, rows: Tensor, experts: int) -> Tensor:
        """The inverse of `send`."""
        return _AllToAll.apply(self.group, _regroup(rows, experts, self.size))


def _regroup(rows: Tensor, outer: int, inner: int) -> Tensor:
    """Rows in the order (outer, inner, C) to (inner, outer, C)."""
    return rows.view(outer, inner, -1, rows.size(-1)).transpose(0, 1).reshape(rows.shape)


def clip_grad_norm_(original, params, max_norm: float) -> Tensor:
    """fairseq's `original`, where some of the `params` are experts that only this process has.

    It would leave them out of the norm. Returns the norm over all processes' gradients, a scalar.
    """
    params = list(params)
    own = [p.grad for p in params if hasattr(p, "expert") and p.grad is not None]
    norms = [torch.linalg.vector_norm(grad, dtype=torch.float32) for grad in own]
    squares = torch.stack([*norms, torch.zeros((), device=params[0].device)]).square().sum()
    dist.all_reduce(squares)
    shared = original([p for p in params if not hasattr(p, "expert")], 0.0)
    norm = (shared.square() + squares).sqrt()
    if max_norm > 0:
        factor = (max_norm / (norm + 1e-6)).clamp(max=1)
        torch._foreach_mul_([p.grad for p in params if p.grad is not None], factor)
    return norm


def check(cfg) -> None:
    """UserError: options of a training, `cfg` is fairseq's, that do not go with expert parallelism."""
    backend = cfg.distributed_training.ddp_backend
    if backend not in _BACKENDS:
        raise UserError(f"--moe-expert-parallel does not go with --ddp-backend {backend}: use legacy_ddp")
    if cfg.checkpoint.no_last_checkpoints:
        # Process 0 would at times not save, while the others wait to give it their experts.
        raise UserError("--moe-expert-parallel does not go with --no-last-checkpoints")


def whole_states(optimizer: torch.optim.Optimizer, shards: Shards) -> None:
    """Have the states that `optimizer` gives and takes be of all experts, as the model's are."""
    optimizer.register_state_dict_post_hook(partial(_gather, shards))
    optimizer.register_load_state_dict_pre_hook(partial(_scatter, shards))


def _gather(shards: Shards, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    for states, key, shape in _of_experts(optimizer, state_dict):
        if states[key].shape == shape:
            states[key] = shards.whole(states[key])


def _scatter(shards: Shards, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    for states, key, shape in _of_experts(optimizer, state_dict):
        if states[key].shape == (shards.size * shape[0], *shape[1:]):
            states[key] = shards.mine(states[key])


def _of_experts(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> Iterator[tuple]:
    """The tensors in the states of this process's experts: where each is, and the shape of the parameter."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for index, states in state_dict["state"].items():
        if hasattr(params[index], "expert"):
            states = state_dict["state"][index] = dict(states)  # not the optimizer's own
            for key in [key for key, value in states.items() if torch.is_tensor(value)]:
                yield states, key, params[index].shape
