"""A folder of images, decoded into one array of bytes: root/train/CLASS/*.png and root/test/CLASS/*.png."""

import hashlib
import os
import struct
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

import numpy as np
from filelock import FileLock
from numpy.lib import format as npy

from alma.errors import UserError
from alma.files import atomic_write, make_directory

_CHUNK = 64  # images of a task of a thread
_NO_IMAGE = (OSError, SyntaxError, ValueError, LookupError, TypeError, EOFError, struct.error, zlib.error)


def read(root: Path, size: int | None, cache: Path | None = None) -> list[tuple[np.ndarray, np.ndarray]]:
    """Images (n, 3, height, width) of train/ and test/, in memory or mapped from files in `cache`, and labels
    (n,).

    Images are scaled to `size` x `size` pixels if given. UserError: an image is unreadable, images differ in
    size, the classes of train/ and test/ differ, or `cache` cannot be written. FileNotFoundError: a folder is
    missing, or has no images. MemoryError: they need more memory than there is.
    """
    from torchvision.datasets.folder import IMG_EXTENSIONS, find_classes, make_dataset

    folders = root / "train", root / "test"
    classes, others = (find_classes(part)[1] for part in folders)
    if odd := sorted(classes.keys() ^ others.keys()):
        raise UserError(f"{root}: train/ and test/ differ in classes: {', '.join(odd)}")
    parts: list[tuple[np.ndarray, np.ndarray]] = []
    for part, files in [(part, make_dataset(part, classes, IMG_EXTENSIONS)) for part in folders]:
        paths = [path for path, _ in files]
        pixels = _cached(cache, part, paths, size) if cache else _decoded(paths, size)
        parts.append((pixels, np.array([label for _, label in files])))
    if parts[0][0].shape[1:] != parts[1][0].shape[1:]:
        raise UserError(f"{root}: images of train/ and test/ differ in size: give --image-size")
    return parts


def _cached(cache: Path, part: Path, paths: list[str], size: int | None) -> np.ndarray:
    """The images of `_decoded`, mapped from a file in `cache`, which the first process that needs it writes.
    The file has another name if one of `paths` has another name, size or time."""
    digest = hashlib.sha256(repr(size).encode())
    for path in paths:
        stat = os.stat(path)
        digest.update(repr((os.path.relpath(path, part), stat.st_size, stat.st_mtime_ns)).encode())
    file = cache / f"{part.name}_{digest.hexdigest()[:16]}.npy"
    make_directory(cache)
    try:
        with FileLock(cache / ".lock"):
            if not file.exists():
                with atomic_write(file, "wb") as out:
                    _decoded(paths, size, out)
    except OSError as error:
        raise UserError(
            f"{file}: cannot be written ({error.strerror}): choose another --cache-images"
        ) from None
    try:
        return np.load(file, mmap_mode="c")  # not "r", of which torch warns; nothing writes to it
    except ValueError as error:
        raise UserError(f"{file} is damaged ({error}): delete it") from None


def _decoded(paths: list[str], size: int | None, out: IO[bytes] | None = None) -> np.ndarray:
    """Images (n, 3, height, width) of files, in memory, or mapped from the new .npy file `out`."""
    from PIL import Image

    warnings.simplefilter("error", Image.DecompressionBombWarning)  # images of 90 megapixels and more
    warnings.filterwarnings("ignore", category=UserWarning, module="PIL")  # damaged metadata
    height, width = _read(paths[0], size).shape[:2]
    shape = len(paths), 3, height, width
    if out:
        npy.write_array_header_2_0(out, {"descr": "|u1", "fortran_order": False, "shape": shape})
        out.flush()
        # Reserves the space: on a full disk, a write to the map would kill the process.
        os.posix_fallocate(out.fileno(), out.tell(), int(np.prod(shape)))
        pixels: np.ndarray = np.memmap(out, np.uint8, "r+", out.tell(), shape)
    else:
        pixels = empty(shape)

    def decode(start: int) -> None:
        for i, path in enumerate(paths[start : start + _CHUNK], start):
            image = _read(path, size)
            if image.shape[:2] != (height, width):
                sizes = sorted([(height, width), image.shape[:2]])
                raise UserError(
                    f"{Path(path).parents[1]} has images of several sizes, such as {sizes[0]} and "
                    f"{sizes[1]}: give --image-size"
                )
            pixels[i] = image.transpose(2, 0, 1)

    with ThreadPoolExecutor(4) as pool:  # chunks keep the threads' overhead low for small images
        list(pool.map(decode, range(0, len(paths), _CHUNK)))
    return pixels


def empty(shape: tuple[int, ...]) -> np.ndarray:
    """A new array of bytes. MemoryError: more than this machine has; Linux would grant it, and kill the
    process much later."""
    if np.prod(shape, dtype=float) > os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"):
        raise MemoryError
    return np.empty(shape, np.uint8)


def scaled(images: np.ndarray, size: int) -> np.ndarray:
    """Images (n, channels, height, width) as bytes, scaled to `size` x `size` pixels as those of a folder."""
    from PIL import Image

    pixels = empty((*images.shape[:2], size, size))
    planes = zip(pixels.reshape(-1, size, size), images.reshape(-1, *images.shape[2:]), strict=True)
    for target, channel in planes:
        target[:] = np.asarray(Image.fromarray(channel).resize((size, size), Image.Resampling.BILINEAR))
    return pixels


def _read(path: str, size: int | None) -> np.ndarray:
    """An image as bytes (height, width, 3)."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            if image.mode[0] in "IF":  # Pillow would clip the values at 255
                raise UserError(
                    f"{path} has more than 8 bits per channel (mode {image.mode}): convert it first"
                )
            rgb = image.convert("RGB")
            return np.asarray(rgb.resize((size, size), Image.Resampling.BILINEAR) if size else rgb)
    except (*_NO_IMAGE, Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise UserError(f"cannot read the image {path} ({error}): replace or delete it") from None
