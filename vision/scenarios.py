"""Streams that drift, with a test set for each mega-batch: images by date, and the scenarios of continual
learning, class-incremental, rotated and permuted, for any data set of `vision.data`."""

import hashlib
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from alma.errors import UserError
from vision import folder, presets
from vision.data import Dataset, Images, MegaBatchStream, statistics_of
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


class PeriodStream(MegaBatchStream):
    """Images by period, see `vision.periods`: a mega-batch each, with validation and test images of its own.

    Pixels are normalised by mean and deviation of the first period's training images. UserError: as of
    `listed`, an image is unreadable, images differ in size, or `cache` cannot be written.
    """

    def __init__(self, source: ImageSource, image_size: int | None = None, cache: str | None = None):
        self.periods, _ = listed(source)
        numbers = {name: k for k, name in enumerate(name for p in self.periods for name in p.new_classes)}
        self._classes = np.cumsum([len(period.new_classes) for period in self.periods]).tolist()
        self._train = [len(period.splits["train"]) for period in self.periods]
        found = []
        for split in (("train", "valid"), ("test",)):
            own = [[file for name in split for file in period.splits[name]] for period in self.periods]
            pixels = []
            for period, files in zip(self.periods, own, strict=True):
                place = Path(source.root, f"{period.name}-{split[0]}")
                paths = [file.path for file in files]
                pixels.append(folder.pixels_of(place, paths, image_size, Path(cache) if cache else None))
            labels = torch.tensor([numbers[file.label] for files in own for file in files])
            ends = np.cumsum([0, *map(len, own)])
            found.append((pixels, labels, [np.arange(*pair) for pair in pairwise(ends)]))
        (train, labels, parts), (test, test_labels, held_out) = found
        if len(sizes := sorted({part.shape[2:] for part in (*train, *test)})) > 1:
            what = f"images of several sizes, such as {sizes[0]} and {sizes[1]}"
            raise UserError(f"{source.manifest or source.root} has {what}: give --image-size")
        first = statistics_of(torch.from_numpy(train[0][: self._train[0]]))
        images = (
            Images(Pixels(list(map(torch.from_numpy, train))), labels),
            Images(Pixels(list(map(torch.from_numpy, test))), test_labels),
        )
        dataset = Dataset("folder", *images, len(numbers), *first)
        digest = hashlib.sha256(f"{image_size} {self.periods[0].sha256}".encode())
        dataset.__dict__["fingerprint"] = digest.hexdigest()[:16]  # later periods leave it as it is
        super().__init__(dataset, parts=parts, held_out=held_out, scenario=f"by {source.by}")

    def config(self, seed: int) -> dict[str, Any]:
        """Name and hash of each period; the splits do not depend on the seed."""
        names, hashes = zip(*((period.name, period.sha256) for period in self.periods), strict=True)
        return {"scenario": self.scenario, "periods": list(names), "megabatch_sha256": list(hashes)}

    def classes(self, t: int) -> int:
        """Number of classes that appear in periods 1..t."""
        return self._classes[t - 1]

    def split(self, t: int) -> tuple[np.ndarray, np.ndarray]:
        """Indices of the training and validation images of period t = 1..B."""
        return self.parts[t - 1][: self._train[t - 1]], self.parts[t - 1][self._train[t - 1] :]


@lru_cache(maxsize=2)
def read_periods(source: ImageSource, image_size: int | None, cache: str | None) -> PeriodStream:
    """The stream of a source, read once in a process. UserError: as of `PeriodStream`, or out of memory."""
    try:
        return PeriodStream(source, image_size, cache)
    except MemoryError:
        hint = "give --cache-images DIR, or lower --image-size"
        raise UserError(f"{source.root} needs more memory than there is: {hint}") from None
