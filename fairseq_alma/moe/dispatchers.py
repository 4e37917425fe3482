"""Move tokens to their experts and back by index: O(S * D) memory, no (S, E, C) tensor.

A dispatcher sorts the kept tokens into rows by expert, in position order, and applies the experts' weights to
them. Each has its own layout of the rows:

* LoopDispatcher: the kept tokens only, one matrix product per expert. Fastest on a CPU; on other devices the
  sizes need a host sync.
* GroupedDispatcher: S rows, all products in one grouped_mm, which reads the sizes on the device. For bf16 on
  H100 and B200 (compute capability 9 and 10).
* PaddedDispatcher: C rows per expert, one batched product. For other GPUs and dtypes.
* ExpertParallelDispatcher (see `expert_parallel`): C rows per expert of every process.

Shapes: S tokens, R rows, D model, I inputs, O outputs, E experts, C capacity.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from fairseq_alma.moe.linear import GroupedLinear, LoopLinear, padded_linear
from fairseq_alma.moe.router import Routing


class Dispatcher:
    """Assigns rows to the first kept_E[e] tokens of each expert e, in position order.

    Priority by probability instead of position would let later tokens decide which earlier ones are dropped.

    Args:
        routing: of the tokens.
        first_E: the row of each expert's first token.
        rows: R. Unused rows copy token 0; their outputs are never read.
    """

    def __init__(self, routing: Routing, first_E: Tensor, rows: int):
        counts_E, device = routing.counts_E, routing.counts_E.device
        sorted_S, order_S = torch.sort(routing.expert_S, stable=True)
        # Index E is padding: it starts after all tokens and keeps none.
        rank_S = torch.arange(len(order_S), device=device)
        rank_S = rank_S - F.pad(counts_E.cumsum(0) - counts_E, (0, 1))[sorted_S]
        kept_S = rank_S < F.pad(routing.kept_E, (0, 1))[sorted_S]
        row_S = torch.where(kept_S, F.pad(first_E, (0, 1))[sorted_S] + rank_S, rows)
        # Dropped tokens scatter into one extra last row.
        source_R = torch.zeros(rows + 1, dtype=torch.int64, device=device).scatter_(0, row_S, order_S)
        self.source_R = source_R[:rows]
        row_S = torch.empty_like(row_S).scatter_(0, order_S, row_S)
        self.dropped_S = row_S == rows
        self.row_S = row_S.masked_fill(self.dropped_S, 0)

    def to_rows(self, x_SD: Tensor) -> Tensor:
        """The token of each row, (R, D)."""
        return _ToRows.apply(x_SD, self.source_R, self.row_S, self.dropped_S)

    def linear(self, x_RI: Tensor, weight_EOI: Tensor, bias_EO: Tensor) -> Tensor:
        """Apply to each row the weight and bias of its expert, (R, O)."""
        raise NotImplementedError

    def to_tokens(self, y_RD: Tensor, gate_S: Tensor) -> Tensor:
        """The row of each token times its gate, (S, D); 0 for dropped tokens and padding."""
        gate_S = gate_S.masked_fill(self.dropped_S, 0.0)
        return _ToTokens.apply(y_RD, gate_S, self.source_R, self.row_S, self.dropped_S)


class LoopDispatcher(Dispatcher):
    """Rows of kept tokens only; needs a host sync for their numbers."""

    def __init__(self, routing: Routing):
        self.sizes: list[int] = routing.kept_E.tolist()
        super().__init__(routing, routing.kept_E.cumsum(0) - routing.kept_E, sum(self.sizes))

    def linear(self, x_RI: Tensor, weight_EOI: Tensor, bias_EO: Tensor) -> Tensor:
        """One product per expert."""
        return LoopLinear.apply(x_RI, weight_EOI, bias_EO, self.sizes)


class GroupedDispatcher(Dispatcher):
    """S rows; those of dropped tokens follow the last expert's and are computed with it."""

    def __init__(self, routing: Routing):
        ends_E = routing.kept_E.cumsum(0)
        super().__init__(routing, ends_E - routing.kept_E, len(routing.expert_S))
        self.ends_E = ends_E.to(torch.int32)
        self.ends_E[-1] = len(routing.expert_S)

    def linear(self, x_RI: Tensor, weight_EOI: Tensor, bias_EO: Tensor) -> Tensor:
        """One grouped product."""
        return GroupedLinear.apply(x_RI, weight_EOI, bias_EO, self.ends_E)


class PaddedDispatcher(Dispatcher):
    """C rows per expert, rounded up to 8 or a multiple, which half-precision tensor cores need."""

    def __init__(self, routing: Routing, capacity: int):
        each, experts = -(-max(capacity, 1) // 8) * 8, len(routing.counts_E)
        rows = experts * each
        super().__init__(routing, torch.arange(0, rows, each, device=routing.counts_E.device), rows)

    def linear(self, x_RI: Tensor, weight_EOI: Tensor, bias_EO: Tensor) -> Tensor:
        """One batched product."""
        return padded_linear(x_RI, weight_EOI, bias_EO)


def fastest_dispatcher(x_SD: Tensor, routing: Routing, capacity: int | None) -> Dispatcher:
    """The fastest dispatcher on the device of `x_SD`; with a capacity, one without a host sync."""
    if x_SD.device.type == "cpu":
        return LoopDispatcher(routing)
    # On other GPUs grouped_mm syncs and loops (pytorch issue 186620).
    if (
        x_SD.dtype == torch.bfloat16
        and hasattr(F, "grouped_mm")
        and torch.cuda.get_device_capability(x_SD.device)[0] in (9, 10)
    ):
        return GroupedDispatcher(routing)
    return LoopDispatcher(routing) if capacity is None else PaddedDispatcher(routing, capacity)


class _ToRows(torch.autograd.Function):
    """index_select in both directions: no two rows hold the same kept token, so backward adds nothing up."""

    @staticmethod
    def forward(ctx, x_SD: Tensor, source_R: Tensor, row_S: Tensor, dropped_S: Tensor) -> Tensor:
        ctx.save_for_backward(row_S, dropped_S)
        return x_SD.index_select(0, source_R)

    @staticmethod
    def backward(ctx, grad_RD: Tensor):
        row_S, dropped_S = ctx.saved_tensors
        if not len(grad_RD):
            return grad_RD.new_zeros(len(row_S), grad_RD.size(1)), None, None, None
        return grad_RD.index_select(0, row_S).masked_fill_(dropped_S[:, None], 0.0), None, None, None


class _ToTokens(torch.autograd.Function):
    """The inverse of `_ToRows`, times the gates."""

    @staticmethod
    def forward(
        ctx, y_RD: Tensor, gate_S: Tensor, source_R: Tensor, row_S: Tensor, dropped_S: Tensor
    ) -> Tensor:
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
        # The gate of an unused row is 0, so it contributes zero gradient to the experts.
        gate_R = gate_S.new_zeros(rows + 1).scatter_(0, row_S.masked_fill(dropped_S, rows), gate_S)[:-1]
        by_rows = grad_SD.index_select(0, source_R).mul_(gate_R[:, None].to(grad_SD.dtype))
        by_gate = y_RD.index_select(0, row_S).mul_(grad_SD).sum(1, dtype=gate_S.dtype)
        return by_rows, by_gate, None, None, None
