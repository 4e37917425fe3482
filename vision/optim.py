"""Optimizers, learning rate schedules, and moving averages of weights.

The optimizers update all parameters as one vector (`vision.flat`) and match torch.optim bit for bit
(tests/vision/test_optim.py). They exist because half of a torch.optim step on a small network is
overhead, and because torch.optim imports torch's compiler.
"""

import copy
import math
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from alma import averages
from vision.presets import Settings


class Optimizer:
    """Updates a vector of parameters. `lr` may change between steps."""

    lr: float
    state: dict[str, Tensor]
    """Vectors of the optimizer's state by name, which checkpoints save."""

    def step(self, values: Tensor, gradients: Tensor) -> None:
        """Update `values` in place; overwrites `gradients`."""
        raise NotImplementedError

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore a saved `state`."""
        for name, vector in self.state.items():
            vector.copy_(state[name])


class Adadelta(Optimizer):
    """Adadelta (Zeiler, 2012) with torch's defaults of rho and eps."""

    RHO = 0.9
    EPS = 1e-6

    def __init__(self, values: Tensor, lr: float, weight_decay: float):
        self.lr = lr
        self.weight_decay = weight_decay
        self.state = {name: torch.zeros_like(values) for name in ("squares", "deltas")}
        self._delta = torch.empty_like(values)
        self._root = torch.empty_like(values)

    def step(self, values: Tensor, gradients: Tensor) -> None:
        squares = self.state["squares"]
        deltas = self.state["deltas"]
        if self.weight_decay:
            gradients.add_(values, alpha=self.weight_decay)
        squares.mul_(self.RHO).addcmul_(gradients, gradients, value=1 - self.RHO)
        root = torch.add(squares, self.EPS, out=self._root).sqrt_()
        delta = torch.add(deltas, self.EPS, out=self._delta).sqrt_().div_(root).mul_(gradients)
        deltas.mul_(self.RHO).addcmul_(delta, delta, value=1 - self.RHO)
        values.add_(delta, alpha=-self.lr)


class SGD(Optimizer):
    """SGD with momentum, Nesterov momentum and weight decay as in torch."""

    def __init__(
        self, values: Tensor, lr: float, momentum: float, weight_decay: float, nesterov: bool
    ):
        self.lr = lr
        self.momentum = momentum
        self.weight_decay = weight_decay
        self.nesterov = nesterov
        self.state = {"velocity": torch.zeros_like(values)} if momentum else {}

    def step(self, values: Tensor, gradients: Tensor) -> None:
        if self.weight_decay:
            gradients.add_(values, alpha=self.weight_decay)
        if self.momentum:
            velocity = self.state["velocity"].mul_(self.momentum).add_(gradients)
            if self.nesterov:
                gradients.add_(velocity, alpha=self.momentum)
            else:
                gradients = velocity
        values.add_(gradients, alpha=-self.lr)


class Adam(Optimizer):
    """Adam (Kingma and Ba, 2015) with torch's defaults of betas and eps; `decoupled` weight decay
    is AdamW's (Loshchilov and Hutter, 2019)."""

    BETA1 = 0.9
    BETA2 = 0.999
    EPS = 1e-8

    def __init__(self, values: Tensor, lr: float, weight_decay: float, decoupled: bool):
        self.lr = lr
        self.weight_decay = weight_decay
        self.decoupled = decoupled
        self.state = {name: torch.zeros_like(values) for name in ("means", "squares")}
        self.state |= {"steps": torch.zeros((), dtype=torch.int64)}

    def step(self, values: Tensor, gradients: Tensor) -> None:
        means, squares, steps = self.state.values()
        number = int(steps.add_(1))
        if self.weight_decay and self.decoupled:
            values.mul_(1 - self.lr * self.weight_decay)
        elif self.weight_decay:
            gradients.add_(values, alpha=self.weight_decay)
        means.lerp_(gradients, 1 - self.BETA1)
        squares.mul_(self.BETA2).addcmul_(gradients, gradients, value=1 - self.BETA2)
        correction1 = 1 - self.BETA1**number
        correction2 = 1 - self.BETA2**number
        root = torch.sqrt(squares, out=gradients).div_(correction2**0.5).add_(self.EPS)
        values.addcdiv_(means, root, value=-self.lr / correction1)


def make(values: Tensor, settings: Settings) -> Optimizer:
    """A new optimizer of `values`, by the settings."""
    lr = settings.lr
    weight_decay = settings.weight_decay
    if settings.optimizer == "adadelta":
        return Adadelta(values, lr, weight_decay)
    if settings.optimizer == "sgd":
        return SGD(values, lr, settings.momentum, weight_decay, settings.nesterov)
    return Adam(values, lr, weight_decay, decoupled=settings.optimizer == "adamw")


def decay(scheduler: str, done: float) -> float:
    """The factor of the learning rate, from 1 at the start of a stage towards 0 at its end.

    `done` is the fraction of the stage's epochs that are complete.
    """
    factors = {
        "constant": 1.0,
        "linear": 1 - done,
        "cosine": (1 + math.cos(math.pi * done)) / 2,
    }
    return factors[scheduler]


class Average:
    """A moving average of a model's weights (Polyak and Juditsky 1992).

    `kind` is a decay (a number), with one update after each stage, or "poly:ETA", with one update
    after each epoch; `alma.averages` has the formulas. Statistics of batch normalisation are
    averaged too.
    """

    def __init__(self, model: Any, kind: float | str):
        self.model = copy.deepcopy(model)
        self.updates = 0
        self.eta = averages.eta_of(kind)
        self.decay = 0.0 if isinstance(kind, str) else kind
        self.every_epoch = self.eta is not None

    def following(self, model: nn.Module) -> Callable[[], None]:
        """Return a function that updates the average with the current weights of `model`.

        `model` must have the shapes of the average. The function holds references to the tensors of
        both, so neither may replace its tensors while it is in use.
        """
        averaged = _floats(self.model)
        current = _floats(model)

        def update() -> None:
            self.updates += 1
            share = averages.share(self.updates, self.decay, self.eta)
            torch._foreach_lerp_(averaged, current, share)

        return update

    def state(self) -> dict[str, Any]:
        """The average as tensors and plain values."""
        return {"model": self.model.state_dict(), "updates": self.updates}

    def load(self, state: dict[str, Any]) -> None:
        """Restore a `state` of a model of the same sizes."""
        self.model.load_state_dict(state["model"])
        self.updates = state["updates"]


def _floats(model: nn.Module) -> list[Tensor]:
    """The parameters and floating-point buffers of a model."""
    tensors = chain(model.parameters(), model.buffers())
    return [tensor.data for tensor in tensors if tensor.is_floating_point()]
