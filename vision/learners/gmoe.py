"""gMoE: a mixture of experts that splits the losing expert of each layer between stages.

See section 4.2 and appendix A. MoE is the same mixture with a fixed number of experts.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from alma.options import option
from vision.learners.base import GrowingLearner, GrowthSettings, Learner, MixtureSettings
from vision.presets import Settings

if TYPE_CHECKING:
    from torch import Tensor

    from vision.examples import AnyExamples
    from vision.mixture import Mixture
    from vision.stage_data import StageData


@dataclass(frozen=True)
class MoESettings(MixtureSettings):
    experts: int = option(2, "experts per layer", at_least=1)


class MoE(Learner):
    """A mixture with a fixed number of experts per layer."""

    settings_class: type[Settings] = MoESettings
    settings: MixtureSettings
    model: "Mixture"

    def build(self, structure: dict[str, Any]) -> "Mixture":
        """A mixture of structure["experts"] experts per layer."""
        return self.mixture(structure.get("experts", self.settings.experts))

    @property
    def structure(self) -> dict[str, Any]:
        return {"experts": self.model.experts}


@dataclass(frozen=True)
class GMoESettings(GrowthSettings, MixtureSettings):
    authors = Settings.authors | {
        "nesterov": True,
        "experts": 2,
        "grow_by": "usage",
        "grow_on": "new",
    }
    draft: ClassVar = {"experts": 2}

    grow_by: str = option(
        "loss",
        "split the expert with the largest validation loss, or usage",
        choices=("loss", "usage"),
    )
    grow_on: str = option(
        "finished", "stage whose validation data selects the expert", choices=("finished", "new")
    )


class GMoE(GrowingLearner, MoE):
    """A mixture that gains one expert per layer at each growth."""

    settings_class = GMoESettings
    settings: GMoESettings

    def grow(self, index: int, data: "StageData") -> dict[str, float]:
        """Split the losing expert of each layer.

        With a tree, the function of the network stays the same; a flat router gets a random row,
        which changes it.
        """
        stage = index - 1 if self.settings.grow_on == "finished" else index
        examples = data.valid(stage)
        flops = len(examples.labels) * self.model.flops.inference
        losing = [int(scores.argmax()) for scores in self.split_scores(examples)]
        models = [self.model]
        if self.average:
            models.append(self.average.model)
        for model in models:
            # The same seed for the model and its average, so that both get the same new gates.
            generator = self.generator_for("growth", index)
            for layer, expert in zip(model.layers, losing, strict=True):
                layer.split(expert, generator)
        return {"growth": flops}

    def split_scores(self, examples: "AnyExamples") -> "list[Tensor]":
        """Scores (E,) of each layer's experts; the largest is split (appendix A).

        A score is the sum over examples of gate value times loss or, with `grow_by` "usage", of the
        gate values alone.
        """
        import torch
        from torch.nn import functional as F

        from vision.train import evaluation_batches

        self.model.eval()
        scores: list[Any] = [0 for _ in self.model.layers]
        for images, labels in evaluation_batches(self.model, examples):
            with torch.no_grad():
                logits, gates = self.model.routed(images)
            losses = F.cross_entropy(logits[0].t(), labels, reduction="none")
            weight = losses if self.settings.grow_by == "loss" else torch.ones_like(losses)
            scores = [total + layer @ weight for total, layer in zip(scores, gates, strict=True)]
        return scores
