"""gEns: every stage adds a network and trains it alone; earlier ones stay as they are (section 4.2)."""

from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from vision.learners.base import Learner, StageData
from vision.models import Backbone
from vision.train import EVALUATION_BATCH


class GEns(Learner):
    """A growing ensemble. `model` is the newest member; `members` holds the weights of all trained ones."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.members: list[dict[str, Tensor]] = []

    def build(self, structure: dict[str, Any]) -> Backbone:
        """One network."""
        return self.backbone()

    def prepare(self, index: int, data: StageData) -> dict[str, float]:
        """The new member: drawn anew, or where the one before it is now."""
        if self.settings.gens_init == "new":
            self.reset(index)
        return {}

    def train(self, index: int, data: StageData, *arguments: Any, **options: Any) -> dict[str, float]:
        """Train the new member, and keep it."""
        flops = super().train(index, data, *arguments, **options)
        self.members.append({name: value.clone() for name, value in self.model.state_dict().items()})
        return flops

    @torch.no_grad()
    def predict(self, images: Tensor, kept: dict[str, Any]) -> tuple[Tensor, float]:
        """Sums over members are kept, so that a stage costs the evaluation of its own member only."""
        if not self.members:
            return super().predict(images, {})
        self.model.eval()
        new = self.members[kept.get("members", 0) :]
        for member in new:
            parts = [functional_call(self.model, member, part)[0] for part in images.split(EVALUATION_BATCH)]
            logits = torch.cat(parts, 1)
            kept["sum"] = kept.get("sum", 0) + (
                logits.softmax(0) if self.settings.gens_average == "probs" else logits
            )
        kept["members"] = len(self.members)
        return kept["sum"].argmax(0), len(new) * len(images) * self.model.flops.inference

    @property
    def parameters(self) -> int:
        """Of all members."""
        return self._count * super().parameters

    @property
    def eval_flops_per_example(self) -> float:
        """Of all members."""
        return self._count * super().eval_flops_per_example

    @property
    def details(self) -> dict[str, Any]:
        """The number of networks."""
        return {"members": self._count}

    def state(self) -> dict[str, Any]:
        """With all members."""
        return super().state() | {"members": self.members}

    def load(self, state: dict[str, Any]) -> None:
        """With all members."""
        super().load(state)
        self.members = [
            {name: value.to(self.device) for name, value in member.items()} for member in state["members"]
        ]

    @property
    def _count(self) -> int:
        return max(1, len(self.members))
