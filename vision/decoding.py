"""One image file as bytes: upright, without alpha, scaled."""

import contextlib
import warnings
from typing import Any, NamedTuple

import numpy as np

from alma.errors import UserError
from vision.alpha import BACKGROUND, composed
from vision.image_errors import NO_IMAGE

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
