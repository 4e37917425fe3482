"""The average of a model's weights over stages or epochs (Polyak and Juditsky 1992)."""

import copy
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import nn

from alma import averages


class Average:
    """A moving average of a model's weights: with a decay over stages, with `poly:ETA` over epochs.

    See `alma.averages` for the updates. Statistics of batch normalisation are averaged as the
    weights are.
    """

    def __init__(self, model: Any, kind: float | str):
        self.model, self.updates = copy.deepcopy(model), 0
        self.eta = averages.eta_of(kind)
        self.decay = 0.0 if isinstance(kind, str) else kind
        self.every_epoch = self.eta is not None

    def following(self, model: nn.Module) -> Callable[[], None]:
        """A function that updates the average with the weights that `model`, of the same sizes, then has.
        Both must keep their tensors."""
        mine, new = (
            [t.data for t in chain(each.parameters(), each.buffers()) if t.is_floating_point()]
            for each in (self.model, model)
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
