"""Transparent images: composed on a background of one colour, as bytes have no alpha."""

import contextlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from alma.errors import UserError

BACKGROUND = "white"
"""The default of --background."""
_MODES = ("RGBA", "LA", "PA", "RGBa")
"""Pillow's modes with an alpha channel."""
_NEVER = (".jpg", ".jpeg", ".jfif", ".pgm", ".ppm")
"""Suffixes of formats that have no transparency."""


def check_background(colour: str) -> tuple[int, int, int]:
    """Red, green and blue of a colour. UserError: Pillow does not know it, or it has an alpha."""
    from PIL import ImageColor

    needed = f"--background {colour}: no colour: give a name such as black, or #rrggbb"
    try:
        values = ImageColor.getrgb(colour)
    except ValueError:
        raise UserError(needed) from None
    if len(values) > 3:  # of #rrggbbaa
        raise UserError(needed)
    return values


def has_alpha(image: Any) -> bool:
    """Whether a Pillow image has an alpha channel or a transparent colour."""
    return image.mode in _MODES or "transparency" in image.info


def composed(image: Any, background: str = BACKGROUND) -> Any:
    """A Pillow image without alpha: pasted on `background` unless it is opaque."""
    from PIL import Image

    if not has_alpha(image):
        return image
    layer = image.convert("RGBA")
    least_alpha, _ = layer.getextrema()[3]
    if least_alpha == 255:
        return image
    ground = Image.new("RGBA", layer.size, check_background(background))
    ground.alpha_composite(layer)
    return ground.convert("RGB")


def count(paths: Sequence[str]) -> int:
    """The number of image files with an alpha channel or a transparent colour, by their headers."""
    candidates = [path for path in paths if not path.lower().endswith(_NEVER)]
    with ThreadPoolExecutor(4) as pool:
        return sum(pool.map(_file_has_alpha, candidates))


def line(paths: Sequence[str], background: str) -> str:
    """A line about the images with alpha among those files; empty without any."""
    number = count(paths)
    if not number:
        return ""
    return f"images with alpha: {number:,}, composed on {background} (--background)"


def _file_has_alpha(path: str) -> bool:
    """As `has_alpha`, of a file; False if it is unreadable."""
    from PIL import Image

    from vision.folder import NO_IMAGE

    too_large = (Image.DecompressionBombError, Image.DecompressionBombWarning)
    with contextlib.suppress(*NO_IMAGE, *too_large), Image.open(path) as image:
        return has_alpha(image)
    return False
