"""Streams that drift, with a test set for each mega-batch: images by date, and scenarios.

The scenarios of continual learning are class-incremental, rotated and permuted, for any data set of
`vision.data`.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vision import folder, image_sizes, presets, unreadable
from vision.alpha import BACKGROUND, check_background
from vision.data import Dataset, Images, MegaBatchStream, make_dataset
from vision.examples import Pixels
from vision.image_files import ImagePeriod, ImageSource, paths_of
from vision.periods import listed


def make_stream(
    dataset: Dataset, megabatches: int, seed: int, scenario: str | None
) -> MegaBatchStream:
    """A stream of B `megabatches`: i.i.d. if `scenario` is None, else one of `presets.SCENARIOS`.

    classes: each mega-batch has its own classes, in the order of their numbers. rotated: mega-batch
    t is an i.i.d. part of the images, rotated by 180 (t - 1) / B degrees. permuted: mega-batch t
    has its own order of pixels, drawn with `seed`; the first keeps the images.

    UserError: more mega-batches than classes, or than the images allow.
    """
    presets.check_seed(seed)
    if scenario is None:
        return MegaBatchStream(dataset, megabatches, seed)
    if scenario == "classes":
        return _by_classes(dataset, megabatches, seed)
    if scenario == "rotated":
        change = partial(_rotated, megabatches=megabatches)
    else:
        change = partial(_permuted, orders=_pixel_orders(dataset, megabatches, seed))
    return _changed_stream(dataset, megabatches, seed, scenario, change)


def _by_classes(dataset: Dataset, megabatches: int, seed: int) -> MegaBatchStream:
    """A stream whose mega-batches and held-out parts have classes of their own."""
    presets.check_megabatches(megabatches, len(dataset.train.labels), dataset.classes)
    random = np.random.RandomState(seed)
    parts = []
    held_out = []
    for classes in np.array_split(np.arange(dataset.classes), megabatches):
        trained = np.flatnonzero(np.isin(dataset.train.labels.numpy(), classes))
        parts.append(random.permutation(trained))
        held_out.append(np.flatnonzero(np.isin(dataset.test.labels.numpy(), classes)))
    return MegaBatchStream(dataset, seed=seed, parts=parts, held_out=held_out, scenario="classes")


def _rotated(images: Tensor, k: int, megabatches: int) -> Tensor:
    """Images of mega-batch k = 0, 1, ..., rotated by 180 k / B degrees."""
    from torchvision.transforms import InterpolationMode
    from torchvision.transforms.functional import rotate

    if k == 0:
        return images
    return rotate(images, 180.0 * k / megabatches, InterpolationMode.BILINEAR)


def _permuted(images: Tensor, k: int, orders: Sequence[np.ndarray]) -> Tensor:
    """Images of mega-batch k = 0, 1, ..., with their pixels in the k-th order."""
    return images.flatten(2)[..., torch.from_numpy(orders[k])].view_as(images)


def _pixel_orders(dataset: Dataset, megabatches: int, seed: int) -> list[np.ndarray]:
    """An order of the pixels for each mega-batch; the first is the images' own."""
    random = np.random.RandomState(seed)
    pixels = int(np.prod(dataset.shape[1:]))
    orders = [random.permutation(pixels) for _ in range(megabatches - 1)]
    return [np.arange(pixels), *orders]


def _changed_stream(
    dataset: Dataset,
    megabatches: int,
    seed: int,
    scenario: str,
    change: Callable[[Tensor, int], Tensor],
) -> MegaBatchStream:
    """An i.i.d. partition with the images of each mega-batch k, and a copy of the test set, changed
    by `change(images, k)`."""
    parts = MegaBatchStream(dataset, megabatches, seed).parts
    images = dataset.train.images.clone()
    for k, part in enumerate(parts):
        images[part] = change(images[part], k)
    count = len(dataset.test.labels)
    tests = torch.cat([change(dataset.test.images, k) for k in range(megabatches)])
    held_out = [np.arange(k * count, (k + 1) * count) for k in range(megabatches)]
    changed = replace(
        dataset,
        train=Images(images, dataset.train.labels),
        test=Images(tests, dataset.test.labels.repeat(megabatches)),
        # The fingerprint of the unchanged data set: pixel orders depend on the seed, but runs that
        # differ only in the seed are repeats.
        source_fingerprint=dataset.fingerprint,
    )
    return MegaBatchStream(changed, seed=seed, parts=parts, held_out=held_out, scenario=scenario)


@lru_cache(maxsize=2)
def read_periods(
    source: ImageSource, size: folder.Size | None, cache: str | None = None
) -> MegaBatchStream:
    """Images by date, see `vision.periods`, scaled to `size` if given, or else to that of the first
    period's images.

    They are in memory or, with `cache`, mapped from a file of each period in that folder. Pixels
    are normalised by mean and deviation of the first period's training images.

    UserError: as of `listed`, images are unreadable (all are named), images of the first period
    differ in size, or `cache` cannot be written.
    """
    periods, _ = listed(source)
    new_classes = [name for period in periods for name in period.new_classes]
    numbers = {name: number for number, name in enumerate(new_classes)}
    train: list[Images] = []  # of each period
    test: list[Images] = []
    for period in periods:
        scaled_to = size or image_sizes.resized_to(period, periods[0])
        try:
            images = _period_images(source, period, numbers, scaled_to, cache)
        except folder.UnreadableImage:
            raise unreadable.error_of(paths_of(periods)) from None
        cut = len(images.labels) - len(period.splits["test"])
        train.append(Images(images.images[:cut], images.labels[:cut]))
        test.append(Images(images.images[cut:], images.labels[cut:]))

    count = len(periods[0].splits["train"])
    first = Images(train[0].images[:count], train[0].labels[:count])
    digest = hashlib.sha256(f"{size} {periods[0].sha256}".encode())
    if source.background != BACKGROUND:
        digest.update(str(check_background(source.background)).encode())
    dataset = replace(
        make_dataset("folder", first, first),
        train=_joined(train),
        test=_joined(test),
        classes=len(numbers),
        names=list(numbers),
        resize_size=size and size.shorter,
        background=source.background,
        # A hash of the first period only, so that appends do not change it.
        source_fingerprint=digest.hexdigest()[:16],
    )
    return MegaBatchStream(
        dataset,
        parts=_consecutive(train),
        held_out=_consecutive(test),
        scenario=f"by {source.by}",
        periods=periods,
    )


def _period_images(
    source: ImageSource,
    period: ImagePeriod,
    numbers: Mapping[str, int],
    size: folder.Size | None,
    cache: str | None,
) -> Images:
    """All images of a period, split by split, with the `numbers` of their classes as labels."""
    images = [image for split in period.splits.values() for image in split]
    paths = [image["path"] for image in images]
    place = Path(source.root, period.name)
    pixels = folder.pixels_of(place, paths, size, Path(cache) if cache else None, source.background)
    labels = torch.tensor([numbers[image["label"]] for image in images])
    return Images(torch.from_numpy(pixels), labels)


def _joined(parts: Sequence[Images]) -> Images:
    """The images of all periods."""
    pixels = Pixels([part.images for part in parts])
    return Images(pixels, torch.cat([part.labels for part in parts]))


def _consecutive(parts: Sequence[Images]) -> list[np.ndarray]:
    """Indices of the images of each period among those of all periods."""
    ends = np.cumsum([len(part.labels) for part in parts])
    return np.split(np.arange(ends[-1]), ends[:-1])
