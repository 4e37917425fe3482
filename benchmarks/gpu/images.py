"""Step `images`: a stage of image learners on the GPU, against plain PyTorch, and ens of 5 against sm.

Random pixels in the shapes of MNIST and CIFAR-10, and of 224 x 224 for a ResNet; no augmentation, fp32. The
peers are a plain loop with a DataLoader, and the same loop with all images on the GPU. In `one by one` the
members train in turn.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset
from torchvision import models

from benchmarks.gpu.frame import Asked, Case, Row
from benchmarks.timing import device, finished, turns
from benchmarks.vision_stage import MEMBERS, Batches, loader, plain_mlp, plain_stage, plain_vgg
from vision.examples import Examples
from vision.learners import LEARNERS, resolve
from vision.presets import Settings
from vision.train import fit


class ImageStage(NamedTuple):
    """Of random images in the shape of a data set."""

    data: str
    shape: tuple[int, int, int]
    hidden: int
    images: int
    epochs: int
    arch: str = ""
    """A model of torchvision; else the backbone of the data set, with `hidden` units or channels."""


STAGES = (
    ImageStage("mnist", (1, 28, 28), 64, 120, 100),
    ImageStage("mnist", (1, 28, 28), 64, 3000, 4),
    ImageStage("cifar10", (3, 32, 32), 64, 500, 20),
    ImageStage("cifar10", (3, 32, 32), 64, 5000, 5),
    ImageStage("cifar10", (3, 224, 224), 0, 500, 2, "torchvision:resnet18"),
)
"""B = 500 with w = 1 and 25, B = 100 with w = 1 and 10; fewer epochs than the paper's."""
TINY = (
    ImageStage("mnist", (1, 28, 28), 4, 120, 2),
    ImageStage("cifar10", (3, 32, 32), 2, 20, 1),
    ImageStage("cifar10", (3, 32, 32), 0, 20, 1, "torchvision:mobilenet_v3_small"),
)


def cases(asked: Asked) -> Iterator[Case]:
    """A row for each stage."""
    for stage in TINY if asked.tiny else STAGES:
        yield {**stage._asdict(), "shape": str(stage.shape)}, partial(measure, stage, asked.repeats)


def measure(stage: ImageStage, repeats: int) -> Row:
    """Times of a stage, and their ratios in the same turn."""
    generator = torch.Generator().manual_seed(0)
    count = stage.images // 10  # for validation
    valid, train = (
        Examples(torch.randn(n, *stage.shape, generator=generator), torch.arange(n) % 10)
        for n in (count, stage.images - count)
    )
    chosen: dict[str, Any] = {"epochs": stage.epochs}
    chosen |= {"arch": stage.arch} if stage.arch else {"hidden": stage.hidden}
    if stage.data == "cifar10":
        chosen["augment"] = False
    sm, ens = (resolve(stage.data, name, "paper", chosen) for name in ("sm", "ens"))
    there = [moved(part) for part in (train, valid)]
    kinds: dict[str, Callable[[], None]] = {
        "sm": partial(ours, "sm", stage, sm, *there),
        "ens": partial(ours, "ens", stage, ens, *there),
        "one by one": partial(one_by_one, stage, sm, *there),
        "DataLoader": partial(plain, stage, sm, loader(train, sm), loader(valid, sm, shuffle=False)),
        "on the GPU": partial(plain, stage, sm, *(on_device(part, sm.batch_size) for part in there)),
    }
    measured = turns({name: partial(finished, work, 1) for name, work in kinds.items()}, repeats)
    row: Row = {"sm, ms": [1000 * turn["sm"] for turn in measured]}
    for one, other in (("DataLoader", "sm"), ("on the GPU", "sm"), ("ens", "sm"), ("one by one", "ens")):
        row[f"{one} / {other}"] = [turn[one] / turn[other] for turn in measured]
    return row


def moved(examples: Examples) -> Examples:
    """On the device, channels last in memory, as data sets of ALMA are."""
    images = examples.images.to(device()).contiguous(memory_format=torch.channels_last)
    return Examples(images, examples.labels.to(device()))


def on_device(examples: Examples, size: int) -> DataLoader:
    """Minibatches of images that stay on the device: one gather for each."""
    stored = TensorDataset(*examples)
    return DataLoader(stored, batch_size=None, sampler=BatchSampler(RandomSampler(stored), size, False))


def ours(name: str, stage: ImageStage, settings: Settings, train: Examples, valid: Examples) -> None:
    """A stage of a learner."""
    learner = LEARNERS[name](stage.shape, 10, settings, 0, device())
    fit(learner.model, train, valid, settings, learner.generators)


def one_by_one(stage: ImageStage, *data: Any) -> None:
    """A stage of every member in turn, as networks of their own."""
    for _ in range(MEMBERS):
        ours("sm", stage, *data)


def plain(stage: ImageStage, settings: Settings, train: Batches, valid: Batches) -> None:
    """A stage in plain PyTorch."""
    if settings.torchvision:
        model = models.get_model(settings.torchvision, num_classes=10)
    else:
        model = plain_mlp(stage.hidden) if settings.arch == "mlp" else plain_vgg(stage.hidden)
    plain_stage(model.to(device()), train, valid, settings)
