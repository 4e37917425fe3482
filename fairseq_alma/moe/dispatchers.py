"""Move tokens to their experts and back by index.

A dispatcher copies the kept tokens into rows (R, D), sorted by expert, applies each expert to its
rows, and copies the outputs back to the order of the tokens. Memory is O(S * D): no tensor has the
shape (S, E, C) of the one-hot formulation. The subclasses differ in the layout of the rows.
"""

from collections.abc import MutableMapping

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from fairseq_alma.moe.router import Routing


class Dispatcher:
    """Base class: the mapping between tokens and rows.

    Expert e keeps its first kept_E[e] tokens in position order (docs/design.md, Switch layer); they
    take the rows first_E[e], first_E[e] + 1, ... Other tokens are dropped.

    Args:
        routing: the routing of S tokens.
        first_E: the row of each expert's first token.
        rows: R. Unused rows copy token 0; their outputs are never read.

    Attributes:
        source_R: the token that each row copies.
        target_S: the row of each token; R if it is dropped.
        row_S: the row of each token; 0 if it is dropped.
        dropped_S: whether a token has no row, because it is dropped or padding.
    """

    def __init__(self, routing: Routing, first_E: Tensor, rows: int):
        counts_E = routing.counts_E
        # A GPU sorts 32-bit numbers in half the passes of 64-bit ones.
        order_S = torch.sort(routing.expert_S.int(), stable=True).indices
        token_S = torch.arange(len(order_S), device=counts_E.device)
        position_S = torch.empty_like(order_S).scatter_(0, order_S, token_S)
        start_E = counts_E.cumsum(0) - counts_E
        # Padding tokens (expert E) are sorted behind those of the last expert. Counted as its
        # tokens, they are behind those that it keeps, and dropped.
        expert_S = routing.expert_S.clamp(max=len(counts_E) - 1)
        end_S = (start_E + routing.kept_E).index_select(0, expert_S)
        row_S = (first_E - start_E).index_select(0, expert_S).add_(position_S)
        self.dropped_S = position_S >= end_S
        self.target_S = row_S.masked_fill(self.dropped_S, rows)
        self.row_S = row_S.masked_fill_(self.dropped_S, 0)
        # Dropped tokens scatter into one extra last row.
        source_R = token_S.new_zeros(rows + 1)
        self.source_R = source_R.scatter_(0, self.target_S, token_S)[:rows]

    def to_rows(self, x_SD: Tensor) -> Tensor:
        """The token of each row, (R, D)."""
        return _ToRows.apply(x_SD, self.source_R, self.row_S, self.dropped_S)

    def linear(self, x_RI: Tensor, weight_EOI: Tensor, bias_EO: Tensor) -> Tensor:
        """Apply to each row the weight and bias of its expert, (R, O)."""
        raise NotImplementedError

    def to_tokens(self, y_RD: Tensor, gate_S: Tensor) -> Tensor:
        """The row of each token times its gate, (S, D); 0 for dropped tokens and padding."""
        gate_S = gate_S.masked_fill(self.dropped_S, 0.0)
        return _ToTokens.apply(y_RD, gate_S, self.source_R, self.row_S, self.target_S)


class LoopDispatcher(Dispatcher):
    """One row per kept token, one matrix product per expert.

    For CPUs, and for batches without a capacity: it reads the number of tokens of each expert on
    the host, which is a sync on a GPU.
    """

    def __init__(self, routing: Routing):
        self.sizes: list[int] = routing.kept_E.tolist()
        super().__init__(routing, routing.kept_E.cumsum(0) - routing.kept_E, sum(self.sizes))

    def linear(self, x_RI: Tensor, weight_EOI: Tensor, bias_EO: Tensor) -> Tensor:
        return _LoopLinear.apply(x_RI, weight_EOI, bias_EO, self.sizes)


class PaddedDispatcher(Dispatcher):
    """C rows per expert in one batched product, C rounded up to a multiple of 8 for tensor
    cores."""

    def __init__(self, routing: Routing, capacity: int):
        rows_of_expert = -(-max(capacity, 1) // 8) * 8
        rows = len(routing.counts_E) * rows_of_expert
        first_E = torch.arange(0, rows, rows_of_expert, device=routing.counts_E.device)
        super().__init__(routing, first_E, rows)

    def linear(self, x_RI: Tensor, weight_EOI: Tensor, bias_EO: Tensor) -> Tensor:
        x_ECI = x_RI.view(weight_EOI.size(0), -1, x_RI.size(1))
        return torch.baddbmm(bias_EO[:, None], x_ECI, weight_EOI.transpose(1, 2)).flatten(0, 1)


def fastest_dispatcher(x_SD: Tensor, routing: Routing, capacity: int | None) -> Dispatcher:
    """The fastest dispatcher on the device of `x_SD`.

    On a GPU with a capacity, it never syncs with the host. `capacity` None: no limit.
    """
    # No grouped_mm: training on an H200 is slower with it, and torch.compile breaks it
    # (docs/design.md).
    if capacity is None or x_SD.device.type == "cpu":
        return LoopDispatcher(routing)
    return PaddedDispatcher(routing, capacity)


def as_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast the tensors to autocast's dtype for matrix products; unchanged where autocast is off."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    return tuple(tensor.to(torch.get_autocast_dtype(device)) for tensor in tensors)


class _ToRows(torch.autograd.Function):
    """Tokens (S, D) to rows (R, D) by index_select, in the backward pass too.

    autograd's own backward would scatter-add. Each kept token has exactly one row, so its gradient
    is that row's.
    """

    @staticmethod
    def forward(ctx, x_SD: Tensor, source_R: Tensor, row_S: Tensor, dropped_S: Tensor) -> Tensor:
        ctx.save_for_backward(row_S, dropped_S)
        return x_SD.index_select(0, source_R)

    @staticmethod
    def backward(ctx, grad_RD: Tensor):
        row_S, dropped_S = ctx.saved_tensors
        if not len(grad_RD):
            return grad_RD.new_zeros(len(row_S), grad_RD.size(1)), None, None, None
        return (
            grad_RD.index_select(0, row_S).masked_fill_(dropped_S[:, None], 0.0),
            None,
            None,
            None,
        )


class _ToTokens(torch.autograd.Function):
    """Rows (R, D) to tokens (S, D), times the gates (S,), by index_select in both directions."""

    @staticmethod
    def forward(
        ctx, y_RD: Tensor, gate_S: Tensor, source_R: Tensor, row_S: Tensor, target_S: Tensor
    ):
        ctx.gate_dtype = gate_S.dtype
        gate_S = gate_S.to(y_RD.dtype)
        ctx.save_for_backward(y_RD, gate_S, source_R, row_S, target_S)
        if not len(y_RD):
            return y_RD.new_zeros(len(row_S), y_RD.size(1))
        return y_RD.index_select(0, row_S).mul_(gate_S[:, None])

    @staticmethod
    def backward(ctx, grad_SD: Tensor):
        y_RD, gate_S, source_R, row_S, target_S = ctx.saved_tensors
        rows = len(y_RD)
        if not rows:
            by_gate = torch.zeros_like(gate_S, dtype=ctx.gate_dtype)
            return torch.zeros_like(y_RD), by_gate, None, None, None
        # The gate of an unused row is 0, so it contributes zero gradient to the experts.
        gate_R = gate_S.new_zeros(rows + 1).scatter_(0, target_S, gate_S)[:rows]
        by_rows = grad_SD.index_select(0, source_R).mul_(gate_R[:, None])
        by_gate = y_RD.index_select(0, row_S).mul_(grad_SD).sum(1, dtype=ctx.gate_dtype)
        return by_rows, by_gate, None, None, None


class _LoopLinear(torch.autograd.Function):
    """Rows (R, I) to (R, O): one product per expert, whose rows are consecutive.

    `sizes[e]` is the number of rows of expert e. The backward pass writes each expert's gradient
    into its slice of one (E, O, I) tensor; torch.stack would copy them.
    """

    @staticmethod
    def forward(ctx, x_RI: Tensor, weight_EOI: Tensor, bias_EO: Tensor, sizes: list[int]) -> Tensor:
        ctx.save_for_backward(x_RI, weight_EOI)
        ctx.sizes = sizes
        y_RO = x_RI.new_empty(x_RI.size(0), weight_EOI.size(1))
        for y, x, w, b in zip(
            y_RO.split(sizes), x_RI.split(sizes), weight_EOI, bias_EO, strict=True
        ):
            torch.addmm(b, x, w.t(), out=y)
        return y_RO

    @staticmethod
    def backward(ctx, grad_RO: Tensor):
        x_RI, weight_EOI = ctx.saved_tensors
        by_x = torch.empty_like(x_RI)
        by_weight = _gradient_buffer(weight_EOI)
        by_bias = weight_EOI.new_empty(weight_EOI.shape[:2])
        rows = (tensor.split(ctx.sizes) for tensor in (grad_RO, x_RI, by_x))
        for g, x, by_x_e, w, by_w, by_b in zip(*rows, weight_EOI, by_weight, by_bias, strict=True):
            torch.mm(g, w, out=by_x_e)
            torch.mm(g.t(), x, out=by_w)
            torch.sum(g, 0, out=by_b)
        return by_x, by_weight, by_bias, None


_references = getattr(torch._C, "_storage_Use_Count", None)
"""Function that counts the references to a storage, private to torch.

If torch has it no longer, `_gradient_buffer` reuses no memory.
"""
_buffers: MutableMapping[Tensor, torch.UntypedStorage] = WeakTensorKeyDictionary()


def _gradient_buffer(weight: Tensor) -> Tensor:
    """An uninitialised tensor like `weight`, a leaf parameter, for its gradient.

    Reuses the memory of the parameter's previous gradient if nothing refers to it any more. malloc
    returns freed blocks above 32 MB to the kernel, which zeroes each page before it hands it out
    again; reuse saves 15% of the time of a layer with 32 experts.
    """
    if torch.compiler.is_compiling():
        return torch.empty_like(weight)
    memory = _buffers.get(weight)
    if memory is None or _references is None or _references(memory._cdata) > 1:
        memory = torch.empty_like(weight).untyped_storage()
        if weight.is_leaf:
            _buffers[weight] = memory
    return weight.new_empty(0).set_(memory, 0, weight.shape, weight.stride())
