"""Time of a stage of an image learner against plain PyTorch, and of a stack against its members one by one.

Images have MNIST's shape and random pixels. At w = 1 (B = 500) a stage has 108 training and 12 validation
images and 100 epochs of one minibatch; at w = 25 it has 25 times the images and 4 epochs of 22 minibatches.
The best epoch is kept. fp32, one thread. The peer is a plain loop with nn.Sequential, DataLoader, autograd
and torch.optim.Adadelta. Members of an ensemble have separate orders of minibatches, or share one.
"""

import copy
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

from benchmarks.timing import Rows, one_thread, ratios, spread, turns
from vision.learners import resolve
from vision.models import MLP, mlp_widths, vgg_widths
from vision.presets import Settings
from vision.train import Examples, fit

SIZES = ((4, 1), (8, 1), (32, 1), (64, 1), (4, 25), (64, 25))
"""Hidden units and waiting times."""
TRAIN, VALID, MEMBERS = 108, 12, 5
Batches = Iterable[Sequence[Tensor]]
"""Images and labels."""


def examples(n: int, generator: torch.Generator) -> Examples:
    """Random images and labels."""
    return Examples(torch.randn(n, 1, 28, 28, generator=generator), torch.arange(n) % 10)


def plain_mlp(hidden: int) -> nn.Sequential:
    """The network in plain PyTorch."""
    layers: list[nn.Module] = [nn.Flatten()]
    for before, after in pairwise(mlp_widths((1, 28, 28), hidden, 10)):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def plain_vgg(channels: int) -> nn.Sequential:
    """The paper's reduced VGG19 in plain PyTorch, for images with 3 channels."""
    layers: list[nn.Module] = []
    before = 3
    for block in vgg_widths(channels):
        for inputs, outputs in pairwise([before, *block]):
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
        before = block[-1]
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels, 10))


def loader(examples: Examples, settings: Settings, shuffle: bool = True) -> DataLoader:
    """Minibatches in plain PyTorch."""
    return DataLoader(TensorDataset(*examples), settings.batch_size, shuffle)


def plain_stage(model: nn.Module, train: Batches, valid: Batches, settings: Settings) -> None:
    """One stage in plain PyTorch, on the device of the model."""
    device = next(model.parameters()).device
    optimizer: torch.optim.Optimizer = torch.optim.Adadelta(model.parameters(), lr=settings.lr)
    if settings.optimizer == "sgd":
        momentum, decay = settings.momentum, settings.weight_decay
        optimizer = torch.optim.SGD(model.parameters(), settings.lr, momentum, weight_decay=decay)
    best, kept = torch.inf, copy.deepcopy(model.state_dict())
    for _ in range(settings.epochs):
        model.train()
        for images, labels in train:
            optimizer.zero_grad()
            F.cross_entropy(model(images.to(device)), labels.to(device)).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            losses = [F.cross_entropy(model(x.to(device)), y.to(device)) for x, y in valid]
        if (loss := sum(map(float, losses))) < best:
            best, kept = loss, copy.deepcopy(model.state_dict())
    model.load_state_dict(kept)


def plain(hidden: int, train: Examples, valid: Examples, settings: Settings) -> None:
    """One stage in plain PyTorch on the CPU."""
    plain_stage(plain_mlp(hidden), loader(train, settings), loader(valid, settings, shuffle=False), settings)


def ours(
    hidden: int, members: int, orders: int, train: Examples, valid: Examples, settings: Settings
) -> None:
    """One stage of a stack of `members` networks."""
    model = MLP(mlp_widths((1, 28, 28), hidden, 10), members)
    generators = [torch.Generator().manual_seed(member) for member in range(members)]
    for member, generator in enumerate(generators):
        model.reset(generator, member)
    fit(model, train, valid, settings, generators[:orders])


def one_by_one(hidden: int, *stage: Any) -> None:
    """One stage of every member in turn, as networks of their own."""
    for _ in range(MEMBERS):
        ours(hidden, 1, 1, *stage)


@one_thread()
def measure(repeats: int) -> Rows:
    """A row for each width and waiting time."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for hidden, wait in tqdm(SIZES, disable=None, unit="size"):
        settings = replace(resolve("mnist", "sm"), epochs=100 // wait)
        stage = examples(wait * TRAIN, generator), examples(wait * VALID, generator), settings
        kinds = {
            "plain": partial(plain, hidden, *stage),
            "sm": partial(ours, hidden, 1, 1, *stage),
            "ens": partial(ours, hidden, MEMBERS, MEMBERS, *stage),
            "shared": partial(ours, hidden, MEMBERS, 1, *stage),
            "loop": partial(one_by_one, hidden, *stage),
        }
        measured = turns(kinds, repeats)
        rows.append(
            {
                "h": hidden,
                "w": wait,
                "sm, ms": spread([1000 * turn["sm"] for turn in measured]),
                "plain PyTorch / sm": ratios(measured, "plain", "sm"),
                "ens of 5 / sm": ratios(measured, "ens", "sm"),
                "shared order / sm": ratios(measured, "shared", "sm"),
                "one by one / ens": ratios(measured, "loop", "ens"),
            }
        )
    return rows
