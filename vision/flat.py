"""Tensors that start at multiples of 64 bytes, and a model's parameters as views of one vector.

Matrix products and convolutions may take the values before such an address apart, and so add the same numbers
in another order when a tensor lies elsewhere: the last bits of a result then depend on where its tensors lie.
Aligned ones give the same bits each time (see "Obtaining Numerically Reproducible Results" in MKL's guide).
"""

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor, nn

from vision.mixture import Committee

ALIGNMENT = 64
"""Bytes: a cache line, and the widest vector register."""


def aligned(tensor: Tensor) -> Tensor:
    """The tensor itself, or a copy if it does not start at a multiple of 64 bytes."""
    return tensor.clone() if tensor.data_ptr() % ALIGNMENT else tensor


def align(model: nn.Module) -> None:
    """Move the parameters and buffers that do not start at a multiple of 64 bytes."""
    for tensor in chain(model.parameters(), model.buffers()):
        tensor.data = aligned(tensor.data)


class Flat:
    """A model's parameters as one vector, its gradients and its buffers too: one optimizer step is a few
    operations however many layers there are. The model's own tensors become views of the vectors, with
    zeros between them so that each is aligned."""

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
        """Copy the gradients of the parameters into the vector."""
        torch._foreach_copy_(self._gradients, list(gradients))

    def snapshot(self) -> tuple[Tensor, Tensor]:
        """Copies of parameters and buffers."""
        return self.values.clone(), self.buffers.clone()

    def keep(self, snapshot: tuple[Tensor, Tensor], voters: Tensor) -> None:
        """Copy the values of those `voters` (V,) that are true into a snapshot.

        A tensor of a `Committee` is one voter's. Others start with the members, so a mask of V = M takes
        some members', one of V = 1 everything.
        """
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
        """Set parameters and buffers to those of a snapshot."""
        self.values.copy_(snapshot[0])
        self.buffers.copy_(snapshot[1])


def _room(tensor: Tensor) -> int:
    """Elements from the start of a tensor to the next multiple of 64 bytes after its end."""
    step = ALIGNMENT // tensor.element_size()
    return -(-tensor.numel() // step) * step


def _flatten(tensors: Sequence[Tensor]) -> Tensor:
    if not tensors:
        return torch.empty(0)
    vector = tensors[0].new_zeros(sum(map(_room, tensors)))
    for view, tensor in zip(_views(vector, tensors), tensors, strict=True):
        view.copy_(tensor.detach())
    return vector


def _views(vector: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    found, start = [], 0
    for tensor in like:
        found.append(vector[start : start + tensor.numel()].view(tensor.shape))
        start += _room(tensor)
    return found
