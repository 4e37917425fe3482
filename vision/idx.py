"""Files of MNIST and EMNIST: the idx format, packed or not, checked before torchvision reads them."""

import gzip
import math
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from alma.errors import UserError

AGAIN = "download or copy it again"
_LARGEST = 1 << 30  # bytes of a file; EMNIST's largest has 550 MB
_HEADER = 16  # bytes of the header of an idx file of images


@contextmanager
def unpacked(root: Path, folder: str) -> Iterator[Path]:
    """A root that torchvision can read: `root`, or if root/folder/raw has .gz files that are not unpacked, a
    temporary folder with these unpacked and links to the others. `root` may be read-only. UserError: a file
    is not what its header says."""
    files = list((root / folder / "raw").glob("*"))
    for path in files:
        if path.name.endswith("ubyte"):
            with path.open("rb") as file:
                _require_size(path, _idx_bytes(path, file.read(_HEADER)), path.stat().st_size)
    packed = [path for path in files if path.suffix == ".gz" and path.with_suffix("") not in files]
    if not packed:
        yield root
        return
    with TemporaryDirectory() as temporary:
        raw = Path(temporary, folder, "raw")
        raw.mkdir(parents=True)
        for path in files:
            if path in packed:
                _unpack(path, raw / path.stem)
            else:
                (raw / path.name).symlink_to(path.resolve())
        yield Path(temporary)


def _unpack(path: Path, target: Path) -> None:
    """Unpack an idx .gz file. UserError: damaged, or not as long as its header says."""
    try:
        with gzip.open(path) as source, target.open("wb") as file:
            block = source.read(_HEADER)
            size = _idx_bytes(path, block)
            while block and file.tell() <= size:
                file.write(block)
                block = source.read(1 << 20)
            _require_size(path, size, file.tell())
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"{path}: damaged ({error}): {AGAIN}") from None


def _idx_bytes(path: Path, head: bytes) -> int:
    """Bytes of an idx file of images or labels, by its first 16. UserError: it is none."""
    sizes = struct.unpack(f">{len(head) // 4}I", head[: len(head) // 4 * 4])
    count = 1 if "labels" in path.name else 3
    if sizes[:1] != (0x800 + count,) or len(sizes) <= count:
        raise UserError(f"{path}: not an idx file of {'labels' if count == 1 else 'images'}: {AGAIN}")
    size = 4 + 4 * count + math.prod(sizes[1 : count + 1])
    if size > _LARGEST:
        raise UserError(f"{path}: its header says {size:,} bytes, more than any set of this format: {AGAIN}")
    return size


def _require_size(path: Path, expected: int, size: int) -> None:
    if size != expected:
        raise UserError(f"{path}: {size:,} bytes or more, its header says {expected:,}: {AGAIN}")
