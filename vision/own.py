"""Streams of your own images: from a torch Dataset, tensors or arrays."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from alma.dates import interval
from alma.errors import UserError
from vision.alpha import has_alpha
from vision.data import Dataset, MegaBatchStream, array_of, make_dataset

TEST = 0.2
"""Fraction of the images (of each period, with dates) for testing, if no test set is given."""
LEAST = 3
"""Images of a period: for training, validation and testing."""


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
        """A stream of the images of `dataset`, with the test set `test`.

        Both are a torch Dataset of (image, label), or a pair (images, labels) of tensors or arrays.
        An image is bytes (uint8), or floats from 0 to 1, which become bytes: (height, width),
        (channels, height, width), (height, width, channels), or a Pillow image.

        `dates` has the period of each image, such as 2024 or "2024-03": each period is a
        mega-batch, in order. Otherwise the stream is an i.i.d. partition into `megabatches`.
        Without `test`, a random fifth of the images is the test set, with `dates` a fifth of each
        period, its held-out part.

        UserError: other images or dates, or a period of fewer than 3 images.
        """
        images, labels = _arrays(dataset, name)
        if dates is not None and megabatches is not None:
            raise UserError("give megabatches, or dates: each period is a mega-batch")
        # Not seeded by `seed`: repeats of a run with other seeds must share the test set.
        random = np.random.RandomState(0)
        groups = [np.arange(len(labels))]
        if dates is not None:
            least = LEAST if test is None else LEAST - 1  # without one for testing
            groups = _periods(dates, len(labels), least)
        tested = []
        trained = []
        for group in groups:
            order = random.permutation(group)
            test_count = int(len(order) * TEST) + 1 if test is None else 0
            tested.append(order[:test_count])
            trained.append(order[test_count:])
        if test is None:
            held_out = np.concatenate(tested)
            test_arrays = (images[held_out], labels[held_out])
        else:
            test_arrays = _arrays(test, f"the test set of {name}")
        training = np.concatenate(trained)
        stored = make_dataset(name, (images[training], labels[training]), test_arrays)
        stored = _with_names(stored, getattr(dataset, "classes", None))
        if dates is None:
            return cls(stored, megabatches, seed)
        parts = _places(trained)
        return cls(stored, None, seed, parts, _places(tested) if test is None else ())


def _with_names(dataset: Dataset, names: Any) -> Dataset:
    """The data set with `names` as class names, if they are a collection as in torchvision."""
    if not isinstance(names, list | tuple | dict):
        return dataset
    if len(names) < dataset.classes:
        few = f"{len(names)} names in its `classes`, and labels up to {dataset.classes - 1}"
        raise UserError(f"{dataset.name} has {few}: name every class")
    return replace(dataset, names=[str(name) for name in names], classes=len(names))


def _places(groups: list[np.ndarray]) -> list[np.ndarray]:
    """The positions of each group's elements in the concatenation of all groups."""
    ends = np.cumsum([len(group) for group in groups])
    return np.split(np.arange(ends[-1]), ends[:-1])


def _pairs(data: Any) -> Iterator[tuple[Any, Any]]:
    """Each image with its label."""
    if isinstance(data, tuple):
        yield from zip(*data, strict=True)
    else:
        for i in range(len(data)):
            yield data[i]


def _arrays(data: Any, title: str) -> tuple[np.ndarray, np.ndarray]:
    """Images (n, channels, height, width) as bytes, and labels (n,); `title` names them in
    errors."""
    images = []
    labels = []
    try:
        for image, label in _pairs(data):
            images.append(_bytes_of(image, title))
            labels.append(array_of(label))
        if not images:
            raise ValueError("not enough values to unpack (expected 2, got 0)")
        y = np.array(labels)
    except (TypeError, ValueError, LookupError) as error:
        raise UserError(f"{title} ({error!r}): give images, each with a label") from None
    sizes = sorted({image.shape for image in images})
    if len(sizes) > 1:
        few = f"such as {sizes[0]} and {sizes[-1]}"
        raise UserError(f"{title} has images of several sizes, {few}: scale them")
    return np.stack(images), y


def _bytes_of(image: Any, title: str) -> np.ndarray:
    """An image (channels, height, width) as bytes. UserError: it is no image."""
    from PIL.Image import Image

    if isinstance(image, Image):
        if has_alpha(image) and image.mode not in ("RGBA", "LA"):
            problem = f"{title} has an image of mode {image.mode} with transparency"
            raise UserError(f"{problem}: give image.convert('RGBA'), or paste it on a colour")
        if image.mode == "P":  # with a colour palette
            image = image.convert("RGB")
    x = array_of(image)
    if x.dtype.kind == "f" and x.size and x.min() >= 0 and x.max() <= 1:
        x = (x * 255).round().astype(np.uint8)
    if x.dtype != np.uint8 or x.ndim not in (2, 3) or not x.size:
        kind = f"{x.dtype} {x.shape}"
        if x.size:
            kind += f" from {x.min():.3g} to {x.max():.3g}"
        needed = "uint8, or floats from 0 to 1 (without Normalize)"
        raise UserError(f"{title} has an image {kind}: give {needed}")
    if x.ndim == 2:
        return x[None]
    channels_last = x.shape[0] > 4 >= x.shape[2]
    return x.transpose(2, 0, 1) if channels_last else x


def _periods(dates: Any, count: int, least: int) -> list[np.ndarray]:
    """Indices of the images of each period, `least` or more, in the order of the periods."""
    try:
        when = array_of(dates)
    except ValueError:  # a ragged list
        when = np.empty(0)
    if when.dtype.kind in "UO":
        # "Jan" or "2024-9" raises ValueError; "", whose interval is None, raises TypeError.
        with suppress(ValueError, TypeError):
            when = np.array([interval(value)[0] for value in when], "M8[s]")  # type: ignore[index]
    is_dated = when.shape == (count,) and when.dtype.kind in "iuM"
    if not is_dated or (when.dtype.kind == "M" and np.isnat(when).any()):
        needed = f"give the period of each of {count} images, such as 2024 or '2024-03'"
        raise UserError(f"dates are {when.dtype} {when.shape}: {needed}")
    periods, sizes = np.unique(when, return_counts=True)
    if sizes.min() < least:
        problem = f"dates give {len(periods)} periods, the smallest of {sizes.min()} images"
        remedy = "such as its month, '2024-03', and not its own moment"
        raise UserError(f"{problem}: give the period of each image, {remedy}, with {least} or more")
    return [np.flatnonzero(when == period) for period in periods]
