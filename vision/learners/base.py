"""What all learners are: a model that every stage trains further, maybe after it has grown."""

import hashlib
import resource
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from vision.models import MLP, VGG, Backbone, mlp_widths, vgg_widths
from vision.presets import Settings
from vision.train import EVALUATION_BATCH, Examples, Progress, Watch, fit


class StageData(Protocol):
    """Where a learner gets its data: it has received those of stages 0..`index` when it trains on one."""

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

    def __init__(
        self, shape: Sequence[int], classes: int, settings: Settings, seed: int, device: torch.device
    ):
        self.shape, self.classes, self.settings = tuple(shape), classes, settings
        self.seed, self.device = seed, device
        self.generator = self.drawing("order")
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

    def grow(self, index: int, data: StageData) -> float:
        """Grow the model before stage `index`; returns the FLOPs of choosing where."""
        raise NotImplementedError

    def train(
        self, index: int, data: StageData, resumed: Progress | None = None, watch: Watch | None = None
    ) -> dict[str, float]:
        """Train on stage `index`; returns FLOPs by purpose. `resumed` is what an interrupted call gave to
        `watch`."""
        progress = resumed or Progress(spent=self.prepare(index, data))
        train, valid = data.train(index), data.valid(index)
        return fit(self.model, train, valid, self.settings, self.generator, progress, watch)

    def prepare(self, index: int, data: StageData) -> dict[str, float]:
        """Before training: growth between stages, new weights where they are wanted."""
        flops = {}
        if self.grows and index and index % self.settings.grow_every == 0:
            flops["growth"] = self.grow(index, data)
        if self.settings.from_scratch:
            self.reset(index)
        return flops

    @torch.no_grad()
    def predict(self, images: Tensor, kept: dict[str, Any]) -> tuple[Tensor, float]:
        """Predicted classes (n,), and the FLOPs they took. `kept` is a dict that comes back at the next call
        with the same images: a place for what will not change."""
        self.model.eval()
        chosen = [self.scores(self.model(part)).argmax(0) for part in images.split(EVALUATION_BATCH)]
        return torch.cat(chosen), len(images) * self.eval_flops_per_example

    def scores(self, logits: Tensor) -> Tensor:
        """Voters' logits (V, C, n) -> the mean of their probabilities (C, n)."""
        return logits.softmax(1).mean(0) if len(logits) > 1 else logits[0]

    @property
    def parameters(self) -> int:
        """Free parameters now."""
        return sum(p.numel() for p in self.model.parameters())

    @property
    def eval_flops_per_example(self) -> float:
        """FLOPs of one prediction now."""
        return self.model.flops.inference

    @property
    def peak_memory_bytes(self) -> int:
        """Most memory in use so far: on the device if that is a GPU, else of the process."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    @property
    def details(self) -> dict[str, Any]:
        """Further results for the record."""
        return {}

    def state(self) -> dict[str, Any]:
        """Everything that training has changed, as tensors and plain values."""
        return {
            "structure": self.structure,
            "model": self.model.state_dict(),
            "generator": self.generator.get_state(),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Become the learner that gave `state`."""
        self.model = self.build(state["structure"]).to(self.device)
        self.model.load_state_dict(state["model"])
        self.generator.set_state(state["generator"].cpu())

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
