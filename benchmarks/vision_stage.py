"""Time of a stage of an image learner against plain PyTorch, and of a stack against its members one
by one.

Random pixels in the shape of MNIST. At w = 1 (B = 500) a stage has 108 training and 12 validation
images and 100 epochs of one minibatch; at w = 25 it has 25 times the images and 4 epochs of 22
minibatches. The best epoch is kept. fp32; on a CPU one thread. The peer is a plain loop with
torch.optim, on a CPU with a DataLoader, on a GPU with all images there. Members of an ensemble have
separate orders of minibatches, or share one. `cases` are those of `python -m benchmarks gpu`; there
is a ResNet-18 on 224 x 224 pixels too.
"""

import copy
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset
from torchvision import models
from tqdm import tqdm

from benchmarks.timing import Rows, device, finished, one_thread, spread, turns
from vision.learners import LEARNERS, resolve
from vision.models import mlp_widths
from vision.presets import Settings
from vision.train import Examples, fit

SIZES = ((4, 1), (8, 1), (32, 1), (64, 1), (4, 25), (64, 25))
"""Hidden units and waiting times."""
MEGABATCH = 120
MEMBERS = 5
MNIST = (1, 28, 28)
LARGE = (3, 224, 224)


def minibatches(examples: Examples, settings: Settings) -> Iterable[Sequence[Tensor]]:
    """In plain PyTorch: images that stay on a GPU take one gather a minibatch."""
    stored = TensorDataset(*examples)
    if not examples.images.is_cuda:
        return DataLoader(stored, settings.batch_size, shuffle=True)
    sampler = BatchSampler(RandomSampler(stored), settings.batch_size, drop_last=False)
    return DataLoader(stored, batch_size=None, sampler=sampler)


def plain(train: Examples, valid: Examples, settings: Settings) -> None:
    """One stage in plain PyTorch, on the device of the images."""
    if settings.torchvision:
        model = models.get_model(settings.torchvision, num_classes=10)
    else:
        layers: list[nn.Module] = [nn.Flatten()]
        for before, after in pairwise(mlp_widths(MNIST, settings.hidden, 10)):
            layers += [nn.Linear(before, after), nn.ReLU()]
        model = nn.Sequential(*layers[:-1])
    model.to(train.images.device)
    optimizer: torch.optim.Optimizer = torch.optim.Adadelta(model.parameters(), lr=settings.lr)
    if settings.optimizer == "sgd":
        optimizer = torch.optim.SGD(
            model.parameters(),
            settings.lr,
            settings.momentum,
            weight_decay=settings.weight_decay,
        )
    best_loss = torch.inf
    best_weights = copy.deepcopy(model.state_dict())
    shuffled = minibatches(train, settings)
    held_out = minibatches(valid, settings)
    for _ in range(settings.epochs):
        model.train()
        for images, labels in shuffled:
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            losses = [F.cross_entropy(model(images), labels) for images, labels in held_out]
        loss = sum(map(float, losses))
        if loss < best_loss:
            best_loss = loss
            best_weights = copy.deepcopy(model.state_dict())
    model.load_state_dict(best_weights)


def compare(
    data: str, shape: tuple, chosen: dict[str, Any], images: int, repeats: int
) -> dict[str, list]:
    """Milliseconds of a stage of sm, and ratios of times in the same turn."""
    settings = {name: resolve(data, name, "paper", chosen) for name in ("sm", "ens")}
    labels = torch.arange(images) % 10
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randn(images, *shape, generator=generator)
    pixels = pixels.contiguous(memory_format=torch.channels_last)
    stage = Examples(pixels.to(device()), labels.to(device()))
    parts = (stage.part(images // 10, images), stage.part(0, images // 10))

    def ours(name: str, orders: int | None = None) -> None:
        learner = LEARNERS[name](shape, 10, settings[name], 0, device())
        fit(learner.model, *parts, settings[name], learner.generators[:orders])

    def one_by_one() -> None:
        for _ in range(MEMBERS):
            ours("sm")

    kinds: dict[str, Callable[[], Any]] = {
        "sm": partial(ours, "sm"),
        "plain": partial(plain, *parts, settings["sm"]),
    }
    pairs = [("plain", "sm")]
    if data == "mnist":  # torchvision's models have no batched members
        kinds |= {"ens": partial(ours, "ens"), "shared order": partial(ours, "ens", 1)}
        kinds["one by one"] = one_by_one
        pairs += [("ens", "sm"), ("shared order", "sm"), ("one by one", "ens")]
    measured = turns({name: partial(finished, work, 1) for name, work in kinds.items()}, repeats)
    figures = {"sm, ms": [1000 * turn["sm"] for turn in measured]}
    for name, peer in pairs:
        figures[f"{name} / {peer}"] = [turn[name] / turn[peer] for turn in measured]
    return figures


def cases(args: Any) -> Any:
    """Labels, and what measures them on a GPU: epochs, images and repeats of each shape."""
    name = "mobilenet_v3_small" if args.tiny else "resnet18"
    mnist = {"hidden": 64, "epochs": 2 if args.tiny else 20}
    yield (
        {"network": "mlp"},
        partial(compare, "mnist", MNIST, mnist, MEGABATCH, 2 if args.tiny else 5),
    )
    large = {"arch": f"torchvision:{name}", "augment": False, "epochs": 1 if args.tiny else 3}
    yield {"network": name}, partial(compare, "cifar10", LARGE, large, 20 if args.tiny else 2000, 2)


@one_thread()
def measure(repeats: int) -> Rows:
    """A row for each width and waiting time."""
    rows = []
    for hidden, wait in tqdm(SIZES, disable=None, unit="size"):
        chosen = {"hidden": hidden, "epochs": 100 // wait}
        times = compare("mnist", MNIST, chosen, wait * MEGABATCH, repeats)
        rows.append(
            {"h": hidden, "w": wait} | {name: spread(values) for name, values in times.items()}
        )
    return rows
