"""A moving average of the weights over the updates of a training (`alma.averages`)."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from alma import averages

FILE = "average.safetensors"


class MovingAverage:
    """The average of a model's trained weights, in fp32."""

    def __init__(self, model: nn.Module, average: str, checkpoint: Path | None) -> None:
        """average: a value of --average. checkpoint: the folder to resume from; None: a new one."""
        value = averages.read(average)
        self._eta = averages.eta_of(value)
        self._decay = 0.0
        if isinstance(value, float):
            self._decay = value
        self._weights = _trained(model)
        saved = load_file(checkpoint / FILE) if checkpoint else {}
        self._average = {}
        for name, weight in self._weights.items():
            start = saved.get(name, weight.detach())
            self._average[name] = start.to(weight.device, torch.float32, copy=True)

    @torch.no_grad()
    def step(self, update: int) -> None:
        """Take in the weights after update 1, 2, ..."""
        share = averages.share(update, self._decay, self._eta)
        in_fp32 = [weight.float() for weight in self._weights.values()]
        torch._foreach_lerp_(list(self._average.values()), in_fp32, share)

    def save(self, folder: Path) -> None:
        """Write the average into a checkpoint."""
        state: dict[str, Tensor] = {}
        for name, value in self._average.items():
            state[name] = value.contiguous()
        save_file(state, folder / FILE)

    @torch.no_grad()
    def deploy(self) -> None:
        """Replace the model's weights by the average."""
        for name, weight in self._weights.items():
            weight.copy_(self._average[name])


def _trained(model: nn.Module) -> dict[str, Tensor]:
    """The weights that are trained, those of shared layers once."""
    return {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
