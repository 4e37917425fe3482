"""A stage of the vision half against plain PyTorch, and ensembles in one stack against one by one.

MNIST's shape at B = 500, w = 1: 108 images for training, 12 for validation, 100 epochs of one minibatch, with
the best epoch kept. Random pixels: only time is measured. fp32, one thread. The peer is the loop that one
would write: nn.Sequential, DataLoader, autograd, torch.optim.Adadelta.
"""

import copy
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

from benchmarks.timing import spread
from vision.models import MLP, mlp_widths
from vision.presets import resolve
from vision.train import Examples, fit

SIZES = (4, 8, 32, 64)
TRAIN, VALID, MEMBERS = 108, 12, 5
SETTINGS = resolve("mnist", "sm")


def examples(n: int, generator: torch.Generator) -> Examples:
    """Random images and labels."""
    return Examples(torch.randn(n, 1, 28, 28, generator=generator), torch.arange(n) % 10)


def plain(hidden: int, train: Examples, valid: Examples) -> None:
    """One stage by the book."""
    sizes = mlp_widths((1, 28, 28), hidden, 10)
    layers: list[nn.Module] = [nn.Flatten()]
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after), nn.ReLU()]
    model = nn.Sequential(*layers[:-1])
    optimizer = torch.optim.Adadelta(model.parameters(), lr=SETTINGS.lr)
    best, kept = torch.inf, copy.deepcopy(model.state_dict())
    loader = DataLoader(TensorDataset(*train), SETTINGS.batch_size, shuffle=True)
    validation = DataLoader(TensorDataset(*valid), SETTINGS.batch_size)
    for _ in range(SETTINGS.epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
        with torch.no_grad():
            loss = sum(float(F.cross_entropy(model(images), labels)) for images, labels in validation)
        if loss < best:
            best, kept = loss, copy.deepcopy(model.state_dict())
    model.load_state_dict(kept)


def ours(hidden: int, members: int, train: Examples, valid: Examples) -> None:
    """One stage of `members` networks in one stack."""
    model = MLP(mlp_widths((1, 28, 28), hidden, 10), members)
    generator = torch.Generator().manual_seed(0)
    for member in range(members):
        model.reset(generator, member)
    fit(model, train, valid, SETTINGS, generator)


def one_by_one(hidden: int, train: Examples, valid: Examples) -> None:
    """One stage of each member after the other."""
    for _ in range(MEMBERS):
        ours(hidden, 1, train, valid)


def seconds(work: Callable[[], Any]) -> float:
    """One call."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def measure(repeats: int) -> list[dict[str, Any]]:
    """A row for each width; the four kinds take turns, the first turn is a warm-up."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    train, valid = examples(TRAIN, generator), examples(VALID, generator)
    rows = []
    for hidden in tqdm(SIZES, disable=None, unit="width"):
        kinds: dict[str, Callable[[], Any]] = {
            "plain": lambda h=hidden: plain(h, train, valid),  # type: ignore[misc]
            "sm": lambda h=hidden: ours(h, 1, train, valid),  # type: ignore[misc]
            "ens": lambda h=hidden: ours(h, MEMBERS, train, valid),  # type: ignore[misc]
            "loop": lambda h=hidden: one_by_one(h, train, valid),  # type: ignore[misc]
        }
        turns = [{name: seconds(work) for name, work in kinds.items()} for _ in range(repeats + 1)][1:]
        rows.append(
            {
                "h": hidden,
                "sm, ms a stage": spread([1000 * turn["sm"] for turn in turns]),
                "plain PyTorch / sm": spread([turn["plain"] / turn["sm"] for turn in turns]),
                "ens of 5 / sm": spread([turn["ens"] / turn["sm"] for turn in turns]),
                "one by one / ens": spread([turn["loop"] / turn["ens"] for turn in turns]),
            }
        )
    torch.set_num_threads(threads)
    return rows
