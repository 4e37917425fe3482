"""Streams that drift, with a test set for each mega-batch: images by date, and the scenarios of continual
learning, class-incremental, rotated and permuted, for any data set of `vision.data`."""

import hashlib
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from alma.errors import UserError
from vision import folder, presets
from vision.data import Dataset, Images, MegaBatchStream, make_dataset
from vision.examples import Pixels
from vision.periods import ImageSource, listed


def make_stream(dataset: Dataset, megabatches: int, seed: int, scenario: str | None) -> MegaBatchStream:
    """A stream of `megabatches`: i.i.d. if `scenario` is None, else one of `presets.SCENARIOS`.

    classes: each mega-batch has classes of its own, in the order of their numbers.
    rotated: mega-batch t is an i.i.d. part of the images, rotated by 180 (t - 1) / B degrees.
    permuted: mega-batch t has its own order of pixels, drawn with `seed`; the first keeps the images.

    UserError: more mega-batches than classes, or than the images allow.
    """
    presets.check_seed(seed)
    if scenario is None:
        return MegaBatchStream(dataset, megabatches, seed)
    random = np.random.RandomState(seed)
    if scenario == "classes":
        presets.check_megabatches(megabatches, len(dataset.train.labels), dataset.classes)
        groups = np.array_split(np.arange(dataset.classes), megabatches)
        own, held_out = (
            [np.flatnonzero(np.isin(images.labels.numpy(), group)) for group in groups]
            for images in (dataset.train, dataset.test)
        )
        parts = [random.permutation(indices) for indices in own]
        return MegaBatchStream(dataset, seed=seed, parts=parts, held_out=held_out, scenario=scenario)

    pixels = int(np.prod(dataset.shape[1:]))
    orders = [np.arange(pixels), *(random.permutation(pixels) for _ in range(megabatches - 1))]

    def changed(images: Tensor, k: int) -> Tensor:
        """The images of mega-batch k = 0, 1, ..."""
        if scenario == "permuted":
            return images.flatten(2)[..., torch.from_numpy(orders[k])].view_as(images)
        from torchvision.transforms import InterpolationMode
        from torchvision.transforms.functional import rotate

        return rotate(images, 180.0 * k / megabatches, InterpolationMode.BILINEAR) if k else images

    parts = MegaBatchStream(dataset, megabatches, seed).parts
    images = dataset.train.images.clone()
    for k, part in enumerate(parts):
        images[part] = changed(images[part], k)
    labels, count = dataset.test.labels, len(dataset.test.labels)
    tests = torch.cat([changed(dataset.test.images, k) for k in range(megabatches)])
    test = Images(tests, labels.repeat(megabatches))
    held_out = [np.arange(k * count, (k + 1) * count) for k in range(megabatches)]
    whole = replace(dataset, train=Images(images, dataset.train.labels), test=test)
    whole.__dict__["fingerprint"] = dataset.fingerprint  # of the data set as it was: seeds are repeats
    return MegaBatchStream(whole, seed=seed, parts=parts, held_out=held_out, scenario=scenario)


@lru_cache(maxsize=2)
def read_periods(source: ImageSource, size: folder.Size | None, cache: str | None = None) -> MegaBatchStream:
    """Images by date, see `vision.periods`, scaled to `size` if given, in memory, or mapped from a file of
    each period in `cache`. Pixels are normalised by mean and deviation of the first period's training images.
    UserError: as of `listed`, an image is unreadable, images differ in size, or `cache` cannot be written.
    """
    periods, _ = listed(source)
    numbers = {name: k for k, name in enumerate(name for period in periods for name in period.new_classes)}
    train: list[Images] = []  # of each period
    test: list[Images] = []
    for period in periods:
        images = [image for split in period.splits.values() for image in split]
        paths, folder_of = [image["path"] for image in images], Path(cache) if cache else None
        pixels = torch.from_numpy(folder.pixels_of(Path(source.root, period.name), paths, size, folder_of))
        labels = torch.tensor([numbers[image["label"]] for image in images])
        if train and pixels.shape[1:] != train[0].images.shape[1:]:
            sizes = tuple(train[0].images.shape[2:]), tuple(pixels.shape[2:])
            raise UserError(f"{period.name}: images of {sizes[1]}, others of {sizes[0]}: give --image-size")
        cut = len(images) - len(period.splits["test"])
        train.append(Images(pixels[:cut], labels[:cut]))
        test.append(Images(pixels[cut:], labels[cut:]))
    both = [Images(Pixels([x for x, _ in own]), torch.cat([y for _, y in own])) for own in (train, test)]
    first = [each[: len(periods[0].splits["train"])] for each in train[0]]
    dataset = replace(make_dataset("folder", first, first), train=both[0], test=both[1], classes=len(numbers))
    dataset = replace(dataset, names=list(numbers), resize_size=size and size.shorter)
    digest = hashlib.sha256(f"{size} {periods[0].sha256}".encode())
    dataset.__dict__["fingerprint"] = digest.hexdigest()[:16]  # later periods leave it as it is
    ends = [np.cumsum([len(labels) for _, labels in own]) for own in (train, test)]
    parts, held_out = (np.split(np.arange(end[-1]), end[:-1]) for end in ends)
    return MegaBatchStream(dataset, None, 0, parts, held_out, f"by {source.by}", periods)
