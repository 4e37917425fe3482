"""The examples of a stage or test set.

Either normalised images in memory, or bytes of the data set that are normalised batch by batch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Examples(NamedTuple):
    """Normalised images (n, channels, height, width), channels last in memory, and labels (n,).

    In minibatches that differ between the M members of an ensemble, both have M as first dimension.
    """

    images: Tensor
    labels: Tensor

    def part(self, start: int, stop: int) -> "Examples":
        """The examples from `start` to before `stop`."""
        if not start and stop >= len(self.labels):
            return self
        return Examples(self.images[start:stop], self.labels[start:stop])

    def pixels(self, chosen: Tensor) -> Tensor:
        """Images of the indices `chosen` (...), as (..., height, width, channels)."""
        images = self.images.permute(0, 2, 3, 1)  # contiguous, so each image is copied as one row
        rows = images.reshape(len(images), -1).index_select(0, chosen.flatten())
        return rows.view(*chosen.shape, *images.shape[1:])


class Pixels:
    """Images (N, channels, height, width) as bytes in several tensors, in memory or mapped from
    files."""

    def __init__(self, parts: Sequence[Tensor]):
        self.parts = parts
        self.shape = (sum(map(len, parts)), *parts[0].shape[1:])
        self._ends = torch.tensor([len(part) for part in parts]).cumsum(0)

    def index_select(self, dimension: int, indices: Tensor) -> Tensor:
        """The images of `indices` (n,) as one tensor, as of a tensor with `dimension` 0."""
        owners = torch.searchsorted(self._ends, indices, right=True)
        chosen = []
        for k in owners.unique().tolist():
            part = self.parts[k]
            chosen.append(part.index_select(0, indices[owners == k] - self._ends[k] + len(part)))
        order = owners.argsort(stable=True)
        return torch.cat(chosen).index_select(dimension, order.argsort())


@dataclass(frozen=True)
class StoredExamples:
    """Examples whose images stay bytes in the memory of their data set; each batch is normalised.

    Batches equal those of `Examples`. Bytes take a quarter of the memory of floats, and none if the
    images are memory-mapped from files.
    """

    source: Tensor | Pixels  # bytes of all images of the data set, (N, channels, height, width)
    indices: Tensor  # (n,), the images of these examples in `source`
    labels: Tensor  # (n,), on the device
    normalise: Callable[[Tensor], Tensor]
    """Bytes (k, channels, height, width) -> floats on the device, channels last in memory."""

    def part(self, start: int, stop: int) -> Examples:
        """The examples from `start` to before `stop`, normalised."""
        return Examples(self._read(self.indices[start:stop]), self.labels[start:stop])

    def pixels(self, chosen: Tensor) -> Tensor:
        """Images of the indices `chosen` (...), as (..., height, width, channels), normalised."""
        images = self._read(self.indices[chosen.flatten().cpu()]).permute(0, 2, 3, 1)
        return images.reshape(*chosen.shape, *images.shape[1:])

    def _read(self, indices: Tensor) -> Tensor:
        return self.normalise(self.source.index_select(0, indices))


AnyExamples = Examples | StoredExamples
