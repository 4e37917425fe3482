"""Streams that drift: class-incremental, rotated and permuted images, with a test set for each mega-batch.

The scenarios of continual learning, for any data set of `vision.data`.
"""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from vision import presets
from vision.data import Dataset, Images, MegaBatchStream


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
