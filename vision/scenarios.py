"""Streams that drift: class-incremental, rotated and permuted images, with a test set for each mega-batch.

The scenarios of continual learning, for any data set of `vision.data`.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from alma.errors import UserError
from vision.data import Dataset, Images, MegaBatchStream

HALF_TURN = 180.0


def make_stream(dataset: Dataset, megabatches: int, seed: int, scenario: str | None) -> MegaBatchStream:
    """A stream of `megabatches`: i.i.d. if `scenario` is None, else one of `presets.SCENARIOS`.

    classes: each mega-batch has classes of its own, in the order of their numbers.
    rotated: mega-batch t is an i.i.d. part of the images, rotated by 180 (t - 1) / B degrees.
    permuted: mega-batch t has its own order of pixels, drawn with `seed`; the first keeps the images.

    UserError: more mega-batches than classes, or than the images allow.
    """
    if scenario is None:
        return MegaBatchStream(dataset, megabatches, seed)
    if scenario == "classes":
        return _by_class(dataset, megabatches, seed)
    changes = {"rotated": _rotation, "permuted": _permutation}[scenario](dataset, megabatches, seed)
    return _changing(dataset, changes, seed, scenario)


def _by_class(dataset: Dataset, megabatches: int, seed: int) -> MegaBatchStream:
    if not 1 <= megabatches <= dataset.classes:
        raise UserError(
            f"--scenario classes: {megabatches} mega-batches of {dataset.classes} classes: give "
            f"--megabatches {dataset.classes} or fewer"
        )
    random = np.random.RandomState(seed)
    groups = np.array_split(np.arange(dataset.classes), megabatches)
    train, test = (labels.numpy() for labels in (dataset.train.labels, dataset.test.labels))
    parts = [random.permutation(np.flatnonzero(np.isin(train, group))) for group in groups]
    held_out = [np.flatnonzero(np.isin(test, group)) for group in groups]
    return MegaBatchStream(dataset, seed=seed, parts=parts, held_out=held_out, scenario="classes")


def _changing(
    dataset: Dataset, changes: list[Callable[[Tensor], Tensor]], seed: int, scenario: str
) -> MegaBatchStream:
    """Change the images of each mega-batch of an i.i.d. partition, and a copy of the test set for each."""
    parts = MegaBatchStream(dataset, len(changes), seed).parts
    images = dataset.train.images.clone()
    for part, change in zip(parts, changes, strict=True):
        images[part] = change(images[part])
    tests = torch.cat([change(dataset.test.images) for change in changes])
    labels, count = dataset.test.labels, len(dataset.test.labels)
    changed = dataset.with_images(
        Images(images, dataset.train.labels), Images(tests, labels.repeat(len(changes)))
    )
    held_out = [np.arange(k * count, (k + 1) * count) for k in range(len(changes))]
    return MegaBatchStream(changed, seed=seed, parts=parts, held_out=held_out, scenario=scenario)


def _rotation(dataset: Dataset, megabatches: int, seed: int) -> list[Callable[[Tensor], Tensor]]:
    from torchvision.transforms import InterpolationMode
    from torchvision.transforms.functional import rotate

    def by(angle: float) -> Callable[[Tensor], Tensor]:
        return lambda images: rotate(images, angle, InterpolationMode.BILINEAR) if angle else images

    return [by(HALF_TURN * k / megabatches) for k in range(megabatches)]


def _permutation(dataset: Dataset, megabatches: int, seed: int) -> list[Callable[[Tensor], Tensor]]:
    random = np.random.RandomState(seed)
    pixels = int(np.prod(dataset.shape[1:]))

    def by(order: Tensor) -> Callable[[Tensor], Tensor]:
        return lambda images: images.flatten(2)[..., order].view_as(images)

    orders = [np.arange(pixels), *(random.permutation(pixels) for _ in range(megabatches - 1))]
    return [by(torch.from_numpy(order)) for order in orders]
