"""Optimizers of one vector of parameters: Adadelta, SGD, and Schedule-Free.

The first two match torch.optim bit for bit (tests/vision/test_optim.py). On a small network, half of a
torch.optim step is overhead, and torch.optim imports torch's compiler (LOG.md).
"""

import math
from typing import Any, cast

import torch
from torch import Tensor

from vision.presets import SCHEDULE_FREE, Settings


class Optimizer:
    """Updates a vector of parameters. `lr` may change between steps."""

    lr: float
    state: dict[str, Tensor]
    """Vectors that checkpoints save, complete after `eval`."""
    param_groups: list[dict[str, Any]]
    """What torch's GradScaler reads, see `Scaled`."""

    def step(self, values: Tensor, gradients: Tensor) -> None:
        """Update `values` in place; overwrites `gradients`."""
        raise NotImplementedError

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss whose gradients `step` takes."""
        return loss

    def train(self) -> None:
        """Called before the steps of an epoch."""

    def eval(self) -> None:
        """Called after them; turns the weights that train into those that are tested, if they differ."""


class Adadelta(Optimizer):
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


class SGD(Optimizer):
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


class ScheduleFree(Optimizer):
    """AdamW or SGD of the library schedulefree (Defazio et al. 2024).

    Between `train` and `eval` the parameters are y, where gradients are computed; else x, a weighted mean of
    all z, the points that the base optimizer reaches.
    """

    COUNTS = ("k", "weight_sum", "lr_max")  # the library's names

    def __init__(self, values: Tensor, settings: Settings):
        import schedulefree

        self._values, self.lr, beta = torch.nn.Parameter(values), settings.lr, settings.momentum
        options: Any = {"lr": settings.lr, "weight_decay": settings.weight_decay}
        vectors = {"z": values.clone()}
        if settings.optimizer == "adamw_schedulefree":
            vectors["exp_avg_sq"] = torch.zeros_like(values)
            self._steps: Any = schedulefree.AdamWScheduleFree([self._values], betas=(beta, 0.999), **options)
        else:
            self._steps = schedulefree.SGDScheduleFree([self._values], momentum=beta, **options)
        self._steps.state[self._values] = vectors
        self._group = self._steps.param_groups[0]
        counts = torch.tensor([float(self._group[name]) for name in self.COUNTS], dtype=torch.float64)
        self.state = {**vectors, "counts": counts}

    def train(self) -> None:
        """x -> y."""
        self._group.update(zip(self.COUNTS, self.state["counts"].tolist(), strict=True))
        self._steps.train()

    def eval(self) -> None:
        """y -> x."""
        self._steps.eval()
        counts = [float(self._group[name]) for name in self.COUNTS]
        self.state["counts"].copy_(torch.tensor(counts, dtype=torch.float64))

    def step(self, values: Tensor, gradients: Tensor) -> None:
        """Update `values`, those of `__init__`, in place; overwrites `gradients`."""
        self._group["lr"], self._values.grad = self.lr, gradients
        self._steps.step()


class Scaled(Optimizer):
    """Another optimizer behind torch's GradScaler: its loss is scaled up, so that gradients do not vanish in
    half precision. A step whose gradients overflow is left out, and the scale halved."""

    NAMES = ("scale", "_growth_tracker")  # of GradScaler.state_dict

    def __init__(self, inner: Optimizer, values: Tensor):
        self._inner, self._values = inner, torch.nn.Parameter(values)
        self._scaler = torch.amp.GradScaler(values.device.type)
        inner.param_groups = [{"params": [self._values]}]
        self.state = {**inner.state, "scale": torch.zeros(len(self.NAMES), dtype=torch.float64)}
        self._note()

    def _note(self) -> None:
        found = self._scaler.state_dict()
        self.state["scale"].copy_(torch.tensor([float(found[name]) for name in self.NAMES]))

    @property
    def lr(self) -> float:  # type: ignore[override]
        """That of the other optimizer."""
        return self._inner.lr

    @lr.setter
    def lr(self, value: float) -> None:
        self._inner.lr = value

    def train(self) -> None:
        """With the saved scale."""
        scale, steps = self.state["scale"].tolist()
        saved = dict(zip(self.NAMES, (scale, int(steps)), strict=True))
        self._scaler.load_state_dict(self._scaler.state_dict() | saved)
        self._inner.train()

    def eval(self) -> None:
        """Saves the scale."""
        self._inner.eval()
        self._note()

    def step(self, values: Tensor, gradients: Tensor) -> None:
        """Update `values`, those of `__init__`, in place unless a gradient is infinite."""
        self._values.grad = gradients
        self._scaler.step(cast(Any, self._inner), values, gradients)
        self._scaler.update()

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss times the scale."""
        return self._scaler.scale(loss)


def decay(scheduler: str, done: float) -> float:
    """Factor of the learning rate after the share `done` of a stage's epochs: 1 at first, towards 0."""
    return {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[scheduler]


def make(values: Tensor, settings: Settings) -> Optimizer:
    """A new optimizer of `values`, as the settings choose it."""
    found = _chosen(values, settings)
    return Scaled(found, values) if settings.amp == "fp16" else found


def _chosen(values: Tensor, settings: Settings) -> Optimizer:
    if settings.optimizer in SCHEDULE_FREE:
        return ScheduleFree(values, settings)
    if settings.optimizer == "adadelta":
        return Adadelta(values, settings.lr, settings.weight_decay)
    return SGD(values, settings.lr, settings.momentum, settings.weight_decay, settings.nesterov)
