"""Step `images`: a stage of image learners on the GPU, against plain PyTorch, and ens of 5 against sm.

Random pixels in the shapes of MNIST and CIFAR-10, without augmentation, fp32. The peers are a plain loop with
a DataLoader, and the same loop with all images on the GPU. In `one by one` the members train in turn.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.gpu.frame import Asked, Case, Row
from benchmarks.gpu.switch import device, finished
from benchmarks.timing import turns
from benchmarks.vision_stage import MEMBERS, Batches, loader, plain_mlp, plain_stage
from vision.examples import Examples
from vision.learners import LEARNERS, resolve
from vision.models import vgg_widths
from vision.presets import Settings
from vision.train import fit


class Stage(NamedTuple):
    """A stage of a data set."""

    dataset: str
    shape: tuple[int, int, int]
    hidden: int
    images: int
    epochs: int


STAGES = (
    Stage("mnist", (1, 28, 28), 64, 120, 100),
    Stage("mnist", (1, 28, 28), 64, 3000, 4),
    Stage("cifar10", (3, 32, 32), 64, 500, 20),
    Stage("cifar10", (3, 32, 32), 64, 5000, 5),
    # A stage of 224 x 224 images with --arch torchvision:resnet18 goes here.
)
"""B = 500 with w = 1 and 25, B = 100 with w = 1 and 10; fewer epochs than the paper's."""
TINY = (Stage("mnist", (1, 28, 28), 4, 120, 2), Stage("cifar10", (3, 32, 32), 2, 20, 1))


@dataclass
class OnDevice:
    """Minibatches of images that are on the device, in random order."""

    examples: Examples
    size: int

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        images, labels = self.examples
        for chosen in torch.randperm(len(labels), device=labels.device).split(self.size):
            yield images[chosen], labels[chosen]


def cases(asked: Asked) -> Iterator[Case]:
    """A row for each stage."""
    for stage in TINY if asked.tiny else STAGES:
        labels = {
            "data": stage.dataset,
            "hidden": stage.hidden,
            "images": stage.images,
            "epochs": stage.epochs,
        }
        yield labels, partial(measure, stage, asked.repeats)


def measure(stage: Stage, repeats: int) -> Row:
    """Times of a stage, and their ratios in the same turn."""
    generator = torch.Generator().manual_seed(0)
    count = stage.images // 10  # for validation
    valid, train = (
        Examples(torch.randn(n, *stage.shape, generator=generator), torch.arange(n) % 10)
        for n in (count, stage.images - count)
    )
    chosen = {"hidden": stage.hidden, "epochs": stage.epochs}
    if stage.dataset == "cifar10":
        chosen["augment"] = False
    settings = {name: resolve(stage.dataset, name, "paper", chosen) for name in ("sm", "ens")}
    sm, there = settings["sm"], (moved(train), moved(valid))
    host = loader(train, sm), loader(valid, sm, shuffle=False)
    on_device = [OnDevice(part, sm.batch_size) for part in there]
    kinds = {
        "sm": partial(ours, "sm", 1, stage, sm, *there),
        "ens": partial(ours, "ens", 1, stage, settings["ens"], *there),
        "one by one": partial(ours, "sm", MEMBERS, stage, sm, *there),
        "DataLoader": partial(plain, stage, sm, *host),
        "on the GPU": partial(plain, stage, sm, *on_device),
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


def ours(name: str, times: int, stage: Stage, settings: Settings, train: Examples, valid: Examples) -> None:
    """A stage of a learner, `times` times."""
    for seed in range(times):
        learner = LEARNERS[name](stage.shape, 10, settings, seed, device())
        fit(learner.model, train, valid, settings, learner.generators)


def plain(stage: Stage, settings: Settings, train: Batches, valid: Batches) -> None:
    """A stage in plain PyTorch."""
    model = plain_mlp(stage.hidden) if settings.arch == "mlp" else plain_vgg(stage.hidden)
    plain_stage(model.to(device()), train, valid, settings)


def plain_vgg(channels: int) -> nn.Sequential:
    """The paper's reduced VGG19."""
    layers: list[nn.Module] = []
    before = 3
    for block in vgg_widths(channels):
        for inputs, outputs in pairwise([before, *block]):
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
        before = block[-1]
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels, 10))
