"""A model's parameters as views of one vector, aligned to 64 bytes as torch's allocator aligns new
tensors.

The order of additions in matrix products and convolutions may depend on the alignment of their
operands, and so may the last bits of a result. With aligned tensors, results are reproducible (see
"Obtaining Numerically Reproducible Results" in MKL's guide).
"""

import math
from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor, nn

from vision.mixture import Committee

ALIGNMENT = 64
"""Alignment of tensors in bytes: the size of a cache line and of the widest vector register."""


class Flat:
    """Vectors of a model's parameters, their gradients and its buffers.

    The model's tensors become views of the vectors, padded with zeros so that each one is aligned.
    A step of the optimizer then takes a few operations, whatever the number of layers.
    """

    def __init__(self, model: nn.Module):
        self.parameters: list[Tensor] = list(model.parameters())
        self._buffers = [b for b in model.buffers() if b.is_floating_point()]
        self.values = _flatten(self.parameters)
        self.buffers = _flatten(self._buffers)
        self.gradients = torch.zeros_like(self.values)
        self._gradients = _views(self.gradients, self.parameters)
        values = _views(self.values, self.parameters)
        for parameter, value, gradient in zip(
            self.parameters, values, self._gradients, strict=True
        ):
            parameter.data = value
            parameter.grad = gradient
        for buffer, value in zip(self._buffers, _views(self.buffers, self._buffers), strict=True):
            buffer.data = value
        self._voters: dict[int, int] = {}  # id() of each tensor of a committee -> its voter
        if isinstance(model, Committee):
            for voter, network in enumerate(model.networks):
                for tensor in chain(network.parameters(), network.buffers()):
                    self._voters[id(tensor)] = voter

    def write(self, gradients: Sequence[Tensor]) -> None:
        """Copy the gradients of all parameters into the vector."""
        torch._foreach_copy_(self._gradients, list(gradients))

    def keep(self, snapshot: tuple[Tensor, Tensor], voters: Tensor) -> None:
        """Copy the current values of some voters into a snapshot, such as that of the best epoch.

        `snapshot` has copies of `values` and `buffers`; `voters` (V,) is the mask of voters. In a
        stack, the voter is dimension 0 of each tensor; in a `Committee`, each tensor belongs to one
        voter.
        """
        if len(voters) == 1:
            snapshot[0].copy_(self.values)
            snapshot[1].copy_(self.buffers)
            return
        chosen = voters.nonzero().flatten().tolist()
        for vector, tensors in zip(snapshot, (self.parameters, self._buffers), strict=True):
            for view, tensor in zip(_views(vector, tensors), tensors, strict=True):
                self._keep_voters(view, tensor, chosen)

    def _keep_voters(self, view: Tensor, tensor: Tensor, chosen: Sequence[int]) -> None:
        """Copy `tensor`'s values of the `chosen` voters into `view`, its place in a snapshot."""
        if id(tensor) not in self._voters:
            for voter in chosen:
                view[voter].copy_(tensor.data[voter])
        elif self._voters[id(tensor)] in chosen:
            view.copy_(tensor.data)

    def restore(self, snapshot: tuple[Tensor, Tensor]) -> None:
        """Copy a snapshot back into the parameters and buffers."""
        self.values.copy_(snapshot[0])
        self.buffers.copy_(snapshot[1])


def _padded_size(tensor: Tensor) -> int:
    """Number of elements of a tensor, rounded up to a multiple of 64 bytes."""
    step = ALIGNMENT // tensor.element_size()
    return math.ceil(tensor.numel() / step) * step


def _flatten(tensors: Sequence[Tensor]) -> Tensor:
    """A vector of the values of all tensors, each one aligned."""
    if not tensors:
        return torch.empty(0)
    vector = tensors[0].new_zeros(sum(map(_padded_size, tensors)))
    for view, tensor in zip(_views(vector, tensors), tensors, strict=True):
        view.copy_(tensor.detach())
    return vector


def _views(vector: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Views of the vector with the shapes and strides of the tensors `like`."""
    views = []
    start = 0
    for tensor in like:
        part = vector[start : start + tensor.numel()]
        # Strides are copied because tensors may be channels last in memory.
        views.append(part.as_strided(tensor.shape, tensor.stride()))
        start += _padded_size(tensor)
    return views
