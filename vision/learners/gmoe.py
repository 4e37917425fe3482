"""gMoE: a mixture of experts that splits the losing expert of each layer between stages (section 4.2,
appendix A); MoE: the same mixture without growth."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from vision.flat import align
from vision.learners.base import Learner, StageData
from vision.mixture import Mixture
from vision.train import EVALUATION_BATCH, Examples


class MoE(Learner):
    """A mixture with a fixed number of experts in each layer."""

    model: Mixture

    def build(self, structure: dict[str, Any]) -> Mixture:
        """A mixture of structure["experts"] experts in each layer."""
        return self.mixture(structure.get("experts", self.settings.experts))

    @property
    def structure(self) -> dict[str, Any]:
        """The number of experts."""
        return {"experts": self.model.experts}

    @property
    def details(self) -> dict[str, Any]:
        """The number of experts of a layer."""
        return {"experts": self.model.experts}


class GMoE(MoE):
    """A mixture that grows by one expert a layer."""

    grows = True

    def grow(self, index: int, data: StageData) -> dict[str, float]:
        """Split the expert of each layer that has most loss (or usage) on the validation data of the stage
        just finished, or of the new one. The function stays the same."""
        examples = data.valid(index - 1 if self.settings.grow_on == "finished" else index)
        flops = len(examples.labels) * self.model.flops.inference
        generator = self.drawing("growth", index)
        for layer, blame in zip(self.model.layers, self.blame(examples), strict=True):
            layer.split(int(blame.argmax()), generator)
        return {"growth": flops}

    @torch.no_grad()
    def blame(self, examples: Examples) -> list[Tensor]:
        """For each layer, (E,): the validation loss routed through each expert, gate values times losses
        summed over the examples; or with `grow_by` "usage" the gate values alone."""
        self.model.eval()
        align(self.model)
        found: list[Any] = [0] * len(self.model.layers)
        parts = (tensor.split(EVALUATION_BATCH) for tensor in examples.aligned())
        for images, labels in zip(*parts, strict=True):
            logits, gates = self.model.routed(images)
            losses = F.cross_entropy(logits[0].t(), labels, reduction="none")
            weight = losses if self.settings.grow_by == "loss" else torch.ones_like(losses)
            found = [total + layer @ weight for total, layer in zip(found, gates, strict=True)]
        return found
