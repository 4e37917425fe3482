"""Tokens to their experts and back, by index: no (S, E, C) tensor, memory O(S * D).

Each expert's tokens are put in consecutive rows, in position order. The rows lie in one of three ways:

* loop: the kept tokens only, a matrix product for each expert. The way of the CPU; elsewhere its sizes
  have to be waited for.
* grouped: S rows, all experts' products in one grouped_mm, which reads its sizes on the device. The way of
  bf16 on H100 and B200 (compute capability 9 and 10).
* padded: C rows for each expert, one batched product. The way of other GPUs and types, and of expert
  parallelism.

Shapes: S tokens, E experts, C capacity, R rows, D model.
"""

from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

Layout = Literal["loop", "grouped"] | int
"""Of these the last is padded: the rows of each expert, C at least."""
Groups = list[int] | Tensor | int
"""Where each expert's rows are: their number (loop), their end (grouped, (E,) int32) or C (padded)."""


def best_layout(x: Tensor, capacity: int | None) -> Layout:
    """How to lay out `x` (S, D) on its device: never with a wait for the device, if there is a capacity."""
    if x.device.type == "cpu":
        return "loop"
    # Elsewhere grouped_mm waits for its sizes and loops (pytorch issue 186620).
    if (
        x.dtype == torch.bfloat16
        and hasattr(F, "grouped_mm")
        and torch.cuda.get_device_capability(x.device)[0] in (9, 10)
    ):
        return "grouped"
    return "loop" if capacity is None else capacity


@dataclass
class Dispatch:
    """Which row each token goes to. A row without token holds token 0, and nothing reads what it becomes."""

    source: Tensor
    """(R,) the token in each row."""
    row: Tensor
    """(S,) the row of each token, 0 for one that is dropped."""
    dropped: Tensor
    """(S,) true for the tokens without row, padding among them."""
    groups: Groups
    """Each expert's rows."""

    def rows(self, tokens: Tensor) -> Tensor:
        """(S, D) -> (R, D)."""
        return _ToRows.apply(tokens, self.source, self.row, self.dropped)

    def tokens(self, rows: Tensor, gate: Tensor) -> Tensor:
        """(R, D) -> (S, D), times each token's `gate` (S,); 0 for tokens that were dropped."""
        gate = gate.masked_fill(self.dropped, 0.0)
        return _ToTokens.apply(rows, gate, self.source, self.row, self.dropped)


def dispatch(expert: Tensor, counts: Tensor, kept: Tensor, layout: Layout) -> Dispatch:
    """Rows for tokens with a chosen `expert` (S,), E for padding; `counts` (E,) have chosen each.

    `kept` (E,) of an expert's tokens get one: the first, in position order, never the most probable, which
    would let the future decide what is dropped.
    """
    experts, device = counts.numel(), counts.device
    last = kept.cumsum(0)
    first = last - kept
    groups: Groups
    if layout == "loop":
        groups = kept.tolist()
        size = sum(groups)
    elif layout == "grouped":
        size = expert.numel()
        groups = last.to(torch.int32)
        groups[-1] = size  # rows without token are the last expert's, to leave none undefined
    else:
        groups = -(-max(layout, 1) // 8) * 8  # the sizes that half-precision tensor cores want; never none
        size = experts * groups
        first = torch.arange(0, size, groups, device=device)
    chosen, order = torch.sort(expert, stable=True)
    # Of padding, E, none are kept.
    rank = torch.arange(expert.numel(), device=device) - F.pad(counts.cumsum(0) - counts, (0, 1))[chosen]
    row = torch.where(rank < F.pad(kept, (0, 1))[chosen], F.pad(first, (0, 1))[chosen] + rank, size)
    # Row `size` takes what is dropped; there may be none else.
    source = torch.zeros(size + 1, dtype=torch.int64, device=device).scatter_(0, row, order)[:size]
    row = torch.empty_like(row).scatter_(0, order, row)
    dropped = row == size
    return Dispatch(source, row.masked_fill(dropped, 0), dropped, groups)


def grouped_linear(x: Tensor, weight: Tensor, bias: Tensor, groups: Groups) -> Tensor:
    """Each row of `x` (R, in) by its expert's `weight` (E, out, in) and `bias` (E, out): (R, out)."""
    if isinstance(groups, int):
        batch = x.view(weight.size(0), -1, x.size(1))
        return torch.baddbmm(bias[:, None], batch, weight.transpose(1, 2)).flatten(0, 1)
    return (_Grouped if isinstance(groups, Tensor) else _Loop).apply(x, weight, bias, groups)


def as_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in the type that autocast, if it is on, gives matrix products."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    return tuple(tensor.to(torch.get_autocast_dtype(device)) for tensor in tensors)


class _ToRows(torch.autograd.Function):
    """A gather both ways: where autograd's own backward would add up, each row is of one token at most."""

    @staticmethod
    def forward(ctx, tokens: Tensor, source: Tensor, row: Tensor, dropped: Tensor) -> Tensor:
        ctx.save_for_backward(row, dropped)
        return tokens.index_select(0, source)

    @staticmethod
    def backward(ctx, grad: Tensor):
        row, dropped = ctx.saved_tensors
        if not len(grad):
            return grad.new_zeros(len(row), grad.size(1)), None, None, None
        return grad.index_select(0, row).masked_fill_(dropped[:, None], 0.0), None, None, None


class _ToTokens(torch.autograd.Function):
    """The way back, and the gate."""

    @staticmethod
    def forward(ctx, rows: Tensor, gate: Tensor, source: Tensor, row: Tensor, dropped: Tensor) -> Tensor:
        ctx.save_for_backward(rows, gate, source, row, dropped)
        if not len(rows):
            return rows.new_zeros(len(row), rows.size(1))
        return rows.index_select(0, row).mul_(gate[:, None].to(rows.dtype))

    @staticmethod
    def backward(ctx, grad: Tensor):
        rows, gate, source, row, dropped = ctx.saved_tensors
        if not len(rows):
            return torch.zeros_like(rows), torch.zeros_like(gate), None, None, None
        # A row without token has no gate: what the experts learn from it is 0.
        scale = gate.new_zeros(len(rows) + 1).scatter_(0, row.masked_fill(dropped, len(rows)), gate)[:-1]
        by_rows = grad.index_select(0, source).mul_(scale[:, None].to(grad.dtype))
        by_gate = rows.index_select(0, row).mul_(grad).sum(1, dtype=gate.dtype)
        return by_rows, by_gate, None, None, None


class _Loop(torch.autograd.Function):
    """A product for each expert, its gradients written where they belong: stacking them would copy them."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor, sizes: list[int]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.sizes = sizes
        y = x.new_empty(x.size(0), weight.size(1))
        for y_e, x_e, w, b in zip(y.split(sizes), x.split(sizes), weight, bias, strict=True):
            torch.addmm(b, x_e, w.t(), out=y_e)
        return y

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, weight = ctx.saved_tensors
        by_x, by_weight = torch.empty_like(x), _gradient_of(weight)
        by_bias = weight.new_empty(weight.shape[:2])
        parts = (tensor.split(ctx.sizes) for tensor in (grad, x, by_x))
        for g, x_e, by_x_e, w, by_w, by_b in zip(*parts, weight, by_weight, by_bias, strict=True):
            torch.mm(g, w, out=by_x_e)
            torch.mm(g.t(), x_e, out=by_w)
            torch.sum(g, 0, out=by_b)
        return by_x, by_weight, by_bias, None


_last_gradients: MutableMapping[Tensor, torch.UntypedStorage] = WeakTensorKeyDictionary()


def _gradient_of(weight: Tensor) -> Tensor:
    """Memory for the gradient of a leaf: that of its last gradient, where nothing uses it any more.

    malloc gives a freed block of more than 32 MB back to the kernel. To get one anew, zeroed page by page,
    costs 15% of the time of a layer with 32 experts (LOG.md).
    """
    if torch.compiler.is_compiling():
        return torch.empty_like(weight)
    memory = _last_gradients.get(weight)
    if memory is None or torch._C._storage_Use_Count(memory._cdata) > 1:
        memory = torch.empty_like(weight).untyped_storage()
        if weight.is_leaf:
            _last_gradients[weight] = memory
    return weight.new_empty(0).set_(memory, 0, weight.shape, weight.stride())


class _Grouped(torch.autograd.Function):
    """All experts' products at once; grouped_mm of torch >= 2.10 itself has no bias."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, ends)
        mine = torch.searchsorted(ends, torch.arange(len(x), device=x.device, dtype=ends.dtype), right=True)
        return F.grouped_mm(x, weight.transpose(1, 2), offs=ends).add_(bias.index_select(0, mine))

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, weight, ends = ctx.saved_tensors
        grad = grad.contiguous()
        by_x = F.grouped_mm(grad, weight, offs=ends)
        by_weight = F.grouped_mm(grad.t(), x, offs=ends)
        # Each expert's sum of its rows, as a product: adding them up by index is far slower.
        rows = torch.arange(len(x), device=x.device)
        member = (rows < ends[:, None]) & (rows >= F.pad(ends, (1, -1))[:, None])
        return by_x, by_weight, member.to(grad.dtype) @ grad, None
