"""A folder of images, decoded into one array of bytes: root/train/CLASS/*.png and root/test/CLASS/*.png."""

import fcntl
import hashlib
import os
import struct
import warnings
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from pathlib import Path
from typing import IO

import numpy as np
from numpy.lib import format as npy

from alma.errors import UserError
from alma.files import atomic_write, make_directory

Allocate = Callable[[tuple[int, ...]], np.ndarray]
"""A new array of bytes of a shape."""

_SUFFIXES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
_CHUNK = 64  # images of a task of a thread
_NO_IMAGE = (OSError, SyntaxError, ValueError, LookupError, TypeError, EOFError, struct.error, zlib.error)


def read(
    root: Path, size: int | None, allocate: Allocate, cache: Path | None = None
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Images (n, 3, height, width) of train/ and test/, decoded into arrays of `allocate` or into files in
    `cache`, and labels (n,).

    Images are scaled to `size` x `size` pixels if given. UserError: a folder or image is missing or
    unreadable, images differ in size, the classes of train/ and test/ differ, or `cache` cannot be written.
    """
    for part in ("train", "test"):
        if not (root / part).is_dir():
            raise UserError(
                f"{root} has no folder {part}/: --data-root needs train/CLASS/ and test/CLASS/ with images"
            )
    train, test = _listed(root / "train"), _listed(root / "test")
    if odd := sorted(train.keys() ^ test.keys()):
        raise UserError(f"{root}: train/ and test/ differ in classes: {', '.join(odd)}")
    found: list[tuple[np.ndarray, np.ndarray]] = []
    inside = partial(in_memory, allocate)
    for part, files in (("train", train), ("test", test)):
        paths = list(chain.from_iterable(files.values()))
        pixels = _kept(cache, root / part, paths, size) if cache else _decoded(paths, size, inside)
        found.append((pixels, np.repeat(np.arange(len(files)), [*map(len, files.values())])))
    if found[0][0].shape[1:] != found[1][0].shape[1:]:
        raise UserError(f"{root}: images of train/ and test/ differ in size: give --image-size")
    return found


def _listed(part: Path) -> dict[str, list[str]]:
    """The image files of each class, in the order of torchvision's ImageFolder, whose import takes 80 MB.
    UserError: no class, or one without images."""
    found: dict[str, list[str]] = {
        entry.name: [] for entry in sorted(os.scandir(part), key=lambda e: e.name) if entry.is_dir()
    }
    for name, files in found.items():
        for place, _, names in sorted(os.walk(part / name, followlinks=True)):
            files += [os.path.join(place, each) for each in sorted(names) if each.lower().endswith(_SUFFIXES)]
    if not all(found.values()) or not found:
        empty = [name for name, files in found.items() if not files]
        where = part / empty[0] if empty else part
        raise UserError(
            f"{where} has no images: --data-root needs train/CLASS/*.png and test/CLASS/*.png "
            f"(or {', '.join(sorted({*_SUFFIXES} - {'.png'}))})"
        )
    return found


def in_memory(allocate: Allocate, shape: tuple[int, ...]) -> np.ndarray:
    """MemoryError: more than this machine has. Linux would grant it, and kill the process much later."""
    if np.prod(shape, dtype=float) > os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"):
        raise MemoryError
    return allocate(shape)


def _kept(cache: Path, part: Path, paths: list[str], size: int | None) -> np.ndarray:
    """The images of `_decoded`, mapped into memory from a file in `cache`, which the first process that needs
    it makes. It has another name if a file of `paths` has another name, size or time."""
    digest = hashlib.sha256(repr(size).encode())
    for path in paths:
        found = os.stat(path)
        digest.update(repr((os.path.relpath(path, part), found.st_size, found.st_mtime_ns)).encode())
    file = cache / f"{part.name}_{digest.hexdigest()[:16]}.npy"
    make_directory(cache)
    try:
        with open(cache / ".lock", "w") as lock:
            fcntl.lockf(lock, fcntl.LOCK_EX)
            if not file.exists():
                with atomic_write(file, "wb") as out:
                    _decoded(paths, size, partial(_mapped, out))
    except OSError as error:
        raise UserError(
            f"{file}: cannot be written ({error.strerror}): choose another --cache-images"
        ) from None
    try:
        return np.load(file, mmap_mode="c")  # not "r", of which torch warns; nothing writes to it
    except ValueError as error:
        raise UserError(f"{file} is damaged ({error}): delete it") from None


def _mapped(file: IO[bytes], shape: tuple[int, ...]) -> np.ndarray:
    """An array of bytes in the file, in NumPy's format. The space is reserved first: a full disk would kill
    the process at a write to the array."""
    npy.write_array_header_2_0(file, {"descr": "|u1", "fortran_order": False, "shape": shape})
    file.flush()
    start = file.tell()
    os.posix_fallocate(file.fileno(), start, int(np.prod(shape)))
    return np.memmap(file, np.uint8, "r+", start, shape)


def _decoded(paths: list[str], size: int | None, allocate: Allocate) -> np.ndarray:
    """Images (n, 3, height, width) of files; chunks keep the threads' overhead low for small images."""
    from PIL import Image

    warnings.simplefilter("error", Image.DecompressionBombWarning)  # images of 90 megapixels and more
    warnings.filterwarnings("ignore", category=UserWarning, module="PIL")  # damaged metadata
    height, width = _read(paths[0], size).shape[:2]
    pixels = allocate((len(paths), 3, height, width))

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

    with ThreadPoolExecutor(4) as pool:
        for _ in pool.map(decode, range(0, len(paths), _CHUNK)):
            pass
    return pixels


def scaled(images: np.ndarray, size: int, allocate: Allocate) -> np.ndarray:
    """Images (n, channels, height, width) as bytes, scaled to `size` x `size` pixels as those of a folder."""
    from PIL import Image

    pixels = allocate((*images.shape[:2], size, size))
    for place, channel in zip(
        pixels.reshape(-1, size, size), images.reshape(-1, *images.shape[2:]), strict=True
    ):
        place[:] = np.asarray(Image.fromarray(channel).resize((size, size), Image.Resampling.BILINEAR))
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
