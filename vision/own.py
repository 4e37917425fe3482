"""Streams of your own images: from a torch Dataset, tensors or arrays."""

from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from alma.dates import interval
from alma.errors import UserError
from vision.data import MegaBatchStream, make_dataset

TEST = 0.2
"""Share of the images, or of those of each period, that are the test set if none is given."""


class OwnStream(MegaBatchStream):
    """A stream of your own images, called `vision.Stream`."""

    @classmethod
    def from_dataset(
        cls,
        dataset: Any,
        test: Any = None,
        *,
        dates: Any = None,
        megabatches: int | None = None,
        name: str = "mine",
        seed: int = 0,
    ) -> "OwnStream":
        """The images of a torch Dataset of (image, label), or of a pair (images, labels) of tensors or
        arrays, and so for `test`.

        An image is bytes (uint8), or floats from 0 to 1, which become bytes: (height, width), (channels,
        height, width), (height, width, channels), or a Pillow image. `dates` has the period of each image,
        such as 2024 or "2024-03": each period is a mega-batch, in order. Otherwise `megabatches` are an
        i.i.d. partition. Without `test`, a random fifth of the images is the test set; of each period, whose
        held-out part it is. UserError: other images or dates, or a period of fewer than 3 images.
        """
        images, labels = _arrays(dataset, name)
        if dates is not None and megabatches is not None:
            raise UserError("give megabatches, or dates: each period is a mega-batch")
        random = np.random.RandomState(0)  # the same for all seeds, whose runs then are repeats
        groups = [np.arange(len(labels))] if dates is None else _periods(dates, len(labels))
        groups = [random.permutation(group) for group in groups]
        tested = [group[: 0 if test is not None else int(len(group) * TEST) + 1] for group in groups]
        trained = [group[len(part) :] for group, part in zip(groups, tested, strict=True)]
        held, kept = np.concatenate(tested), np.concatenate(trained)
        given = (images[held], labels[held]) if test is None else _arrays(test, f"the test set of {name}")
        made = make_dataset(name, (images[kept], labels[kept]), given)
        if isinstance(names := getattr(dataset, "classes", None), list | tuple | dict):  # as torchvision's
            if len(names) < made.classes:
                few = f"{len(names)} names in its `classes`, and labels up to {made.classes - 1}"
                raise UserError(f"{name} has {few}: name every class")
            made = replace(made, names=[str(name) for name in names], classes=len(names))
        if dates is None:
            return cls(made, megabatches, seed)
        return cls(made, None, seed, _places(trained), _places(tested) if test is None else ())


def _places(groups: list[np.ndarray]) -> list[np.ndarray]:
    """Indices of the members of each group in their concatenation."""
    ends = np.cumsum([len(group) for group in groups])
    return np.split(np.arange(ends[-1]), ends[:-1])


def _arrays(data: Any, what: str) -> tuple[np.ndarray, np.ndarray]:
    """Images (n, channels, height, width) as bytes, and labels (n,)."""
    try:
        pairs = zip(*data, strict=True) if isinstance(data, tuple) else (data[i] for i in range(len(data)))
        items = [(_bytes_of(image, what), np.asarray(label)) for image, label in pairs]
        images, labels = zip(*items, strict=True)
        y = np.array(labels)
    except (TypeError, ValueError, LookupError) as error:
        raise UserError(f"{what} ({error!r}): give images, each with a label") from None
    if len(sizes := sorted({image.shape for image in images})) > 1:
        raise UserError(f"{what} has images of several sizes, such as {sizes[0]} and {sizes[-1]}: scale them")
    return np.stack(images), y


def _bytes_of(image: Any, what: str) -> np.ndarray:
    """An image (channels, height, width) as bytes. UserError: it is none."""
    x = np.asarray(image.convert("RGB") if getattr(image, "mode", "") == "P" else image)  # P: a palette
    if x.dtype.kind == "f" and x.size and x.min() >= 0 and x.max() <= 1:
        x = (x * 255).round().astype(np.uint8)
    if x.dtype != np.uint8 or x.ndim not in (2, 3) or not x.size:
        kind = f"{x.dtype} {x.shape}" + (f" from {x.min():.3g} to {x.max():.3g}" if x.size else "")
        raise UserError(f"{what} has an image {kind}: give uint8, or floats from 0 to 1 (without Normalize)")
    if x.ndim == 2:
        return x[None]
    return x.transpose(2, 0, 1) if x.shape[0] > 4 >= x.shape[2] else x


def _periods(dates: Any, count: int) -> list[np.ndarray]:
    """Indices of the images of each period, in the order of the periods."""
    try:
        when = np.asarray(dates)
    except ValueError:  # ragged
        when = np.empty(0)
    with suppress(ValueError, TypeError):  # of "Jan" or "2024-9"; "": None has no first moment
        when = np.array([interval(x)[0] for x in when], "M8[s]") if when.dtype.kind == "U" else when  # type: ignore[index]
    if when.shape != (count,) or when.dtype.kind not in "iuM" or any(when != when):  # NaT
        needed = f"give the period of each of {count} images, such as 2024 or '2024-03'"
        raise UserError(f"dates are {when.dtype} {when.shape}: {needed}")
    return [np.flatnonzero(when == period) for period in np.unique(when)]
