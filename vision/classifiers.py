"""torchvision's classifiers and users' networks, as members of a `vision.mixture.Committee`.

Shapes: n examples, C classes. Models of torchvision take images of three channels; gray ones are
repeated.
"""

import hashlib
import math
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from torchvision import models

from alma.errors import UserError
from vision.checkpoints import read_checkpoint
from vision.models import Factory, Flops
from vision.presets import TORCHVISION, Settings

_AUXILIARY = {"googlenet": ("aux1.", "aux2."), "inception_v3": ("AuxLogits.",)}
"""Prefixes of auxiliary classifiers in torchvision's weights; our networks leave them out."""


class Classifier(nn.Module):
    """A network built by `factory`, or the classifier of torchvision called `settings.torchvision`.

    Initial weights come from the file `settings.weights` if given. Dropout and stochastic depth,
    like weights, are drawn from a generator of the run.
    """

    members = voters = 1

    def __init__(
        self,
        shape: Sequence[int],
        classes: int,
        settings: Settings,
        factory: Factory | None = None,
        generator: torch.Generator | None = None,
    ):
        """`generator` draws the initial weights; a first `reset` with an equal one keeps them."""
        super().__init__()
        self.shape = tuple(shape)
        self.classes = classes
        self.settings = settings
        self.source = factory or settings.torchvision
        self.channels = shape[0] if factory else 3
        # The generator's state before it drew the weights; None: others have replaced them.
        self._drawn_from = generator.get_state() if generator else None
        self.network = self._new_network(generator)
        self.generator: torch.Generator | None = None  # samples dropout in training

    def reset(self, generator: torch.Generator, member: int = 0) -> None:
        """Initialise all parameters and statistics as the source does, then load the file of
        weights."""
        drawn_from = self._drawn_from
        self._drawn_from = None
        if drawn_from is not None and torch.equal(drawn_from, generator.get_state()):
            return  # building a network takes as long as a short training
        new = self._new_network(generator)
        for tensor, value in zip(_tensors(self.network), _tensors(new), strict=True):
            tensor.data.copy_(value)

    def _new_network(self, generator: torch.Generator | None) -> nn.Module:
        """A network with weights from the generator, and from the file of weights if given.

        Without a generator the weights are arbitrary.
        """
        network = _built(self.source, self.classes, generator, self.shape)
        if generator and self.settings.weights:
            load_weights(network, self.settings, self.classes)
        return network

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Load weights, as every module does."""
        self._drawn_from = None
        super()._load_from_state_dict(*args, **kwargs)

    def forward(self, x: Tensor) -> Tensor:
        """Images (n, channels, height, width) -> logits (1, C, n)."""
        x = x.expand(-1, self.channels, -1, -1)
        if not isinstance(self.source, str):
            x = x.clone()  # a backbone may edit its images, which may be those of the test set
        if not self.training:
            return self.network(x).t()[None]
        self._drawn_from = None  # training changes the weights
        self.network.train(len(x) > 1)  # one example may have no variance for batch normalisation
        with _drawing_from(self.generator, x.device):
            return self.network(x).t()[None]

    @property
    def flops(self) -> Flops:
        """FLOPs per example, see `costs`."""
        return costs(self.source, self.classes, *self.shape[1:], channels=self.channels)

    @property
    def footprint(self) -> int:
        """Floats per example that evaluation holds at a time: those of 24 images of three channels,
        as in the largest layers of torchvision's models, except its VGGs (64)."""
        return 24 * 3 * math.prod(self.shape[1:])


def _tensors(network: nn.Module) -> Iterator[Tensor]:
    """Parameters and buffers."""
    return chain(network.parameters(), network.buffers())


def check(
    settings: Settings, shape: Sequence[int], classes: int, factory: Factory | None = None
) -> dict[str, str]:
    """Check that the model of the settings, or of `factory`, takes images of `shape` (channels,
    height, width), and print which weights of the file are left out.

    Returns what run.json records of a `factory`: a hash of its layers.

    UserError: the model does not take such images, some parameters of its factory would not train,
    or the file does not fit the model.
    """
    if factory:
        return _check_factory(factory, shape, classes)
    if shape[0] not in (1, 3):
        raise UserError(f"--arch {settings.arch} takes images of 1 or 3 channels, not {shape[0]}")
    costs(settings.torchvision, classes, *shape[1:])
    if settings.weights:
        network = _built(settings.torchvision, classes)
        left_out = load_weights(network, settings, classes)
        if left_out:
            names = ", ".join(left_out)
            print(f"{settings.weights} has other classes: {names} start at random", flush=True)
    return {}


def _check_factory(factory: Factory, shape: Sequence[int], classes: int) -> dict[str, str]:
    """As `check`, for a factory."""
    if isinstance(factory, str | nn.Module):
        raise UserError("backbone: give a function of channels, (height, width) and classes")
    network = _built(factory, classes, shape=tuple(shape))
    if network is _built(factory, classes, shape=tuple(shape)):
        raise UserError("backbone gives the same network twice: build a new one in each call")
    costs(factory, classes, *shape[1:], channels=shape[0])
    with _drawing_from(None, torch.device("cpu")):
        logits = network(torch.zeros(2, *shape))
    if logits.requires_grad:
        logits.sum().backward()
    parameters = network.named_parameters()
    idle = [name for name, parameter in parameters if parameter.grad is None]
    if idle:
        names = ", ".join(idle)
        raise UserError(f"backbone: {names} get no gradient: use each parameter, freeze none")
    return {"backbone": hashlib.blake2b(repr(network).encode(), digest_size=8).hexdigest()}


@lru_cache(maxsize=8)
def costs(source: str | Factory, classes: int, height: int, width: int, channels: int = 3) -> Flops:
    """FLOPs per example of images of height x width pixels; `source` as in `_built`.

    PyTorch's counter counts the forward pass, attention scores included, on tensors without values.
    The backward pass costs twice as much, less the gradient of the images; the counter's own figure
    is too high for convolutions by group. UserError: the model does not take such images, or gives
    no logits.
    """
    network = _built(source, classes, shape=(channels, height, width)).to("meta").train()
    title = f"--arch {TORCHVISION}{source}" if isinstance(source, str) else f"backbone {source}"
    try:
        with torch.device("meta"), torch.no_grad(), FlopCounterMode(display=False) as counter:
            logits = network(torch.empty(2, channels, height, width))  # two, for batch statistics
    except (RuntimeError, ValueError, AssertionError) as error:
        fault = f"{title} does not take images of {height} x {width} pixels"
        reason = str(error).partition("\n")[0]
        raise UserError(f"{fault} ({reason}): give --image-size") from None
    if logits.shape != (2, classes):
        fault = f"gives {tuple(logits.shape)} for 2 images of {classes} classes"
        raise UserError(f"{title} {fault}: give logits")
    forward = counter.get_total_flops() / 2
    layers = [
        path
        for path, module in network.named_modules()
        if isinstance(module, nn.Conv2d | nn.Linear)
    ]
    first_layer = layers[0] if layers else ""
    first = f"{type(network).__name__}.{first_layer}"
    of_images = sum(counter.get_flop_counts().get(first, {}).values()) / 2
    return Flops(forward, 2 * forward - of_images, forward)


def load_weights(network: nn.Module, settings: Settings, classes: int) -> list[str]:
    """Load the file `settings.weights` into a network of `classes` classes.

    Returns the names of tensors that keep their values because the file has another number of
    classes.

    UserError: other tensors do not fit.
    """
    path = str(settings.weights)
    name = settings.torchvision
    state = read_checkpoint(path, advice="give a file of torch.save(model.state_dict(), FILE)")
    state = {str(key): value for key, value in state.items()}
    state = {key: state[key] for key in state if not key.startswith(_AUXILIARY.get(name, ()))}
    current = network.state_dict()
    wider = _built(name, classes + 1).state_dict()
    left_out = []
    for key, tensor in current.items():
        has_classes = tensor.shape != wider[key].shape
        if not has_classes or not isinstance(state.get(key), Tensor):
            continue
        saved_shape = state[key].shape
        if saved_shape != tensor.shape and saved_shape[1:] == tensor.shape[1:]:
            left_out.append(key)
    try:
        network.load_state_dict(state | {key: current[key] for key in left_out})
    except RuntimeError as error:
        reason = textwrap.shorten(str(error).partition(":\n")[2] or str(error), 200)
        raise UserError(f"--weights {path} does not fit {settings.arch}: {reason}") from None
    return left_out


def _built(
    source: str | Factory,
    classes: int,
    generator: torch.Generator | None = None,
    shape: tuple[int, ...] = (3, 0, 0),
) -> nn.Module:
    """A new model of torchvision of the name `source`, or a network of this factory for images of
    `shape`, with initial weights from the generator."""
    with _drawing_from(generator, torch.device("cpu")):
        if not isinstance(source, str):
            return source(shape[0], shape[1:], classes)
        options = {"aux_logits": False, "init_weights": True} if source in _AUXILIARY else {}
        return models.get_model(source, weights=None, num_classes=classes, **options)


@contextmanager
def _drawing_from(generator: torch.Generator | None, device: torch.device) -> Iterator[None]:
    """Seed torch's global generators by `generator` (None: by 0), and restore them afterwards."""
    seed = int(torch.randint(2**62, (), generator=generator)) if generator else 0
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield
