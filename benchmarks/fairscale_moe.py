"""fairscale's MOELayer (GShard, Lepikhin et al., 2020) with the experts of a Switch layer.

It moves tokens by products with one-hot tensors (S, E, C): S * S elements where C = S / E, twice as
many with its Top2Gate, where C = 2 * S / E. Outside autocast it takes fp32 only; S must be a
multiple of E.

Shapes: B batch, T time, S = B * T tokens, D model, F hidden, E experts, C capacity.
"""

import contextlib
import copy
import math
from collections.abc import Iterator
from types import SimpleNamespace

import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.timing import device
from fairseq_alma.moe.layer import SwitchFFN
from fairseq_alma.moe.router import Router


@contextlib.contextmanager
def one_process() -> Iterator[None]:
    """A process group of this process alone: MOELayer needs one for its all-to-all."""
    backend = "nccl" if device().type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Top1Gate(nn.Module):
    """Our router as a gate of MOELayer, which has none for one expert a token."""

    def __init__(self, router: Router, capacity_factor: float):
        super().__init__()
        self.router = router
        self.capacity_factor = capacity_factor

    def forward(self, x_SD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Load-balancing loss, weights of the outputs (S, E, C), and where they are not 0."""
        tokens = len(x_SD)
        experts = len(self.router.weight)
        capacity = math.ceil(self.capacity_factor * tokens / experts)
        routing = self.router(x_SD, None, capacity)
        chosen_SE = nn.functional.one_hot(routing.expert_S, experts)
        rank_S = chosen_SE.cumsum(0).gather(1, routing.expert_S[:, None]).squeeze(1) - 1
        dropped_S = rank_S >= capacity
        slot_S = (routing.expert_S * capacity + rank_S).masked_fill(dropped_S, 0)
        gate_S = routing.gate_S.masked_fill(dropped_S, 0.0)
        weights = x_SD.new_zeros(tokens, experts * capacity)
        weights = weights.scatter(1, slot_S[:, None], gate_S[:, None])
        combine_SEC = weights.view(tokens, experts, capacity)
        return routing.balance_loss, combine_SEC, combine_SEC.bool()


class FairscaleFFN(nn.Module):
    """A MOELayer with the interface of SwitchFFN, a `gate` and copies of the experts of `ours`.

    It needs a process group.
    """

    def __init__(self, ours: SwitchFFN, gate: nn.Module):
        super().__init__()
        # Not at the top: fairseq_alma, imported before, silences fairscale's warnings.
        from fairscale.nn import MOELayer

        _, hidden, dim = ours.w1.shape
        experts = nn.ModuleList()
        for w1_FD, b1_F, w2_DF, b2_D in zip(ours.w1, ours.b1, ours.w2, ours.b2, strict=True):
            expert = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))
            weights = {"0.weight": w1_FD, "0.bias": b1_F, "2.weight": w2_DF, "2.bias": b2_D}
            expert.load_state_dict(weights)
            experts.append(expert)
        self.layer = MOELayer(gate, experts).to(ours.w1.device)

    def forward(self, x_BTD: Tensor) -> tuple[Tensor, SimpleNamespace]:
        """Output (B, T, D), and a namespace with the `balance_loss` that the gate defines."""
        # MOELayer wants the first dimension to be a multiple of E.
        y_S1D = self.layer(x_BTD.reshape(-1, 1, x_BTD.size(-1)))
        return y_S1D.view(x_BTD.shape), SimpleNamespace(balance_loss=self.layer.l_aux)


def with_top1_gate(ours: SwitchFFN) -> FairscaleFFN:
    """The function of `ours`, with copies of its weights."""
    return FairscaleFFN(ours, Top1Gate(copy.deepcopy(ours.router), ours.capacity_factor))


def with_top2_gate(ours: SwitchFFN) -> FairscaleFFN:
    """fairscale's own gate, for two experts a token, with copies of the weights of `ours`."""
    from fairscale.nn import Top2Gate

    _, _, dim = ours.w1.shape
    gate = Top2Gate(dim, ours.experts)
    gate.wg.load_state_dict({"weight": ours.router.weight})
    return FairscaleFFN(ours, gate)
