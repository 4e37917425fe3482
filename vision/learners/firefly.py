"""Firefly: a network that grows in width and depth between stages (section 4.2; Wu et al. 2020)."""

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from alma.options import option
from vision.learners.base import GrowingLearner, GrowthSettings
from vision.presets import Settings

if TYPE_CHECKING:
    from vision.firefly import Choice, Overgrown
    from vision.stage_data import StageData


@dataclass(frozen=True)
class FireflySettings(GrowthSettings):
    authors = Settings.authors | {"nesterov": True, "ff_rate": 0.6, "ff_depth": False}

    ff_rate: float = option(
        0.25, "parameters per growth, as a share of the initial number", above=0
    )
    ff_depth: bool = option(True, "also grow new layers")


class Firefly(GrowingLearner):
    """A network that gains neurons and layers, `ff_rate` of its initial parameters at each growth.

    That number, which a growth meets approximately, is constant: "linear (rather than exponential)
    growth" (appendix B.1.2).
    """

    settings_class = FireflySettings
    settings: FireflySettings

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.budget = self.settings.ff_rate * self.parameters
        self.growth: dict[str, float] = {}

    def build(self, structure: dict[str, Any]) -> Any:
        """One network, with structure["widths"] if it has grown."""
        return self.backbone(widths=structure.get("widths"))

    @property
    def structure(self) -> dict[str, Any]:
        return {"widths": list(self.model.widths)}

    def grow(self, index: int, data: "StageData") -> dict[str, float]:
        """Over-grow, tune and score candidates on the training data of the new stage, and keep the
        best.

        Each hidden layer gets enough candidate neurons to spend the whole budget there.
        """
        import torch

        from vision.firefly import MEASURED, Overgrown
        from vision.train import Drawing, evaluate, loss_of, minibatches

        train = data.train(index)
        valid = data.valid(index)
        generator = self.generator_for("growth", index)
        new = math.ceil(self.settings.ff_rate * self.settings.hidden)
        network = Overgrown(self.model, new, self.settings.ff_depth, generator)
        replay = data.replay(index)
        if replay:
            measured = replay.draw(generator)[:MEASURED]
        else:
            measured = torch.arange(min(MEASURED, len(train.labels)))
        images = train.pixels(measured.to(self.device)).permute(0, 3, 1, 2)
        drawing = Drawing(data.black, replay)
        epoch = partial(minibatches, train, self.settings, [generator], drawing)
        flops = network.measure(images)
        flops += network.tune(epoch())
        scores, flops_of_scores = network.scores(epoch())
        flops += flops_of_scores
        choices = network.select(scores, self.budget)
        before = self.model
        parameters_before = self.parameters
        self.model = self._grown(network, choices, self.model)
        if self.average:
            self.average.model = self._grown(network, choices, self.average.model)
        logits_before = evaluate(before, valid)
        logits_after = evaluate(self.model, valid)
        self.growth = {  # effect of this growth on validation examples, and selected candidates
            "function_error": float((logits_after - logits_before).abs().max()),
            "loss_before": float(loss_of(logits_before, valid.labels)),
            "loss_after": float(loss_of(logits_after, valid.labels)),
            "split": sum(len(choice.split) for choice in choices),
            "new": sum(len(choice.new) for choice in choices),
            "layers": sum(choice.layer for choice in choices),
            "added_parameters": self.parameters - parameters_before,
        }
        flops_per_example = before.flops.inference + self.model.flops.inference
        return {"growth": flops, "validation": len(valid.labels) * flops_per_example}

    def _grown(self, network: "Overgrown", choices: "list[Choice]", source: Any) -> Any:
        """A new model: `source`, the network or its average of weights, grown by `choices`."""
        model = self.build({"widths": network.widths(choices)}).to(self.device)
        network.write(choices, source, model)
        return model

    @property
    def details(self) -> dict[str, Any]:
        """Current widths, and the effect of the last growth on validation data."""
        if not self.growth:
            return self.structure
        return self.structure | {"growth": self.growth}

    def state(self) -> dict[str, Any]:
        return super().state() | {"growth": self.growth}

    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        self.growth = state["growth"]
