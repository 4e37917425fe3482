"""Memory of a data set that the processes of one command share; the first that needs the set reads it."""

import fcntl
import mmap
import os
import pickle
import tempfile
import weakref
from collections.abc import Callable
from multiprocessing import reduction
from typing import Any

import numpy as np

from vision.folder import Allocate

_TRAILER = 8  # bytes at the end: the length of the pickle before them
Filled = tuple[list[np.ndarray], Any]
"""Arrays of bytes, and plain values about them."""


class SharedMemory:
    """Memory without a name in any file system, freed with the last process that has it.

    Send it to processes as they are spawned, as an argument of theirs.
    """

    def __init__(self, file: int | None = None):
        self._file = _new_file() if file is None else file
        weakref.finalize(self, os.close, self._file)

    def __reduce__(self) -> Any:
        return _received, (reduction.DupFd(self._file),)

    def get(self, fill: Callable[[Allocate], Filled]) -> Filled:
        """What `fill` returned to the first process that called this; later ones wait until it is there.

        `fill` gets a function that allocates an array of bytes of a shape in this memory. Arrays from
        elsewhere are copied. If it raises, the next process tries. A process that writes to an array of the
        result changes a private copy of that page.
        """
        fcntl.lockf(self._file, fcntl.LOCK_EX)
        try:
            if not self._size:
                self._fill(fill)
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)
        return self._read()

    @property
    def _size(self) -> int:
        return os.fstat(self._file).st_size

    def _fill(self, fill: Callable[[Allocate], Filled]) -> None:
        places: dict[int, tuple[int, tuple[int, ...]]] = {}  # of arrays by address: offset and shape
        kept = []  # closing a map would release the lock

        def allocate(shape: tuple[int, ...]) -> np.ndarray:
            start = -(-self._size // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
            length = int(np.prod(shape))
            os.ftruncate(self._file, start + length)
            kept.append(np.frombuffer(mmap.mmap(self._file, length, offset=start), np.uint8).reshape(shape))
            places[kept[-1].ctypes.data] = start, tuple(shape)
            return kept[-1]

        try:
            arrays, facts = fill(allocate)
            for i, array in enumerate(arrays):
                if array.ctypes.data not in places:
                    arrays[i] = allocate(array.shape)
                    arrays[i][:] = array
            text = pickle.dumps(([places[array.ctypes.data] for array in arrays], facts))
            os.pwrite(self._file, text + len(text).to_bytes(_TRAILER), self._size)
        except BaseException:
            os.ftruncate(self._file, 0)
            raise

    def _read(self) -> Filled:
        end = self._size - _TRAILER
        length = int.from_bytes(os.pread(self._file, _TRAILER, end))
        places, facts = pickle.loads(os.pread(self._file, length, end - length))
        memory = mmap.mmap(self._file, 0, access=mmap.ACCESS_COPY)
        arrays = [np.frombuffer(memory, np.uint8, int(np.prod(shape)), start) for start, shape in places]
        return [array.reshape(shape) for array, (_, shape) in zip(arrays, places, strict=True)], facts


def _new_file() -> int:
    if hasattr(os, "memfd_create"):  # /dev/shm may be limited: 64 MB in a container of Docker
        return os.memfd_create("alma-images")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _received(file: Any) -> SharedMemory:
    return SharedMemory(file.detach())
