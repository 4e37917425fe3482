"""The Switch layer (Fedus et al., 2021): a router that sends each token to one of E expert FFNs.

Shapes: T time, B sequences, S = B * T tokens, D model, F hidden, E experts, C capacity, R rows.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_alma.moe.dispatch import Groups, as_autocast, best_layout, dispatch, grouped_linear
from fairseq_alma.moe.expert_parallel import Shards

STACKED = ("w1", "b1", "w2", "b2")
"""The experts' parameters, each (E, …)."""
_LAST_PASS = ("padding_mask", "routing", "balance_loss", "kept", "expert_of")
"""What a SwitchFFN keeps of its last forward pass."""


@dataclass
class Routing:
    """Where the S tokens of one forward pass go.

    Padding is sent to the non-existent expert E, so that it takes no capacity and no part in the loss.
    """

    expert: Tensor
    """(S,) chosen expert, E for padding."""
    gate: Tensor
    """(S,) fp32 weight of the expert's output."""
    probs: Tensor
    """(S, E) fp32 probability of every expert."""
    counts: Tensor
    """(E,) tokens that chose each expert, dropped ones included."""

    def detach(self) -> "Routing":
        """The same values without autograd's graph."""
        return Routing(self.expert, self.gate.detach(), self.probs.detach(), self.counts)


class Router(nn.Module):
    """Top-1 router: softmax over all experts in fp32, then argmax (Switch Transformer, eq. 1 and 2).

    `copies` (E,) is what makes `preserve` growth exact: of how many copies of one expert each is one, m if
    it was split in m. Its probability is that of one of m copies, z - log m in the softmax, and its weight
    that of all m, so that the softmax's sum and every weight stay as they were. An integer: half precision
    would round log m, and all weights with it.

    `parent` (E,) makes the gate a tree (paper, section 4.2 and eq. 3): an expert j split from i = parent[j]
    has no part in that softmax. Its row of `weight` is the gate of the split, z_j = weight[j] . x: i keeps
    sigmoid(z_j) of its probability and j gets the rest. -1, as built, is an expert of the softmax. The tree
    is read when a state dict is loaded.
    """

    def __init__(self, dim: int, experts: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, dim))
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))  # as nn.Linear does
        self.register_buffer("copies", torch.ones(experts, dtype=torch.int64))
        self.copies: Tensor
        self.register_buffer("parent", torch.full((experts,), -1))
        self.parent: Tensor
        self.splits: list[tuple[int, int]] = []  # `parent` as (j, i), in order; no device to wait for
        self.register_load_state_dict_pre_hook(Router._upgrade)
        self.register_load_state_dict_post_hook(Router._read_splits)

    def _upgrade(self, state: dict[str, Any], prefix: str, *_) -> None:
        upgrade_router(state, prefix)

    def _read_splits(self, _) -> None:
        self.splits = [(new, old) for new, old in enumerate(self.parent.tolist()) if old >= 0]

    def forward(self, tokens: Tensor, padding: Tensor | None = None) -> Routing:
        """Route `tokens` (S, D); `padding` (S,) is true where there is nothing to route."""
        experts = self.weight.size(0)
        with torch.autocast(tokens.device.type, enabled=False):
            logits = F.linear(tokens.float(), self.weight.float())
            root = logits.masked_fill(self.parent >= 0, -math.inf) if self.splits else logits
            probs = torch.softmax(root - self.copies.float().log(), dim=-1)
        expert = root.argmax(dim=-1)
        gate = probs.gather(1, expert[:, None]).squeeze(1) * self.copies[expert]
        if self.splits:
            expert, gate, probs = self._descend(logits, expert, gate, probs)
        if padding is not None:
            expert = expert.masked_fill(padding, experts)
        # Not bincount, which waits for the device to know its result's size.
        counts = expert.new_zeros(experts + 1).scatter_add_(0, expert, torch.ones_like(expert))[:experts]
        return Routing(expert, gate, probs, counts)

    def _descend(
        self, logits: Tensor, expert: Tensor, gate: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """From the root's choice down the larger branches: expert (S,), gate (S,) and probs (S, E).

        A branch that is taken weighs 1, so that a split changes no output, and has the gradient of its
        probability (straight-through, as the paper's hard gates), which is what trains it.
        """
        stay, move = torch.sigmoid(logits).unbind(1), torch.sigmoid(-logits).unbind(1)
        moves = (logits < 0).unbind(1)
        leaves = list(probs.unbind(1))
        taken = torch.zeros_like(gate)
        for new, old in self.splits:  # a node comes before those below it
            leaves[old], leaves[new] = leaves[old] * stay[new], leaves[old] * move[new]
            here = expert == old
            taken = taken + torch.where(moves[new], move[new], stay[new]) * here
            expert = torch.where(here & moves[new], new, expert)
        # The product of 1 + (q - q.detach()) over the branches has this value and gradient.
        return expert, gate * (1 + (taken - taken.detach())), torch.stack(leaves, dim=1)


def upgrade_router(state: dict[str, Any], prefix: str) -> None:
    """Give a router that was saved by an earlier version today's buffers; in place, `prefix` ends in a dot.

    First there were no trees, then the logarithm of `copies`, which half precision may have rounded.
    """
    weight = state.get(f"{prefix}weight")
    if weight is not None:
        state.setdefault(f"{prefix}parent", torch.full((len(weight),), -1))
    if (logs := state.pop(f"{prefix}log_multiplicity", None)) is not None:
        state[f"{prefix}copies"] = logs.float().exp().round().long()


def load_balancing_loss(routing: Routing) -> Tensor:
    """E * sum_e f_e P_e, which is 1 at perfect balance (Switch Transformer, eq. 4), a scalar.

    f is the share of the tokens that chose expert e, before any are dropped; P its mean probability.
    """
    routed = routing.counts.sum().clamp(min=1)
    real = (routing.expert < routing.probs.size(1)).unsqueeze(1)
    mean_probs = (routing.probs * real).sum(0) / routed
    return routing.probs.size(1) * torch.dot(routing.counts / routed, mean_probs)


class SwitchFFN(nn.Module):
    """E expert FFNs fc2(act(fc1(x))) behind a top-1 router; output p * expert(x), or 0 if dropped.

    Args:
        dim, hidden: D and F. experts: E.
        capacity_factor: in training an expert takes at most C = ceil(capacity_factor * S / E) tokens of a
            batch; 0 means no limit.
        eval_capacity: the limit in evaluation as a fraction of S, negative for none: perplexity then does
            not depend on the batch.
        activation, activation_dropout: as in the dense FFN.

    After a forward pass `routing` (without a graph), `balance_loss` (with one) and `kept` (E,) describe it,
    and `expert_of` (B, T) holds each token's expert (E for padding). Copies and pickles are without them.
    """

    def __init__(
        self,
        dim: int,
        hidden: int,
        experts: int,
        capacity_factor: float,
        eval_capacity: float,
        activation,
        activation_dropout: nn.Module,
    ):
        super().__init__()
        self.router = Router(dim, experts)
        # Stacked (E, out, in): one tensor to copy when growing, one gradient bucket.
        self.w1 = nn.Parameter(torch.empty(experts, hidden, dim))
        self.b1 = nn.Parameter(torch.empty(experts, hidden))
        self.w2 = nn.Parameter(torch.empty(experts, dim, hidden))
        self.b2 = nn.Parameter(torch.empty(experts, dim))
        for weight, fan_in in ((self.w1, dim), (self.b1, dim), (self.w2, hidden), (self.b2, hidden)):
            nn.init.uniform_(weight, -(fan_in**-0.5), fan_in**-0.5)  # as nn.Linear does
        self.capacity_factor = capacity_factor
        self.eval_capacity = eval_capacity
        self.activation = activation
        self.activation_dropout = activation_dropout
        self.padding_mask: Tensor | None = None
        self.shards: Shards | None = None
        self.routing: Routing
        self.balance_loss: Tensor
        self.kept: Tensor
        self.expert_of: Tensor

    def __getstate__(self) -> dict[str, Any]:
        """Without the last pass: deepcopy refuses tensors that have a graph."""
        state = super().__getstate__()
        return {key: value for key, value in state.items() if key not in _LAST_PASS} | {"padding_mask": None}

    @property
    def experts(self) -> int:
        """E, the number of experts."""
        return self.router.weight.size(0)

    def capacity(self, tokens: int) -> int | None:
        """C for a batch of `tokens`, or None where nothing is dropped."""
        if self.training:
            return math.ceil(self.capacity_factor * tokens / self.experts) if self.capacity_factor else None
        return math.ceil(self.eval_capacity * tokens) if self.eval_capacity >= 0 else None

    def forward(self, x: Tensor) -> Tensor:
        """Apply to `x` (T, B, D), fairseq's layout; `padding_mask` (B, T) is set by the caller."""
        time, batch, dim = x.shape
        tokens = x.transpose(0, 1).reshape(-1, dim)  # batch-major: not every sequence's end is dropped
        padding = None if self.padding_mask is None else self.padding_mask.reshape(-1)
        routing = self.router(tokens, padding)
        self.routing = routing.detach()
        self.balance_loss = load_balancing_loss(routing)
        # The capacity counts the padding too: it must not depend on what a later sequence holds.
        capacity = self.capacity(tokens.size(0))
        self.kept = routing.counts if capacity is None else routing.counts.clamp(max=capacity)
        self.expert_of = routing.expert.view(batch, time)
        tokens, *weights = as_autocast(tokens, self.w1, self.b1, self.w2, self.b2)
        layout = best_layout(tokens, capacity)
        if self.shards:  # as many rows as any process wants
            most = self.capacity(self.shards.tokens)
            layout = self.shards.largest(routing.counts.max()) if most is None else most
        way = dispatch(routing.expert, routing.counts, self.kept, layout)
        rows = self._experts(way.rows(tokens), way.groups, *weights)
        return way.tokens(rows, routing.gate).view(batch, time, dim).transpose(0, 1)

    def _experts(self, rows: Tensor, groups: Groups, *weights: Tensor) -> Tensor:
        """Each row through its expert: (R, D) -> (R, D)."""
        w1, b1, w2, b2 = weights
        if self.shards:
            rows = self.shards.send(rows, len(w1))
        hidden = self.activation_dropout(self.activation(grouped_linear(rows, w1, b1, groups)))
        rows = grouped_linear(hidden, w2, b2, groups)
        return self.shards.send_back(rows, len(w1)) if self.shards else rows

    def share_out(self, shards: Shards) -> None:
        """Keep this process's experts only; the state dict still has all, and every process has to ask."""
        self.shards = shards
        for name in STACKED:
            part = nn.Parameter(shards.mine(getattr(self, name).data))
            vars(part)["expert"] = (
                True  # fairseq leaves such a gradient out when it averages those of all processes
            )
            # All processes' tokens have been here: their mean is what is left of the average.
            part.register_hook(lambda grad: grad / shards.size)
            setattr(self, name, part)

        def whole(layer: SwitchFFN, state: dict[str, Tensor], prefix: str, _) -> None:
            for name in STACKED:
                state[prefix + name] = shards.whole(state[prefix + name])

        def mine(layer: SwitchFFN, state: dict[str, Tensor], prefix: str, *_) -> None:
            for name in STACKED:
                state[prefix + name] = shards.mine(state[prefix + name])

        self._register_state_dict_hook(whole)
        self.register_load_state_dict_pre_hook(mine)


def switch_layers(model: nn.Module) -> dict[str, SwitchFFN]:
    """The model's Switch layers by the number of their decoder block (from 0), in order.

    In an ensemble the number of the member comes before it: "1.3" is in block 3 of member 1.
    """
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, SwitchFFN):
            found[".".join(part for part in name.split(".") if part.isdigit())] = module
    return found


@torch.no_grad()
def routing_stats(layer: SwitchFFN) -> dict[str, Tensor]:
    """Sums over the routed tokens of the last forward pass (add them over batches, divide by tokens).

    tokens, dropped, entropy, top1, balance: scalars; load: (E,).
    """
    routing = layer.routing
    real = routing.expert < layer.experts
    tokens = routing.counts.sum()
    entropy = torch.special.entr(routing.probs).sum(-1)
    top1 = routing.probs.amax(-1)
    return {
        "tokens": tokens,
        "dropped": tokens - layer.kept.sum(),
        "entropy": (entropy * real).sum(),
        "top1": (top1 * real).sum(),
        "balance": layer.balance_loss.detach() * tokens,
        "load": routing.counts,
    }


@torch.no_grad()
def expert_losses(layer: SwitchFFN, nll: Tensor) -> Tensor:
    """Sum the per-token loss `nll` (B, T) over the tokens that chose each expert, (E,) float64.

    What decides the losing expert (paper, App. A: "cumulative loss").
    """
    sums = torch.zeros(layer.experts + 1, dtype=torch.float64, device=nll.device)
    sums.index_add_(0, layer.expert_of.reshape(-1), nll.reshape(-1).double())
    return sums[:-1]
