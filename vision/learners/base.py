"""What all learners are: a model that every stage trains further, maybe after it has grown."""

import hashlib
import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from alma.errors import UserError
from vision.flat import align, aligned
from vision.mixture import Mixture, MixtureMLP, MixtureVGG
from vision.models import MLP, VGG, Backbone, mlp_widths, vgg_widths
from vision.presets import Settings
from vision.train import DIVERGED, EVALUATION_BATCH, Examples, Progress, Watch, fit


class StageData(Protocol):
    """Where a learner gets its data: it has received those of stages 0..`index` when it trains on one."""

    black: Tensor
    """A black pixel (channels,), normalised."""

    def train(self, index: int) -> Examples:
        """Training examples of a stage."""

    def valid(self, index: int) -> Examples:
        """Validation examples of a stage."""


class Learner:
    """A learner of images (channels, height, width) of some number of classes.

    `seed` decides initial weights, order and augmentation; nothing is drawn from a global generator.
    Subclasses say what `build` makes; those that grow say how.
    """

    grows = False
    orders = 1
    """Networks that see an order of minibatches, and augmentation, of their own."""

    def __init__(
        self, shape: Sequence[int], classes: int, settings: Settings, seed: int, device: torch.device
    ):
        self.shape, self.classes, self.settings = tuple(shape), classes, settings
        self.seed, self.device = seed, device
        self.generators = [self.drawing("order", *([m] if m else [])) for m in range(self.orders)]
        self.valid: dict[str, float] | None = None
        self.model = self.build({}).to(device)
        self.reset(0)

    def build(self, structure: dict[str, Any]) -> Any:
        """The model; `structure` is what a grown one has told of itself, or empty for the first."""
        raise NotImplementedError

    def reset(self, stage: int) -> None:
        """Draw new weights, those of `stage`."""
        self.model.reset(self.drawing("init", 0, stage))

    @property
    def structure(self) -> dict[str, Any]:
        """What `build` needs to make a model of the size this one has now."""
        return {}

    def grow(self, index: int, data: StageData) -> dict[str, float]:
        """Grow the model before stage `index`; returns the FLOPs of choosing where ("growth"), and of
        measuring what it changed ("validation")."""
        raise NotImplementedError

    def train(
        self, index: int, data: StageData, resumed: Progress | None = None, watch: Watch | None = None
    ) -> dict[str, float]:
        """Train on stage `index`, and set `valid`, the mean loss and the error on its validation examples;
        returns FLOPs by purpose. `resumed` is what an interrupted call gave to `watch`."""
        progress = resumed or Progress(spent=self.prepare(index, data))
        train, valid = data.train(index), data.valid(index)
        flops = fit(self.model, train, valid, self.settings, self.generators, progress, watch, data.black)
        self.finish()
        self.valid = self.assess(valid)
        flops["validation"] += len(valid.labels) * self.eval_flops_per_example
        return flops

    def prepare(self, index: int, data: StageData) -> dict[str, float]:
        """Before training: growth between stages, new weights where they are wanted."""
        flops = {}
        if self.grows and index and index % self.settings.grow_every == 0:
            flops = self.grow(index, data)
        if self.settings.from_scratch:
            self.reset(index)
        return flops

    def finish(self) -> None:
        """After training, before the learner is tested."""

    @torch.no_grad()
    def predict(self, images: Tensor, kept: dict[str, Any]) -> tuple[Tensor, float]:
        """Predicted classes (n,), and the FLOPs they took. `kept` is a dict that comes back at the next call
        with the same images: a place for what will not change."""
        self.model.eval()
        align(self.model)
        chosen = [self.scores(self.votes(part)).argmax(0) for part in aligned(images).split(EVALUATION_BATCH)]
        return torch.cat(chosen), len(images) * self.eval_flops_per_example

    @torch.no_grad()
    def assess(self, examples: Examples) -> dict[str, float]:
        """Mean cross-entropy and error of the learner as it is deployed. UserError: not a number."""
        self.model.eval()
        examples = examples.aligned()
        parts = [self.log_probabilities(self.votes(part)) for part in examples.images.split(EVALUATION_BATCH)]
        found = torch.cat(parts, 1)
        loss = float(F.nll_loss(found.t(), examples.labels))
        if not math.isfinite(loss):
            raise UserError(DIVERGED)
        return {"loss": loss, "error": float((found.argmax(0) != examples.labels).double().mean())}

    def votes(self, images: Tensor) -> Tensor:
        """Logits (V, C, n) of all that are averaged in the end."""
        return self.model(images)

    def scores(self, logits: Tensor) -> Tensor:
        """Voters' logits (V, C, n) -> the mean of their probabilities (C, n)."""
        return logits.softmax(1).mean(0) if len(logits) > 1 else logits[0]

    def log_probabilities(self, logits: Tensor) -> Tensor:
        """Voters' logits (V, C, n) -> the logarithm of the mean of their probabilities (C, n)."""
        return logits.log_softmax(1).logsumexp(0) - math.log(len(logits))

    @property
    def parameters(self) -> int:
        """Free parameters now."""
        return sum(p.numel() for p in self.model.parameters())

    @property
    def eval_flops_per_example(self) -> float:
        """FLOPs of one prediction now."""
        return self.model.flops.inference

    @property
    def details(self) -> dict[str, Any]:
        """Further results for the record."""
        return {}

    def state(self) -> dict[str, Any]:
        """Everything that training has changed, as tensors and plain values."""
        return {
            "structure": self.structure,
            "model": self.model.state_dict(),
            "generators": [generator.get_state() for generator in self.generators],
            "valid": self.valid,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Become the learner that gave `state`."""
        self.model = self.build(state["structure"]).to(self.device)
        self.model.load_state_dict(state["model"])
        for generator, values in zip(self.generators, state["generators"], strict=True):
            generator.set_state(values.cpu())
        self.valid = state["valid"]

    def drawing(self, *purpose: str | int) -> torch.Generator:
        """A new generator for one purpose, from the run's seed."""
        text = " ".join(map(str, (self.seed, *purpose)))
        number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest())
        return torch.Generator().manual_seed(number)

    def backbone(self, members: int = 1, joint: str | None = None) -> Backbone:
        """A stack of the networks that the settings name."""
        if self.settings.arch == "vgg":
            widths = vgg_widths(self.settings.hidden)
            return VGG(self.shape, widths, self.classes, members, joint)
        return MLP(mlp_widths(self.shape, self.settings.hidden, self.classes), members, joint)

    def mixture(self, experts: int) -> Mixture:
        """A mixture of those networks' layers."""
        chosen = self.settings
        options = experts, chosen.router == "tree", chosen.gate == "hard"
        if chosen.arch == "vgg":
            return MixtureVGG(self.shape, chosen.hidden, self.classes, *options)
        return MixtureMLP(mlp_widths(self.shape, chosen.hidden, self.classes), *options)
