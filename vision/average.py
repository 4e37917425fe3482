"""The average of a model's weights over stages (Polyak and Juditsky 1992; SWA, Izmailov et al. 2018)."""

import copy
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn


class Average:
    """An exponential moving average of a model's weights, updated after every stage.

    The k-th update gives the new weights the weight max(1 - decay, 1 / k): the first ones are a plain mean.
    Statistics of batch normalisation are averaged as the weights are.
    """

    def __init__(self, model: Any, decay: float):
        self.model, self.decay, self.updates = copy.deepcopy(model), decay, 0

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Move the average to the weights of `model`, which has the same sizes."""
        self.updates += 1
        share = max(1 - self.decay, 1 / self.updates)
        for mine, new in zip(_tensors(self.model), _tensors(model), strict=True):
            mine.lerp_(new, share)

    def state(self) -> dict[str, Any]:
        """The average as tensors and plain values."""
        return {"model": self.model.state_dict(), "updates": self.updates}

    def load(self, state: dict[str, Any]) -> None:
        """Restore a `state` of a model of the same sizes."""
        self.model.load_state_dict(state["model"])
        self.updates = state["updates"]


def _tensors(model: nn.Module) -> list[Tensor]:
    found = chain(model.parameters(), model.buffers())
    return [tensor.data for tensor in found if tensor.is_floating_point()]
