"""Linear maps with one weight per expert, for rows that are sorted by expert.

Shapes: R rows, I inputs, O outputs, E experts.
"""

from collections.abc import MutableMapping

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary


def as_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast the tensors to autocast's dtype for matrix products; unchanged where autocast is off."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    return tuple(tensor.to(torch.get_autocast_dtype(device)) for tensor in tensors)


def padded_linear(x_RI: Tensor, weight_EOI: Tensor, bias_EO: Tensor) -> Tensor:
    """Apply each expert to R / E rows by one batched product: (R, O)."""
    x_ECI = x_RI.view(weight_EOI.size(0), -1, x_RI.size(1))
    return torch.baddbmm(bias_EO[:, None], x_ECI, weight_EOI.transpose(1, 2)).flatten(0, 1)


class LoopLinear(torch.autograd.Function):
    """One product per expert; gradients go straight into slices of one tensor, without torch.stack's copy."""

    @staticmethod
    def forward(ctx, x_RI: Tensor, weight_EOI: Tensor, bias_EO: Tensor, sizes: list[int]) -> Tensor:
        """Apply expert e to the next sizes[e] rows: (R, O)."""
        ctx.save_for_backward(x_RI, weight_EOI)
        ctx.sizes = sizes
        y_RO = x_RI.new_empty(x_RI.size(0), weight_EOI.size(1))
        for y, x, w, b in zip(y_RO.split(sizes), x_RI.split(sizes), weight_EOI, bias_EO, strict=True):
            torch.addmm(b, x, w.t(), out=y)
        return y_RO

    @staticmethod
    def backward(ctx, grad_RO: Tensor):
        """Gradients of x, weight and bias."""
        x_RI, weight_EOI = ctx.saved_tensors
        by_x, by_weight = torch.empty_like(x_RI), _gradient_buffer(weight_EOI)
        by_bias = weight_EOI.new_empty(weight_EOI.shape[:2])
        rows = (tensor.split(ctx.sizes) for tensor in (grad_RO, x_RI, by_x))
        for g, x, by_x_e, w, by_w, by_b in zip(*rows, weight_EOI, by_weight, by_bias, strict=True):
            torch.mm(g, w, out=by_x_e)
            torch.mm(g.t(), x, out=by_w)
            torch.sum(g, 0, out=by_b)
        return by_x, by_weight, by_bias, None


_buffers: MutableMapping[Tensor, torch.UntypedStorage] = WeakTensorKeyDictionary()


def _gradient_buffer(weight: Tensor) -> Tensor:
    """Uninitialised memory for a leaf's gradient: its previous gradient's, once nothing else refers to it.

    malloc returns freed blocks above 32 MB to the kernel, and the kernel zeroes each new page. Reuse saves
    15% of the time of a layer with 32 experts (LOG.md).
    """
    if torch.compiler.is_compiling():
        return torch.empty_like(weight)
    memory = _buffers.get(weight)
    if memory is None or torch._C._storage_Use_Count(memory._cdata) > 1:
        memory = torch.empty_like(weight).untyped_storage()
        if weight.is_leaf:
            _buffers[weight] = memory
    return weight.new_empty(0).set_(memory, 0, weight.shape, weight.stride())


class GroupedLinear(torch.autograd.Function):
    """All experts in one grouped_mm (torch >= 2.10), and the bias, which grouped_mm lacks."""

    @staticmethod
    def forward(ctx, x_RI: Tensor, weight_EOI: Tensor, bias_EO: Tensor, ends_E: Tensor) -> Tensor:
        """Apply expert e to the rows before ends_E[e], int32, that no earlier expert has: (R, O)."""
        ctx.save_for_backward(x_RI, weight_EOI, ends_E)
        rows = torch.arange(len(x_RI), device=x_RI.device, dtype=ends_E.dtype)
        expert_R = torch.searchsorted(ends_E, rows, right=True)
        y_RO = F.grouped_mm(x_RI, weight_EOI.transpose(1, 2), offs=ends_E)
        return y_RO.add_(bias_EO.index_select(0, expert_R))

    @staticmethod
    def backward(ctx, grad_RO: Tensor):
        """Gradients of x, weight and bias."""
        x_RI, weight_EOI, ends_E = ctx.saved_tensors
        grad_RO = grad_RO.contiguous()
        by_x = F.grouped_mm(grad_RO, weight_EOI, offs=ends_E)
        by_weight = F.grouped_mm(grad_RO.t(), x_RI, offs=ends_E)
        # The bias gradient as a product with (E, R) zeros and ones: index_add_ is far slower.
        rows = torch.arange(len(x_RI), device=x_RI.device)
        member_ER = (rows < ends_E[:, None]) & (rows >= F.pad(ends_E, (1, -1))[:, None])
        return by_x, by_weight, member_ER.to(grad_RO.dtype) @ grad_RO, None
