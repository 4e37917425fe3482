"""The router and the dispatch of 0324bce: 64-bit indices, and work that only padding and copied
experts need. Shapes as in `fairseq_alma.moe`."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fairseq_alma.moe.dispatchers import LoopDispatcher, as_autocast
from fairseq_alma.moe.layer import SwitchFFN
from fairseq_alma.moe.router import Router, Routing


def forward(
    self: SwitchFFN, x_BTD: Tensor, padding_BT: Tensor | None = None, largest_batch: int = 0
) -> tuple[Tensor, Routing]:
    """SwitchFFN.forward of one process."""
    del largest_batch
    x_SD = x_BTD.reshape(-1, x_BTD.size(-1))
    padding_S = None if padding_BT is None else padding_BT.reshape(-1)
    capacity = self.capacity(len(x_SD))
    routing = route(self.router, x_SD, padding_S, capacity)
    x_SD, w1_EFD, b1_EF, w2_EDF, b2_ED = as_autocast(x_SD, self.w1, self.b1, self.w2, self.b2)
    dispatcher: EarlierDispatcher
    if capacity is None or x_SD.device.type == "cpu":
        dispatcher = Loop(routing)
    else:
        dispatcher = Padded(routing, capacity)
    h_RF = self.activation(dispatcher.linear(dispatcher.to_rows(x_SD), w1_EFD, b1_EF))
    y_RD = dispatcher.linear(self.activation_dropout(h_RF), w2_EDF, b2_ED)
    y_SD = dispatcher.to_tokens(y_RD, routing.gate_S)
    return y_SD.view(x_BTD.shape), routing


def route(router: Router, x_SD: Tensor, padding_S: Tensor | None, capacity: int | None) -> Routing:
    """Router.forward."""
    tokens = len(x_SD)
    experts = len(router.weight)
    with torch.autocast(x_SD.device.type, enabled=False):
        logits_SE = F.linear(x_SD.float(), router.weight.float())
        roots_SE = logits_SE
        if router.splits:
            roots_SE = logits_SE.masked_fill(router.parent >= 0, -math.inf)
        probs_SE = torch.softmax(roots_SE - router.copies.float().log(), dim=-1)
    expert_S = roots_SE.argmax(dim=-1)
    gate_S = probs_SE.gather(1, expert_S[:, None]).squeeze(1) * router.copies[expert_S]
    if router.splits:
        expert_S, gate_S, probs_SE = router._descend(logits_SE, expert_S, gate_S, probs_SE)
    if padding_S is not None:
        expert_S = expert_S.masked_fill(padding_S, experts)
    counts_E = expert_S.new_zeros(experts + 1)
    counts_E = counts_E.scatter_add_(0, expert_S, torch.ones_like(expert_S))[:-1]
    kept_E = counts_E.clamp(max=tokens if capacity is None else capacity)
    loss = balance_loss(expert_S, probs_SE, counts_E)
    return Routing(expert_S, gate_S, probs_SE, counts_E, kept_E, loss)


def balance_loss(expert_S: Tensor, probs_SE: Tensor, counts_E: Tensor) -> Tensor:
    """load_balancing_loss, a scalar."""
    experts = probs_SE.size(1)
    tokens = counts_E.sum().clamp(min=1)
    real_S1 = (expert_S < experts).unsqueeze(1)
    mean_probs_E = (probs_SE * real_S1).sum(0) / tokens
    return experts * torch.dot(counts_E / tokens, mean_probs_E)


class EarlierDispatcher:
    """The dispatcher of that name."""

    def __init__(self, routing: Routing, first_E: Tensor, rows: int):
        counts_E = routing.counts_E
        device = counts_E.device
        sorted_S, order_S = torch.sort(routing.expert_S, stable=True)
        rank_S = torch.arange(len(order_S), device=device)
        rank_S = rank_S - F.pad(counts_E.cumsum(0) - counts_E, (0, 1))[sorted_S]
        kept_S = rank_S < F.pad(routing.kept_E, (0, 1))[sorted_S]
        row_S = torch.where(kept_S, F.pad(first_E, (0, 1))[sorted_S] + rank_S, rows)
        source_R = torch.zeros(rows + 1, dtype=torch.int64, device=device)
        source_R.scatter_(0, row_S, order_S)
        self.source_R = source_R[:rows]
        row_S = torch.empty_like(row_S).scatter_(0, order_S, row_S)
        self.dropped_S = row_S == rows
        self.row_S = row_S.masked_fill(self.dropped_S, 0)

    def to_rows(self, x_SD: Tensor) -> Tensor:
        """The token of each row, (R, D)."""
        return ToRows.apply(x_SD, self.source_R, self.row_S, self.dropped_S)

    def linear(self, x_RI: Tensor, weight_EOI: Tensor, bias_EO: Tensor) -> Tensor:
        """Apply to each row the weight and bias of its expert, (R, O)."""
        raise NotImplementedError

    def to_tokens(self, y_RD: Tensor, gate_S: Tensor) -> Tensor:
        """The row of each token times its gate, (S, D)."""
        gate_S = gate_S.masked_fill(self.dropped_S, 0.0)
        return ToTokens.apply(y_RD, gate_S, self.source_R, self.row_S, self.dropped_S)


class Loop(EarlierDispatcher):
    """LoopDispatcher, whose matrix products have not changed."""

    def __init__(self, routing: Routing):
        self.sizes: list[int] = routing.kept_E.tolist()
        super().__init__(routing, routing.kept_E.cumsum(0) - routing.kept_E, sum(self.sizes))

    def linear(self, x_RI: Tensor, weight_EOI: Tensor, bias_EO: Tensor) -> Tensor:
        of_today: Any = LoopDispatcher.linear
        return of_today(self, x_RI, weight_EOI, bias_EO)


class Padded(EarlierDispatcher):
    """PaddedDispatcher."""

    def __init__(self, routing: Routing, capacity: int):
        rows_of_expert = -(-max(capacity, 1) // 8) * 8
        rows = len(routing.counts_E) * rows_of_expert
        first_E = torch.arange(0, rows, rows_of_expert, device=routing.counts_E.device)
        super().__init__(routing, first_E, rows)

    def linear(self, x_RI: Tensor, weight_EOI: Tensor, bias_EO: Tensor) -> Tensor:
        x_ECI = x_RI.view(weight_EOI.size(0), -1, x_RI.size(1))
        return torch.baddbmm(bias_EO[:, None], x_ECI, weight_EOI.transpose(1, 2)).flatten(0, 1)


class ToRows(torch.autograd.Function):
    """Tokens (S, D) to rows (R, D)."""

    @staticmethod
    def forward(ctx, x_SD: Tensor, source_R: Tensor, row_S: Tensor, dropped_S: Tensor) -> Tensor:
        ctx.save_for_backward(row_S, dropped_S)
        return x_SD.index_select(0, source_R)

    @staticmethod
    def backward(ctx, grad_RD: Tensor):
        row_S, dropped_S = ctx.saved_tensors
        if not len(grad_RD):
            return grad_RD.new_zeros(len(row_S), grad_RD.size(1)), None, None, None
        by_tokens = grad_RD.index_select(0, row_S).masked_fill_(dropped_S[:, None], 0.0)
        return by_tokens, None, None, None


class ToTokens(torch.autograd.Function):
    """Rows (R, D) to tokens (S, D), times the gates (S,)."""

    @staticmethod
    def forward(
        ctx, y_RD: Tensor, gate_S: Tensor, source_R: Tensor, row_S: Tensor, dropped_S: Tensor
    ):
        ctx.save_for_backward(y_RD, gate_S, source_R, row_S, dropped_S)
        if not len(y_RD):
            return y_RD.new_zeros(len(row_S), y_RD.size(1))
        return y_RD.index_select(0, row_S).mul_(gate_S[:, None].to(y_RD.dtype))

    @staticmethod
    def backward(ctx, grad_SD: Tensor):
        y_RD, gate_S, source_R, row_S, dropped_S = ctx.saved_tensors
        rows = len(y_RD)
        if not rows:
            return torch.zeros_like(y_RD), torch.zeros_like(gate_S), None, None, None
        gate_R = gate_S.new_zeros(rows + 1)
        gate_R = gate_R.scatter_(0, row_S.masked_fill(dropped_S, rows), gate_S)[:-1]
        by_rows = grad_SD.index_select(0, source_R).mul_(gate_R[:, None].to(grad_SD.dtype))
        by_gate = y_RD.index_select(0, row_S).mul_(grad_SD).sum(1, dtype=gate_S.dtype)
        return by_rows, by_gate, None, None, None
