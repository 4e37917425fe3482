"""Top-1 routing: one expert and one weight for each token (Switch Transformer, Fedus et al.,
2021)."""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Routing(NamedTuple):
    """Where a Switch layer sends the S tokens of one forward pass.

    Padding goes to the nonexistent expert E, so it uses no capacity and does not count in the loss.
    """

    expert_S: Tensor  # chosen expert; E for padding
    gate_S: Tensor  # weight of the expert's output, fp32
    probs_SE: Tensor  # probability of each expert, fp32
    counts_E: Tensor  # tokens that chose each expert, dropped ones included
    kept_E: Tensor  # tokens within each expert's capacity
    balance_loss: Tensor  # load-balancing loss, a scalar


class Router(nn.Module):
    """Top-1 router: softmax over all experts in fp32, then argmax (Switch Transformer, eq. 1 and
    2).

    `parent` (E,) makes the router a tree (paper, section 4.2 and eq. 3) and gives row j of `weight`
    (E, D) one of two meanings; z_j is its dot product with the token:

    * parent[j] = -1, the initial value: j is a root, and z_j is its logit in the softmax.
    * parent[j] = i >= 0: j was split from expert i, and z_j is the gate of this split. Expert i
      keeps the fraction sigmoid(z_j) of its probability; j gets the rest.

    `copies` (E,) counts the copies of an expert, itself included, after `preserve` growth. With m
    copies, the logit of each is z - log m and its output is weighted by m times its probability.
    Neither the softmax's sum nor any output weight changes. The count is an integer because half
    precision would round log m.
    """

    def __init__(self, dim: int, experts: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, dim))
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))  # as nn.Linear does
        self.register_buffer("copies", torch.ones(experts, dtype=torch.int64))
        self.copies: Tensor
        self.register_buffer("parent", torch.full((experts,), -1))
        self.parent: Tensor
        self.splits: list[
            tuple[int, int]
        ] = []  # `parent` as pairs (j, i), kept on the host so that no pass syncs
        self.copied = False  # whether an expert has copies, kept on the host too
        self.register_load_state_dict_post_hook(Router._read_buffers)

    def _read_buffers(self, _) -> None:
        self.copied = bool((self.copies != 1).any())
        self.splits = [(new, old) for new, old in enumerate(self.parent.tolist()) if old >= 0]

    def forward(
        self, x_SD: Tensor, padding_S: Tensor | None = None, capacity: int | None = None
    ) -> Routing:
        """Route every token except padding.

        `capacity` is C, the most tokens per expert (None: no limit).
        """
        tokens = len(x_SD)
        experts = len(self.weight)
        with torch.autocast(x_SD.device.type, enabled=False):
            logits_SE = F.linear(x_SD.float(), self.weight.float())
            roots_SE = logits_SE
            if self.splits:
                roots_SE = logits_SE.masked_fill(self.parent >= 0, -math.inf)
            softmax_input_SE = roots_SE
            if self.copied:
                softmax_input_SE = roots_SE - self.copies.float().log()
            probs_SE = torch.softmax(softmax_input_SE, dim=-1)
        expert_S = roots_SE.argmax(dim=-1)
        gate_S = probs_SE.gather(1, expert_S[:, None]).squeeze(1)
        if self.copied:
            gate_S = gate_S * self.copies[expert_S]
        if self.splits:
            expert_S, gate_S, probs_SE = self._descend(logits_SE, expert_S, gate_S, probs_SE)
        if padding_S is not None:
            expert_S = expert_S.masked_fill(padding_S, experts)
        # scatter_add_ instead of bincount, whose output size needs a host sync.
        counts_E = expert_S.new_zeros(experts + 1)
        counts_E = counts_E.scatter_add_(0, expert_S, torch.ones_like(expert_S))[:-1]
        kept_E = counts_E.clamp(max=tokens if capacity is None else capacity)
        if padding_S is None:
            loss = load_balancing_loss(probs_SE, counts_E)
        else:
            loss = load_balancing_loss(probs_SE, counts_E, expert_S)
        return Routing(expert_S, gate_S, probs_SE, counts_E, kept_E, loss)

    def _descend(
        self, logits_SE: Tensor, expert_S: Tensor, gate_S: Tensor, probs_SE: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Walk each token down the tree, from the root that it chose to a leaf.

        Takes experts (S,), gates (S,) and probabilities (S, E) of the roots and returns those of
        the leaves. Every expert is a leaf of the tree that its root has grown into. At a split a
        token takes the more probable branch (hard gates of the paper, section 4.2). The branch
        multiplies the gate by 1, so a split changes no output, but has the gradient of the branch's
        probability (straight-through estimator).
        """
        stay = torch.sigmoid(logits_SE).unbind(1)
        move = torch.sigmoid(-logits_SE).unbind(1)
        moves = (logits_SE < 0).unbind(1)
        leaves = list(probs_SE.unbind(1))
        taken_S = torch.zeros_like(gate_S)
        for new, old in self.splits:  # ascending: a split precedes the splits below it
            parent_S = leaves[old]
            leaves[old] = parent_S * stay[new]
            leaves[new] = parent_S * move[new]
            at_split_S = expert_S == old
            taken_S = taken_S + torch.where(moves[new], move[new], stay[new]) * at_split_S
            expert_S = torch.where(at_split_S & moves[new], new, expert_S)
        # Straight-through: a factor 1 + (q - q.detach()) per taken branch has the value 1 and the
        # gradient of its probability q. With q as sums, the product of the factors is this one.
        return expert_S, gate_S * (1 + (taken_S - taken_S.detach())), torch.stack(leaves, dim=1)


def load_balancing_loss(
    probs_SE: Tensor, counts_E: Tensor, expert_S: Tensor | None = None
) -> Tensor:
    """E * sum_e f_e P_e, a scalar; 1 at perfect balance (Switch Transformer, eq. 4).

    f_e is the fraction of tokens that chose expert e before any are dropped, P_e the mean of its
    probability. `expert_S` is needed only with padding, which it leaves out (expert E).
    """
    experts = probs_SE.size(1)
    tokens: Tensor | int
    if expert_S is None:
        tokens = max(len(probs_SE), 1)
    else:
        tokens = counts_E.sum().clamp(min=1)
        probs_SE = probs_SE * (expert_S < experts).unsqueeze(1)
    mean_probs_E = probs_SE.sum(0) / tokens
    return experts * torch.dot(counts_E / tokens, mean_probs_E)
