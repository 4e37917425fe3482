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
    path = find(path)
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            head = file.read(4 + 4 * dimensions)
            if len(head) < 4 + 4 * dimensions or head[:4] != bytes([0, 0, 8, dimensions]):
                what = "labels" if dimensions == 1 else "images"
                raise UserError(f"{path}: not an idx file of {what}: {AGAIN}")
            shape = struct.unpack(f">{dimensions}I", head[4:])
            size = len(head) + math.prod(shape)
            if size > _LARGEST:
                raise UserError(
                    f"{path}: its header says {size:,} bytes, more than any set of this format: {AGAIN}"
                )
            content = file.read(math.prod(shape) + 1)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"{path}: damaged ({error}): {AGAIN}") from None
    if len(head) + len(content) != size:
        raise UserError(
            f"{path}: {len(head) + len(content):,} bytes or more, its header says {size:,}: {AGAIN}"
        )
    return np.frombuffer(content, np.uint8).reshape(shape).copy()
