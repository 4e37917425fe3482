"""Step `images`: a stage of image learners on the GPU, against plain PyTorch with all images on the GPU.

Random pixels in the shape of MNIST, B = 500 and w = 1, and of 224 x 224 for a ResNet; fp32, no augmentation.
In `one by one` the members of ens train in turn.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset
from torchvision import models

from benchmarks.gpu.process import Cases, Row
from benchmarks.timing import device, finished, turns
from benchmarks.vision_stage import MEMBERS, plain_mlp, plain_stage
from vision.examples import Examples
from vision.learners import LEARNERS, resolve
from vision.train import fit

MNIST, RESNET = (1, 28, 28), (3, 224, 224)


def images(args: Any) -> Cases:
    """Images, epochs and repeats of a stage of each shape."""
    mnist, resnet = ((120, 2, 2), (20, 1, 2)) if args.tiny else ((120, 20, 5), (500, 1, 2))
    name = "mobilenet_v3_small" if args.tiny else "resnet18"
    yield {"data": "mnist", "network": "mlp"}, partial(measure, "mnist", MNIST, {"hidden": 64}, *mnist)
    arch = {"arch": f"torchvision:{name}", "augment": False}
    yield {"data": "224 x 224", "network": name}, partial(measure, "cifar10", RESNET, arch, *resnet)


def measure(data: str, shape: tuple, chosen: dict[str, Any], count: int, epochs: int, repeats: int) -> Row:
    """Times of a stage, and their ratios in the same turn."""
    settings = {name: resolve(data, name, "paper", chosen | {"epochs": epochs}) for name in ("sm", "ens")}
    size, valid = settings["sm"].batch_size, count // 10
    pixels, labels = torch.randn(count, *shape, device=device()), torch.arange(count, device=device()) % 10
    stage = Examples(pixels.contiguous(memory_format=torch.channels_last), labels)
    parts = stage.part(valid, count), stage.part(0, valid)

    def ours(name: str) -> None:
        learner = LEARNERS[name](shape, 10, settings[name], 0, device())
        fit(learner.model, *parts, settings[name], learner.generators)

    def plain() -> None:
        network = settings["sm"].torchvision
        model = models.get_model(network, num_classes=10) if network else plain_mlp(chosen["hidden"])
        plain_stage(model.to(device()), gathered(parts[0], size), gathered(parts[1], size), settings["sm"])

    kinds: dict[str, Callable[[], Any]] = {"sm": partial(ours, "sm"), "plain": plain}
    if data == "mnist":  # torchvision's models have no batched members
        kinds |= {"ens": partial(ours, "ens"), "one by one": lambda: [ours("sm") for _ in range(MEMBERS)]}
    measured = turns({name: partial(finished, work, 1) for name, work in kinds.items()}, repeats)
    row: Row = {"sm, ms": [1000 * turn["sm"] for turn in measured]}
    for one, other in (("plain", "sm"), ("ens", "sm"), ("one by one", "ens")):
        if one in kinds:
            row[f"{one} / {other}"] = [turn[one] / turn[other] for turn in measured]
    return row


def gathered(examples: Examples, size: int) -> DataLoader:
    """Minibatches of images that stay on the device: one gather for each."""
    stored = TensorDataset(*examples)
    return DataLoader(stored, batch_size=None, sampler=BatchSampler(RandomSampler(stored), size, False))
