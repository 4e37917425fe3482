"""Time of a stage of an image learner against plain PyTorch, and of a stack against its members one by one.

Images have MNIST's shape and random pixels. At w = 1 (B = 500) a stage has 108 training and 12 validation
images and 100 epochs of one minibatch; at w = 25 it has 25 times the images and 4 epochs of 22 minibatches.
The best epoch is kept. fp32, one thread. The peer is a plain loop with nn.Sequential, DataLoader, autograd
and torch.optim.Adadelta. Members of an ensemble have separate orders of minibatches, or share one.
"""

import copy
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

from benchmarks.timing import Rows, one_thread, ratios, spread, turns
from vision.learners import resolve
from vision.models import MLP, mlp_widths
from vision.presets import Settings
from vision.train import Examples, fit

SIZES = ((4, 1), (8, 1), (32, 1), (64, 1), (4, 25), (64, 25))
"""Hidden units and waiting times."""
TRAIN, VALID, MEMBERS = 108, 12, 5


def examples(n: int, generator: torch.Generator) -> Examples:
    """Random images and labels."""
    return Examples(torch.randn(n, 1, 28, 28, generator=generator), torch.arange(n) % 10)


def plain(hidden: int, train: Examples, valid: Examples, settings: Settings) -> None:
    """One stage in plain PyTorch."""
    sizes = mlp_widths((1, 28, 28), hidden, 10)
    layers: list[nn.Module] = [nn.Flatten()]
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after), nn.ReLU()]
    model = nn.Sequential(*layers[:-1])
    optimizer = torch.optim.Adadelta(model.parameters(), lr=settings.lr)
    best, kept = torch.inf, copy.deepcopy(model.state_dict())
    loader = DataLoader(TensorDataset(*train), settings.batch_size, shuffle=True)
    validation = DataLoader(TensorDataset(*valid), settings.batch_size)
    for _ in range(settings.epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
        with torch.no_grad():
            loss = sum(float(F.cross_entropy(model(images), labels)) for images, labels in validation)
        if loss < best:
            best, kept = loss, copy.deepcopy(model.state_dict())
    model.load_state_dict(kept)


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
