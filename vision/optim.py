"""Optimizers of one vector of parameters, the schedule of their learning rate, and the average of weights.
All match torch.optim bit for bit (tests/vision/test_optim.py). On a small network, half of a torch.optim step
is overhead, and torch.optim imports torch's compiler."""

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
    """Vectors that checkpoints save."""

    def step(self, values: Tensor, gradients: Tensor) -> None:
        """Update `values` in place; overwrites `gradients`."""
        raise NotImplementedError

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore a saved `state`."""
        for name, vector in self.state.items():
            vector.copy_(state[name])


class Adadelta(Optimizer):
    """Adadelta (Zeiler, 2012) with torch's defaults of rho and eps."""

    RHO, EPS = 0.9, 1e-6

    def __init__(self, values: Tensor, lr: float, weight_decay: float):
        self.lr, self.weight_decay = lr, weight_decay
        self.state = {name: torch.zeros_like(values) for name in ("squares", "deltas")}
        self._delta, self._root = torch.empty_like(values), torch.empty_like(values)

    def step(self, values: Tensor, gradients: Tensor) -> None:
        squares, deltas = self.state["squares"], self.state["deltas"]
        if self.weight_decay:
            gradients.add_(values, alpha=self.weight_decay)
        squares.mul_(self.RHO).addcmul_(gradients, gradients, value=1 - self.RHO)
        root = torch.add(squares, self.EPS, out=self._root).sqrt_()
        delta = torch.add(deltas, self.EPS, out=self._delta).sqrt_().div_(root).mul_(gradients)
        deltas.mul_(self.RHO).addcmul_(delta, delta, value=1 - self.RHO)
        values.add_(delta, alpha=-self.lr)


class SGD(Optimizer):
    """SGD with momentum, Nesterov momentum and weight decay as in torch."""

    def __init__(self, values: Tensor, lr: float, momentum: float, weight_decay: float, nesterov: bool):
        self.lr, self.momentum, self.weight_decay, self.nesterov = lr, momentum, weight_decay, nesterov
        self.state = {"velocity": torch.zeros_like(values)} if momentum else {}

    def step(self, values: Tensor, gradients: Tensor) -> None:
        if self.weight_decay:
            gradients.add_(values, alpha=self.weight_decay)
        if self.momentum:
            velocity = self.state["velocity"].mul_(self.momentum).add_(gradients)
            gradients = gradients.add_(velocity, alpha=self.momentum) if self.nesterov else velocity
        values.add_(gradients, alpha=-self.lr)


class Adam(Optimizer):
    """Adam (Kingma and Ba, 2015) with torch's defaults of betas and eps; `decoupled` weight decay is AdamW's
    (Loshchilov and Hutter, 2019)."""

    BETA1, BETA2, EPS = 0.9, 0.999, 1e-8

    def __init__(self, values: Tensor, lr: float, weight_decay: float, decoupled: bool):
        self.lr, self.weight_decay, self.decoupled = lr, weight_decay, decoupled
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
        root = torch.sqrt(squares, out=gradients).div_((1 - self.BETA2**number) ** 0.5).add_(self.EPS)
        values.addcdiv_(means, root, value=-self.lr / (1 - self.BETA1**number))


def make(values: Tensor, settings: Settings) -> Optimizer:
    """A new optimizer of `values`, as the settings choose it."""
    if settings.optimizer == "adadelta":
        return Adadelta(values, settings.lr, settings.weight_decay)
    if settings.optimizer != "sgd":
        return Adam(values, settings.lr, settings.weight_decay, settings.optimizer == "adamw")
    return SGD(values, settings.lr, settings.momentum, settings.weight_decay, settings.nesterov)


def decay(scheduler: str, done: float) -> float:
    """Factor of the learning rate after the share `done` of a stage's epochs: 1 at first, towards 0."""
    return {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[scheduler]


class Average:
    """A moving average of a model's weights (Polyak and Juditsky 1992): with a decay over stages, with
    `poly:ETA` over epochs. `alma.averages` has the updates. Statistics of batch normalisation are averaged,
    too."""

    def __init__(self, model: Any, kind: float | str):
        self.model, self.updates = copy.deepcopy(model), 0
        self.eta = averages.eta_of(kind)
        self.decay = 0.0 if isinstance(kind, str) else kind
        self.every_epoch = self.eta is not None

    def following(self, model: nn.Module) -> Callable[[], None]:
        """A function that updates the average with the weights that `model`, of the same sizes, then has.
        Both must keep their tensors."""
        mine, new = (
            [t.data for t in chain(m.parameters(), m.buffers()) if t.is_floating_point()]
            for m in (self.model, model)
        )

        def update() -> None:
            self.updates += 1
            torch._foreach_lerp_(mine, new, averages.share(self.updates, self.decay, self.eta))

        return update

    def state(self) -> dict[str, Any]:
        """The average as tensors and plain values."""
        return {"model": self.model.state_dict(), "updates": self.updates}

    def load(self, state: dict[str, Any]) -> None:
        """Restore a `state` of a model of the same sizes."""
        self.model.load_state_dict(state["model"])
        self.updates = state["updates"]
