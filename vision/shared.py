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


class SharedMemory:
    """Memory without a name in any file system, freed with the last process that has it.

    Send it to processes as they are spawned, as an argument of theirs.
    """

    def __init__(self, file: int | None = None):
        self._file = _new_file() if file is None else file
        weakref.finalize(self, os.close, self._file)

    def __reduce__(self) -> Any:
        return _received, (reduction.DupFd(self._file),)

    def get(self, fill: Callable[[Allocate], Any]) -> Any:
        """The value that `fill` returned to the first process that called this; later ones wait for it.

        `fill` gets a function that allocates an array of bytes of a shape in this memory. Other arrays of the
        value are copied to it. If `fill` raises, the next process tries. A process that writes to an array
        of the result changes a private copy of that page.
        """
        fcntl.lockf(self._file, fcntl.LOCK_EX)
        try:
            if not os.fstat(self._file).st_size:
                self._fill(fill)
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)
        return self._read()

    def _fill(self, fill: Callable[[Allocate], Any]) -> None:
        places: dict[int, tuple[int, int]] = {}  # of arrays by address: offset and bytes
        kept = []  # closing a map would release the lock

        def allocate(shape: tuple[int, ...]) -> np.ndarray:
            size = os.fstat(self._file).st_size
            start = -(-size // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
            length = int(np.prod(shape))
            os.ftruncate(self._file, start + length)
            kept.append(np.frombuffer(mmap.mmap(self._file, length, offset=start), np.uint8).reshape(shape))
            places[kept[-1].ctypes.data] = start, length
            return kept[-1]

        def place(buffer: pickle.PickleBuffer) -> None:
            array = np.frombuffer(buffer.raw(), np.uint8)
            if array.ctypes.data not in places:
                copied = allocate(array.shape)
                copied[:] = array
                array = copied
            found.append(places[array.ctypes.data])

        found: list[tuple[int, int]] = []
        try:
            content = pickle.dumps(fill(allocate), protocol=5, buffer_callback=place)
            text = pickle.dumps((content, found))
            os.pwrite(self._file, text + len(text).to_bytes(_TRAILER), os.fstat(self._file).st_size)
        except BaseException:
            os.ftruncate(self._file, 0)
            raise

    def _read(self) -> Any:
        end = os.fstat(self._file).st_size - _TRAILER
        length = int.from_bytes(os.pread(self._file, _TRAILER, end))
        content, places = pickle.loads(os.pread(self._file, length, end - length))
        memory = memoryview(mmap.mmap(self._file, 0, access=mmap.ACCESS_COPY))
        return pickle.loads(content, buffers=[memory[start : start + size] for start, size in places])


def _new_file() -> int:
    if hasattr(os, "memfd_create"):  # /dev/shm may be limited: 64 MB in a container of Docker
        return os.memfd_create("alma-images")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _received(file: Any) -> SharedMemory:
    return SharedMemory(file.detach())
