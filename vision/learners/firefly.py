"""Firefly: one network that grows in width and depth between stages (section 4.2; Wu et al. 2020)."""

import math
from typing import Any

import torch
from torch import Tensor

from vision.firefly import Choice, Overgrown
from vision.flat import align
from vision.learners.base import Learner, StageData
from vision.models import MLP, VGG, Backbone
from vision.train import EVALUATION_BATCH, Examples, loss_of, minibatches


class Firefly(Learner):
    """A network that gains about `ff_rate` times its initial number of parameters with each growth: as many
    each time, "linear (rather than exponential) growth" (appendix B.1.2)."""

    grows = True

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.budget = self.settings.ff_rate * self.parameters
        self.growth: dict[str, float] = {}

    def build(self, structure: dict[str, Any]) -> Backbone:
        """One network, of structure["widths"] where it has grown."""
        if not structure:
            return self.backbone()
        if self.settings.arch == "vgg":
            return VGG(self.shape, structure["widths"], self.classes)
        return MLP(structure["widths"])

    @property
    def structure(self) -> dict[str, Any]:
        """The widths."""
        return {"widths": list(self.model.widths)}

    def grow(self, index: int, data: StageData) -> dict[str, float]:
        """Over-grow, tune and score the candidates on the training data of the new stage, plant the best.

        Each hidden layer gets as many candidates for new neurons as would use up the budget if all were
        planted, and none split."""
        train, valid = data.train(index).aligned(), data.valid(index).aligned()
        align(self.model)
        generator = self.drawing("growth", index)
        new = math.ceil(self.settings.ff_rate * self.settings.hidden)
        network = Overgrown(self.model, new, self.settings.ff_depth, generator)
        flops = network.measure(train.images)
        flops += network.tune(minibatches(train, self.settings, [generator], data.black))
        scores, more = network.scores(minibatches(train, self.settings, [generator], data.black))
        choices = network.select(scores, self.budget)
        grown = self.build({"widths": network.widths(choices)}).to(self.device)
        network.plant(choices, grown)  # type: ignore[arg-type]
        self.growth = self._compare(grown, choices, valid)
        compared = len(valid.labels) * (self.model.flops.inference + grown.flops.inference)
        self.model = grown
        return {"growth": flops + more, "validation": compared}

    def _compare(self, grown: Backbone, choices: list[Choice], examples: Examples) -> dict[str, float]:
        """What the growth changed, for the record; losses and logits on `examples`."""
        before, after = (_logits(model, examples.images) for model in (self.model, grown))
        return {
            "function_error": float((after - before).abs().max()),
            "loss_before": float(loss_of(before, examples.labels)),
            "loss_after": float(loss_of(after, examples.labels)),
            "split": sum(len(choice.split) for choice in choices),
            "new": sum(len(choice.new) for choice in choices),
            "layers": sum(choice.layer for choice in choices),
            "added_parameters": sum(p.numel() for p in grown.parameters()) - self.parameters,
        }

    @property
    def details(self) -> dict[str, Any]:
        """The widths now; what the last growth did and changed, on validation data."""
        return self.structure | ({"growth": self.growth} if self.growth else {})

    def state(self) -> dict[str, Any]:
        """With the last growth."""
        return super().state() | {"growth": self.growth}

    def load(self, state: dict[str, Any]) -> None:
        """With the last growth."""
        super().load(state)
        self.growth = state["growth"]


@torch.no_grad()
def _logits(model: Backbone, images: Tensor) -> Tensor:
    """(1, C, n), in evaluation mode."""
    model.eval()
    return torch.cat([model(part) for part in images.split(EVALUATION_BATCH)], 2)
