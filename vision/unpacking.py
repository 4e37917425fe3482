"""Unpack gzip files in MNIST's format, with a limit on their size.

The header of the format gives the type and the shape of the array, so the number of bytes to expect
is known before they are unpacked: a file cannot fill the disk (a decompression bomb).
"""

import gzip
import math
import struct
import zlib
from pathlib import Path

from alma.errors import UserError

MOST_BYTES = 1 << 30
"""Most bytes of an unpacked file; EMNIST's largest has 547 MB."""
# Bytes per value, by the type code in the header.
_BYTES = {0x08: 1, 0x09: 1, 0x0B: 2, 0x0C: 4, 0x0D: 4, 0x0E: 8}
_BLOCK = 1 << 20


def unpack(packed: Path, target: Path) -> None:
    """Unpack the gzip file `packed` into the new file `target`, block by block.

    Raises UserError if it is damaged, has another format, has more or fewer bytes than its header
    says, or would have more than MOST_BYTES.
    """
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


def unpack_missing(raw: Path, target: Path) -> bool:
    """Unpack the files of `raw` that exist only packed into `target`, with links to all others.

    torchvision needs unpacked files, and the user's folder may be read-only. False: none is packed.
    """
    packed = [path for path in raw.glob("*-ubyte.gz") if not path.with_suffix("").exists()]
    if not packed:
        return False
    target.mkdir(parents=True)
    for path in raw.iterdir():
        (target / path.name).symlink_to(path.resolve())
    for path in packed:
        unpack(path, target / path.stem)
    return True
