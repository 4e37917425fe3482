"""Bytes of tensors in use, counted on any device."""

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveStorages(TorchDispatchMode):
    """Counts the bytes of storages in use on `device`, "cpu" or "meta", that operations returned.

    Memory that a kernel takes and frees within itself does not count.
    """

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device
        self.bytes = 0
        self.peak = 0
        self._counted: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.device.type == self.device:
                self._count(tensor)
        return output

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._counted:
            return
        size = storage.nbytes()
        self._counted.add(key)
        self.bytes += size
        self.peak = max(self.peak, self.bytes)
        weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        self._counted.discard(key)
        self.bytes -= size

    @contextlib.contextmanager
    def phase(self, peaks: dict[str, int], name: str) -> Iterator[None]:
        """Keep the peak of a part of the step in `peaks`."""
        self.peak = self.bytes
        yield
        peaks[name] = max(self.peak, peaks.get(name, 0))
