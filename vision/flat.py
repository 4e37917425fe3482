"""A model's parameters as views of one vector, aligned to 64 bytes as torch's allocator aligns new tensors.

The order of additions in matrix products and convolutions may depend on the alignment of their operands, and
so may the last bits of a result. With aligned tensors, results are reproducible (see "Obtaining Numerically
Reproducible Results" in MKL's guide).
"""

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor, nn

from vision.mixture import Committee

ALIGNMENT = 64
"""Bytes of a cache line and of the widest vector register."""


class Flat:
    """Vectors of a model's parameters, their gradients and its buffers. The model's tensors become views of
    the vectors; zeros between them keep each one aligned. A step of the optimizer then takes a few
    operations, whatever the number of layers."""

    def __init__(self, model: nn.Module):
        self.parameters: list[Tensor] = list(model.parameters())
        self._buffers = [b for b in model.buffers() if b.is_floating_point()]
        self.values, self.buffers = _flatten(self.parameters), _flatten(self._buffers)
        self.gradients = torch.zeros_like(self.values)
        self._gradients = _views(self.gradients, self.parameters)
        values, buffers = _views(self.values, self.parameters), _views(self.buffers, self._buffers)
        for p, value, gradient in zip(self.parameters, values, self._gradients, strict=True):
            p.data, p.grad = value, gradient
        for b, value in zip(self._buffers, buffers, strict=True):
            b.data = value
        networks = model.networks if isinstance(model, Committee) else []
        self._voters = {id(t): i for i, n in enumerate(networks) for t in chain(n.parameters(), n.buffers())}

    def write(self, gradients: Sequence[Tensor]) -> None:
        """Copy the gradients of all parameters into the vector."""
        torch._foreach_copy_(self._gradients, list(gradients))

    def keep(self, snapshot: tuple[Tensor, Tensor], voters: Tensor) -> None:
        """Copy the values of the voters selected by the mask `voters` (V,) into a snapshot, copies of the two
        vectors. With V = 1 that is everything. A tensor of a `Committee` belongs to one voter; in a stack,
        dimension 0 of every tensor is the voter."""
        if len(voters) == 1:
            snapshot[0].copy_(self.values)
            snapshot[1].copy_(self.buffers)
            return
        chosen = voters.nonzero().flatten().tolist()
        for target, own in zip(snapshot, (self.parameters, self._buffers), strict=True):
            for kept, now in zip(_views(target, own), own, strict=True):
                whose = self._voters.get(id(now))
                for voter in chosen:
                    if whose is None:
                        kept[voter].copy_(now.data[voter])
                    elif whose == voter:
                        kept.copy_(now.data)

    def restore(self, snapshot: tuple[Tensor, Tensor]) -> None:
        """Copy a snapshot back into the parameters and buffers."""
        self.values.copy_(snapshot[0])
        self.buffers.copy_(snapshot[1])


def _padded_size(tensor: Tensor) -> int:
    """Number of elements of a tensor, rounded up to a multiple of 64 bytes."""
    step = ALIGNMENT // tensor.element_size()
    return -(-tensor.numel() // step) * step


def _flatten(tensors: Sequence[Tensor]) -> Tensor:
    if not tensors:
        return torch.empty(0)
    vector = tensors[0].new_zeros(sum(map(_padded_size, tensors)))
    for view, tensor in zip(_views(vector, tensors), tensors, strict=True):
        view.copy_(tensor.detach())
    return vector


def _views(vector: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    views, start = [], 0
    for tensor in like:
        part = vector[start : start + tensor.numel()]
        views.append(part.as_strided(tensor.shape, tensor.stride()))  # perhaps channels last
        start += _padded_size(tensor)
    return views
