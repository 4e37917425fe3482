"""Classifiers of torchvision as members of a `vision.mixture.Committee`.

Shapes: n examples, C classes. The models take images of three channels; gray ones are repeated.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import chain

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from torchvision import models

from alma.errors import UserError
from vision.checkpoints import read_checkpoint
from vision.models import Flops
from vision.presets import TORCHVISION, Settings

_AUXILIARY = {"googlenet": ("aux1.", "aux2."), "inception_v3": ("AuxLogits.",)}
"""Modules for a second loss in training, which we leave out; pretrained weights have them."""
_COUNTER = "num_batches_tracked"
"""Of batch normalisation; old files lack it, and with torchvision's momentum it has no effect."""
_OLD_NAME = re.compile(r"(denselayer\d+\.(?:norm|conv))\.(?=[12]\.)")
"""In torchvision's files of DenseNets, which write norm.1 for norm1."""


class TorchvisionModel(nn.Module):
    """One classifier of torchvision. `settings.torchvision` is its name, `settings.weights` a file of initial
    weights. Dropout and stochastic depth draw from a generator of the run, as weights do."""

    members = voters = 1

    def __init__(self, shape: Sequence[int], classes: int, settings: Settings):
        super().__init__()
        self.shape, self.classes, self.settings = tuple(shape), classes, settings
        layout = torch.channels_last if settings.channels_last else torch.preserve_format
        self.network = _built(settings.torchvision, classes)
        self.network.to(memory_format=layout)  # type: ignore[call-overload]
        self.generator: torch.Generator | None = None

    def draw_from(self, generators: Sequence[torch.Generator]) -> None:
        """Sample dropout in training with the first of the `generators`."""
        self.generator = generators[0]

    def reset(self, generator: torch.Generator, member: int = 0) -> None:
        """Initialise all parameters and statistics as torchvision does, then with the weights of the file."""
        drawn = _built(self.settings.torchvision, self.classes, generator)
        if self.settings.weights:
            own = drawn.state_dict()
            for name, values in weights_for(self.settings, self.classes)[0].items():
                own[name].copy_(values)
        mine, new = (chain(each.parameters(), each.buffers()) for each in (self.network, drawn))
        for tensor, value in zip(mine, new, strict=True):
            tensor.data.copy_(value)

    def forward(self, x: Tensor) -> Tensor:
        """Images (n, 1 or 3, height, width) -> logits (1, C, n)."""
        x = x.expand(-1, 3, -1, -1)
        if not self.training:
            return self.network(x).t()[None]
        self.network.train(len(x) > 1)  # one example may have no batch statistics
        with _drawing_from(self.generator, x.device):
            return self.network(x).t()[None]

    @property
    def flops(self) -> Flops:
        """FLOPs per example, see `costs`."""
        return costs(self.settings.torchvision, self.classes, *self.shape[1:])[0]

    @property
    def footprint(self) -> int:
        """Floats per example that evaluation holds at a time, see `costs`."""
        return costs(self.settings.torchvision, self.classes, *self.shape[1:])[1]


def check(settings: Settings, shape: Sequence[int], classes: int) -> None:
    """Say which weights of the file are left out. UserError: the model does not take images of `shape`
    (channels, height, width), or the file does not fit the model."""
    if shape[0] not in (1, 3):
        raise UserError(f"--arch {settings.arch} takes images of 1 or 3 channels, not {shape[0]}")
    costs(settings.torchvision, classes, *shape[1:])
    if settings.weights and (left := weights_for(settings, classes)[1]):
        print(f"{settings.weights} has other classes: {', '.join(left)} start at random", flush=True)


@lru_cache(maxsize=8)
def costs(name: str, classes: int, height: int, width: int) -> tuple[Flops, int]:
    """FLOPs per example and floats that evaluation holds, for images of height x width pixels.

    PyTorch's counter counts the forward pass, attention scores included, on tensors without values. The
    backward pass costs twice as much, less the gradient of the images; the counter's own figure is too high
    for convolutions by group. UserError: the model does not take such images.
    """
    network = _built(name, classes).to("meta").train()
    held = [3 * height * width]

    def hold(module: nn.Module, inputs: object, output: object) -> None:
        found = tree_leaves((inputs, output))
        held.append(sum(each.numel() // 2 for each in found if isinstance(each, Tensor)))

    for module in network.modules():
        module.register_forward_hook(hold)
    try:
        with torch.device("meta"), torch.no_grad(), FlopCounterMode(display=False) as counter:
            network(torch.empty(2, 3, height, width))  # two, for batch statistics
    except (RuntimeError, ValueError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"--arch {TORCHVISION}{name} does not take images of {height} x {width} pixels ({reason}): give "
            "--image-size"
        ) from None
    forward = counter.get_total_flops() / 2
    first = next(each for each, module in network.named_modules() if isinstance(module, nn.Conv2d))
    images = sum(counter.get_flop_counts()[f"{type(network).__name__}.{first}"].values()) / 2
    # A branch beside, such as the identity of a residual block, holds as much as an input.
    return Flops(forward, 2 * forward - images, forward), 3 * max(held) // 2


def weights_for(settings: Settings, classes: int) -> tuple[dict[str, Tensor], list[str]]:
    """The tensors of the file `settings.weights` that a model of `classes` classes takes, and the names of
    those that it cannot take because the file has another number of classes. UserError: others do not fit."""
    path, name = str(settings.weights), settings.torchvision
    state = read_checkpoint(path, advice="give a file of torch.save(model.state_dict(), FILE)")
    state = {_OLD_NAME.sub(r"\1", key): value for key, value in state.items()}
    state = {key: state[key] for key in state if not key.startswith(_AUXILIARY.get(name, ()))}
    own, other = _shapes(name, classes), _shapes(name, classes + 1)
    shapes = {key: tuple(value.shape) for key, value in state.items() if isinstance(value, Tensor)}
    odd = [f"{key} is no tensor" for key in state if key not in shapes]
    odd += [f"{key} is not in the model" for key in shapes if key not in own]
    odd += [f"the file lacks {key}" for key in own if key not in state and not key.endswith(_COUNTER)]
    wrong = [key for key in own if key in shapes and shapes[key] != own[key]]
    left = [key for key in wrong if own[key] != other[key] and shapes[key][1:] == own[key][1:]]
    odd += [f"{key} is {shapes[key]}, not {own[key]}" for key in wrong if key not in left]
    if odd:
        more = f", and {len(odd) - 1} more" if len(odd) > 1 else ""
        raise UserError(f"--weights {path} does not fit {settings.arch}: {odd[0]}{more}")
    return {key: state[key] for key in shapes if key not in left}, left


@lru_cache(maxsize=8)
def _shapes(name: str, classes: int) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor of a model's state_dict."""
    return {key: tuple(value.shape) for key, value in _built(name, classes).state_dict().items()}


def _built(name: str, classes: int, generator: torch.Generator | None = None) -> nn.Module:
    """A new model of torchvision, with initial weights from the generator."""
    more = {"aux_logits": False, "init_weights": True} if name in _AUXILIARY else {}
    with _drawing_from(generator, torch.device("cpu")):
        return models.get_model(name, weights=None, num_classes=classes, **more)


@contextmanager
def _drawing_from(generator: torch.Generator | None, device: torch.device) -> Iterator[None]:
    """Within, torch's global generators are seeded by `generator` (None: by 0); then they are as before."""
    seed = int(torch.randint(2**62, (), generator=generator)) if generator else 0
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield
