"""The sizes of images by date: those of the first period fix the size of all later ones."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor

from vision import decoding
from vision.image_files import ImagePeriod, ImageSource
from vision.periods import listed

_SHOWN = 5
"""Sizes of a period that a line names, at most."""

Pixels = tuple[int, int]
"""Width and height, upright."""


_COUNTED: dict[str, Counter[Pixels]] = {}
"""Sizes by the hash of a period, which are counted once for each process."""


def sizes_of(period: ImagePeriod) -> Counter[Pixels]:
    """The number of images of each size in a period; unreadable ones are left out."""
    key = period.sha256
    if key not in _COUNTED:
        paths = [image["path"] for images in period.splits.values() for image in images]
        with ThreadPoolExecutor(4) as pool:
            sizes = pool.map(decoding.upright_size, paths)
            _COUNTED[key] = Counter(size for size in sizes if size)
    return _COUNTED[key]


def resized_to(period: ImagePeriod, first: ImagePeriod) -> decoding.Size | None:
    """The size to which the images of a period are scaled; None: all have that of the `first`
    period, which may be this one."""
    fixed = _fixed(first)
    if period is first or not fixed or sizes_of(period).keys() <= {fixed}:
        return None
    width, height = fixed
    return decoding.Size(height, width)


def resized_lines(source: ImageSource) -> list[str]:
    """A line for each period with images of another size than those of the first period."""
    periods, _ = listed(source)
    lines = []
    for period in periods:
        size = resized_to(period, periods[0])
        if size:
            other_sizes = Counter(sizes_of(period))
            del other_sizes[size.width, size.height]
            shown = []
            for pixels, number in other_sizes.most_common(_SHOWN):
                shown.append(f"{number:,} of {_text(pixels)}")
            if len(other_sizes) > _SHOWN:
                shown.append(f"images of {len(other_sizes) - _SHOWN} more sizes")
            target = f"{_text((size.width, size.height))} pixels, the size of {periods[0].name}"
            lines.append(f"{period.name}: images resized to {target}: {', '.join(shown)}")
    return lines


def _fixed(period: ImagePeriod) -> Pixels | None:
    """The one size of a period's images; None if they have several."""
    sizes = sizes_of(period)
    return next(iter(sizes)) if len(sizes) == 1 else None


def _text(pixels: Pixels) -> str:
    """Width and height, such as "4 x 5"."""
    return f"{pixels[0]} x {pixels[1]}"
