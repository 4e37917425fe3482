"""Files of MNIST and EMNIST: the idx format, as it is or packed by gzip."""

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np

from alma.errors import UserError

AGAIN = "download or copy it again"
_LARGEST = 1 << 30  # bytes of a file; EMNIST's largest has 550 MB


def find(path: Path) -> Path:
    """The file, or its .gz if only that exists."""
    return path if path.exists() else path.with_name(path.name + ".gz")


def read(path: Path, dimensions: int) -> np.ndarray:
    """The bytes of `find(path)`: images have 3 dimensions, labels 1. UserError: not what its header says."""
    path, begin = find(path), 4 + 4 * dimensions
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            content = file.read(_LARGEST)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"{path}: damaged ({error}): {AGAIN}") from None
    if len(content) < begin or content[:4] != bytes([0, 0, 8, dimensions]):
        raise UserError(f"{path}: not an idx file of {dimensions} dimensions: {AGAIN}")
    shape = struct.unpack_from(f">{dimensions}I", content, 4)
    size = begin + math.prod(shape)
    if len(content) != size:
        raise UserError(f"{path}: damaged, its header says {size:,} bytes: {AGAIN}")
    return np.frombuffer(content, np.uint8, offset=begin).reshape(shape).copy()
