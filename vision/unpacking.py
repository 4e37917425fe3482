"""Unpacking the files of MNIST and EMNIST, whose header tells their size."""

import gzip
import math
import struct
import zlib
from pathlib import Path

from alma.errors import UserError

MOST_BYTES = 1 << 30
"""Of an unpacked file; the largest of EMNIST has 547 MB."""
_BYTES = {0x08: 1, 0x09: 1, 0x0B: 2, 0x0C: 4, 0x0D: 4, 0x0E: 8}  # of a value, by the header's code
_BLOCK = 1 << 20


def unpack(packed: Path, target: Path) -> None:
    """Unpack `packed`, block by block. UserError: damaged, of another format, or with more bytes
    than its header says or MOST_BYTES."""
    try:
        with gzip.open(packed) as source, target.open("xb") as out:
            header = source.read(4)
            if len(header) < 4 or header[:2] != b"\0\0" or header[2] not in _BYTES or header[3] > 4:
                raise gzip.BadGzipFile("no file of MNIST's format in it")
            sizes = source.read(4 * header[3])
            expected = _BYTES[header[2]] * math.prod(struct.unpack(f">{header[3]}I", sizes))
            if expected > MOST_BYTES:
                raise gzip.BadGzipFile(
                    f"{expected:,} bytes, more than any file of MNIST's kind has"
                )
            out.write(header + sizes)
            left = expected
            while left and (block := source.read(min(left, _BLOCK))):
                out.write(block)
                left -= len(block)
            if left or source.read(1):
                raise gzip.BadGzipFile(f"not the {expected:,} bytes that its header tells")
    except (gzip.BadGzipFile, EOFError, zlib.error, struct.error) as error:
        remedy = "delete it, then copy it again or use --download"
        raise UserError(f"{packed}: {error}: {remedy}") from None
