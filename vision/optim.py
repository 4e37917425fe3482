"""Adadelta and SGD on one vector of parameters.

They match torch.optim bit for bit (tests/vision/test_optim.py). On a small network, half of a torch.optim
step is overhead, and torch.optim imports torch's compiler (LOG.md).
"""

import math

import torch
from torch import Tensor

from vision.presets import Settings


class Adadelta:
    """Adadelta (Zeiler, 2012) with torch's defaults of rho and eps."""

    RHO, EPS = 0.9, 1e-6

    def __init__(self, values: Tensor, lr: float, weight_decay: float):
        self.lr, self.weight_decay = lr, weight_decay
        self.state = {name: torch.zeros_like(values) for name in ("squares", "deltas")}
        self._delta, self._root = torch.empty_like(values), torch.empty_like(values)

    def step(self, values: Tensor, gradients: Tensor) -> None:
        """Update `values` in place; overwrites `gradients`."""
        squares, deltas = self.state["squares"], self.state["deltas"]
        if self.weight_decay:
            gradients.add_(values, alpha=self.weight_decay)
        squares.mul_(self.RHO).addcmul_(gradients, gradients, value=1 - self.RHO)
        root = torch.add(squares, self.EPS, out=self._root).sqrt_()
        delta = torch.add(deltas, self.EPS, out=self._delta).sqrt_().div_(root).mul_(gradients)
        deltas.mul_(self.RHO).addcmul_(delta, delta, value=1 - self.RHO)
        values.add_(delta, alpha=-self.lr)


class SGD:
    """SGD with momentum, Nesterov momentum and weight decay as in torch."""

    def __init__(self, values: Tensor, lr: float, momentum: float, weight_decay: float, nesterov: bool):
        self.lr, self.momentum, self.weight_decay, self.nesterov = lr, momentum, weight_decay, nesterov
        self.state: dict[str, Tensor] = {"velocity": torch.zeros_like(values)} if momentum else {}

    def step(self, values: Tensor, gradients: Tensor) -> None:
        """Update `values` in place; overwrites `gradients`."""
        if self.weight_decay:
            gradients.add_(values, alpha=self.weight_decay)
        if self.momentum:
            velocity = self.state["velocity"].mul_(self.momentum).add_(gradients)
            gradients = gradients.add_(velocity, alpha=self.momentum) if self.nesterov else velocity
        values.add_(gradients, alpha=-self.lr)


Optimizer = Adadelta | SGD
"""`state` holds vectors that checkpoints save; `step` updates the parameters."""


def decay(scheduler: str, done: float) -> float:
    """Factor of the learning rate after the share `done` of a stage's epochs: 1 at first, towards 0."""
    return {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[scheduler]


def make(values: Tensor, settings: Settings) -> Optimizer:
    """A new optimizer of `values`, as the settings choose it."""
    if settings.optimizer == "adadelta":
        return Adadelta(values, settings.lr, settings.weight_decay)
    return SGD(values, settings.lr, settings.momentum, settings.weight_decay, settings.nesterov)
