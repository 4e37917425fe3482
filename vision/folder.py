"""A folder of images, decoded into one array of bytes: root/train/CLASS/*.png and
root/test/CLASS/*.png."""

import contextlib
import hashlib
import os
import struct
import warnings
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from filelock import FileLock
from numpy.lib import format as npy

from alma.errors import UserError
from alma.files import atomic_write, make_directory, walk
from alma.schema import check_names
from vision import unreadable
from vision.alpha import BACKGROUND, check_background, composed

KINDS = (".bmp", ".gif", ".jfif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
"""Suffixes of images, in lower case."""
_CHUNK = 64  # images that a thread decodes per task
NO_IMAGE = (
    OSError,
    SyntaxError,
    ValueError,
    LookupError,
    TypeError,
    EOFError,
    struct.error,
    zlib.error,
)

_ORIENTATION = 0x0112
"""EXIF tag."""
_TURNED = (5, 6, 7, 8)
"""Orientations of images that lie on a side."""


class UnreadableImage(UserError):
    """An image file that cannot be read."""

    def __init__(self, path: str, reason: str):
        super().__init__(f"cannot read the image {path} ({reason}): replace or delete it")
        self.reason = reason


class Size(NamedTuple):
    """Height and width to which images are scaled.

    With `shorter`, the shorter side is scaled to that first, and the centre cut out, as by
    torchvision's Resize and CenterCrop.
    """

    height: int
    width: int
    shorter: int | None = None

    def fit(self, image: Any) -> Any:
        """A Pillow image of this size."""
        from PIL import Image

        target = (self.width, self.height)
        if self.shorter:
            target = tuple(self.shorter * side // min(image.size) for side in image.size)
        image = image.resize(target, Image.Resampling.BILINEAR)
        left = round((image.width - self.width) / 2)
        top = round((image.height - self.height) / 2)
        return image.crop((left, top, left + self.width, top + self.height))


def size_of(image_size: int | None, resize_size: int | None) -> Size | None:
    """The size by --image-size and --resize-size; None: images keep theirs."""
    return Size(image_size, image_size, resize_size) if image_size else None


class Listing(NamedTuple):
    """The images of train/ and test/, each with its class, and the number of other files by
    reason."""

    classes: list[str]
    train: list[tuple[str, str]]
    test: list[tuple[str, str]]
    left_out: Counter[str]
    unreadable: dict[str, str]
    """Images that were left out, with reasons."""

    def paths(self) -> list[str]:
        """All images."""
        return [path for _, path in (*self.train, *self.test)]

    def __str__(self) -> str:
        counts = f"{len(self.train):,} for training and {len(self.test):,} for tests"
        left_out = ", ".join(
            f"{number:,} {reason}" for reason, number in self.left_out.most_common()
        )
        return (
            f"images: {counts}; classes: {len(self.classes)}; files left out: {left_out or 'none'}"
        )


def listed(root: Path, skip_unreadable: bool = False) -> Listing:
    """The images below root/train/CLASS and root/test/CLASS, by class and path.

    Hidden folders and files, such as .ipynb_checkpoints and ._00.png, are left out; with
    `skip_unreadable` also images that cannot be decoded.

    UserError: a folder is missing, unreadable or without images, or classes of train/ and test/
    differ.
    """
    classes: list[set[str]] = []
    needed = "--data-root needs train/CLASS/*.png and test/CLASS/*.png"
    listing = Listing([], [], [], Counter(), {})
    for part, images in ((root / "train", listing.train), (root / "test", listing.test)):
        images += [(inside[0], path) for inside, path in below(part, 1, listing.left_out, needed)]
        images.sort(key=lambda image: image[0])
        if skip_unreadable:
            faults = unreadable.faults_of(tuple(path for _, path in images))
            listing.unreadable.update(faults)
            images[:] = [image for image in images if image[1] not in faults]
        folders = [place for place in part.iterdir() if place.is_dir()]
        classes.append({place.name for place in folders if place.name[0] != "."})
        empty = sorted(classes[-1] - {name for name, _ in images})
        if empty or not classes[-1]:
            raise UserError(
                f"{part}/{', '.join(empty) or 'CLASS'}: no images, which every class needs"
            )
    check_names(root, set.union(*classes))
    in_one_part = sorted(classes[0] ^ classes[1])
    if in_one_part:
        raise UserError(f"{root}: train/ and test/ differ in classes: {', '.join(in_one_part)}")
    return listing._replace(classes=sorted(classes[0]))


def below(
    root: Path, depth: int, left_out: Counter[str], needed: str
) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield (folders below `root`, path) for each image that lies at least `depth` folders deep.

    Images come in the order of their paths. Other files are counted in `left_out`, by reason.
    Raises a UserError that ends with `needed` if a folder is missing or unreadable.
    """
    for folder, _, names in sorted(walk(root, needed)):
        inside = Path(folder).relative_to(root).parts
        for name in names:
            suffix = os.path.splitext(name)[1].lower()
            if any(word.startswith(".") for word in (*inside, name)):
                left_out["hidden"] += 1
            elif len(inside) < depth:
                left_out["in no class"] += 1
            elif suffix not in KINDS:
                left_out[suffix or "without suffix"] += 1
            else:
                yield inside, os.path.join(folder, name)


def read(
    root: Path,
    size: Size | None,
    cache: Path | None = None,
    background: str = BACKGROUND,
    skip_unreadable: bool = False,
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Images (n, 3, height, width) and labels (n,) of train/ and test/.

    Images are composed on `background` and scaled to `size` if given. They are in memory or, with
    `cache`, mapped from files there. With `skip_unreadable`, those that cannot be decoded are left
    out.

    UserError: as of `listed`, images are unreadable (all are named), images differ in size, or
    `cache` cannot be written. MemoryError: they need more memory than there is.
    """
    listing = listed(root, skip_unreadable)
    parts = []
    try:
        for part, images in ((root / "train", listing.train), (root / "test", listing.test)):
            names, paths = zip(*images, strict=True)
            _, labels = np.unique(names, return_inverse=True)
            parts.append((pixels_of(part, paths, size, cache, background), labels))
    except UnreadableImage:
        raise unreadable.error_of(listing.paths()) from None
    if parts[0][0].shape[1:] != parts[1][0].shape[1:]:
        raise UserError(f"{root}: images of train/ and test/ differ in size: give --image-size")
    return parts


def pixels_of(
    part: Path,
    paths: Sequence[str],
    size: Size | None,
    cache: Path | None,
    background: str = BACKGROUND,
) -> np.ndarray:
    """The images of `_decoded`, in memory or mapped from a file in `cache`.

    The first process that needs the file writes it. Its name depends on name, size and time of all
    `paths`.
    """
    if not cache:
        return _decoded(paths, size, background)
    digest = hashlib.sha256(f"upright {size} {check_background(background)}".encode())
    for path in paths:
        stat = os.stat(path)
        digest.update(repr((os.path.relpath(path, part), stat.st_size, stat.st_mtime_ns)).encode())
    file = cache / f"{part.name}_{digest.hexdigest()[:16]}.npy"
    make_directory(cache)
    try:
        # Mode 660: whoever can open the lock file could hold the lock.
        with FileLock(cache / ".lock", mode=0o660):
            if not file.exists():
                with atomic_write(file, "wb") as out:
                    _decoded(paths, size, background, out)
    except OSError as error:
        reason = f"cannot be written ({error.strerror})"
        raise UserError(f"{file}: {reason}: choose another --cache-images") from None
    try:
        return np.load(file, mmap_mode="c")  # torch warns about "r", though nothing writes to it
    except ValueError as error:
        raise UserError(f"{file} is damaged ({error}): delete it") from None


def _decoded(
    paths: Sequence[str], size: Size | None, background: str, out: IO[bytes] | None = None
) -> np.ndarray:
    """Images (n, 3, height, width) of files, in memory, or mapped from the new .npy file `out`."""
    set_warnings()
    height, width = read_image(paths[0], size, background=background).shape[:2]
    shape = (len(paths), 3, height, width)
    if out:
        npy.write_array_header_2_0(out, {"descr": "|u1", "fortran_order": False, "shape": shape})
        out.flush()
        # Reserve the space: a write to the map of a full disk would kill the process.
        os.posix_fallocate(out.fileno(), out.tell(), int(np.prod(shape)))
        pixels: np.ndarray = np.memmap(out, np.uint8, "r+", out.tell(), shape)
    else:
        pixels = empty(shape)

    def decode(start: int) -> None:
        for i, path in enumerate(paths[start : start + _CHUNK], start):
            image = read_image(path, size, background=background)
            if image.shape[:2] != (height, width):
                sizes = sorted([(height, width), image.shape[:2]])
                fault = f"images of several sizes, such as {sizes[0]} and {sizes[1]}"
                raise UserError(f"{Path(path).parents[1]} has {fault}: give --image-size")
            pixels[i] = image.transpose(2, 0, 1)

    with ThreadPoolExecutor(4) as pool:  # chunks keep the threads' overhead low for small images
        list(pool.map(decode, range(0, len(paths), _CHUNK)))
    return pixels


def empty(shape: tuple[int, ...]) -> np.ndarray:
    """A new array of bytes.

    Raises MemoryError if it exceeds the machine's memory: Linux would grant it, and kill the
    process when it is filled.
    """
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if np.prod(shape, dtype=float) > memory:
        raise MemoryError
    return np.empty(shape, np.uint8)


def scaled(images: np.ndarray, size: Size) -> np.ndarray:
    """Images (n, channels, height, width) as bytes, scaled to `size` as those of a folder."""
    from PIL import Image

    pixels = empty((*images.shape[:2], size.height, size.width))
    for plane in np.ndindex(images.shape[:2]):
        pixels[plane] = size.fit(Image.fromarray(images[plane]))
    return pixels


def set_warnings() -> None:
    """Make Pillow's warning of images of 90 megapixels and more an error, and ignore damaged
    metadata."""
    from PIL import Image

    warnings.simplefilter("error", Image.DecompressionBombWarning)
    warnings.filterwarnings("ignore", category=UserWarning, module="PIL")


def upright_size(path: str) -> tuple[int, int] | None:
    """Width and height of an image, by its EXIF orientation, without decoding it; None: it is
    unreadable."""
    from PIL import Image

    too_large = (Image.DecompressionBombError, Image.DecompressionBombWarning)
    with contextlib.suppress(*NO_IMAGE, *too_large), Image.open(path) as image:
        turned = image.getexif().get(_ORIENTATION, 1) in _TURNED
        return image.size[::-1] if turned else image.size
    return None


def read_image(
    path: str, size: Size | None, mode: str = "RGB", background: str = BACKGROUND
) -> np.ndarray:
    """An image as bytes (height, width, 3), or (height, width) in Pillow's `mode` "L".

    It is upright, by its EXIF orientation; of several frames, the first; with alpha, composed on
    `background`. UnreadableImage: it cannot be read, or has more than 8 bits per channel.
    """
    from PIL import Image, ImageOps

    try:
        with Image.open(path) as image:
            if image.mode[0] in "IF":  # Pillow would clip the values at 255
                depth = f"more than 8 bits per channel, mode {image.mode}: convert it"
                raise UnreadableImage(path, depth)
            image.load()
            with contextlib.suppress(*NO_IMAGE):  # damaged EXIF data: keep the image as it is
                ImageOps.exif_transpose(image, in_place=True)
            converted = composed(image, background).convert(mode)
            return np.asarray(size.fit(converted) if size else converted)
    except (*NO_IMAGE, Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UnreadableImage(path, reason) from None
