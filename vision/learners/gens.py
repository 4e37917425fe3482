"""gEns: every stage adds a network and trains it alone; earlier ones stay as they are (section 4.2)."""

from typing import Any

import torch
from torch import Tensor

from vision.flat import aligned
from vision.learners.base import Learner, StageData
from vision.mixture import Mixture
from vision.models import Backbone
from vision.train import EVALUATION_BATCH


class GEns(Learner):
    """A growing ensemble of networks, or of mixtures where there are several `experts`. `model` is the
    newest member; `members` are copies of all trained ones."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.members: list[Backbone | Mixture] = []

    def build(self, structure: dict[str, Any]) -> Backbone | Mixture:
        """One network."""
        return self.mixture(self.settings.experts) if self.settings.experts > 1 else self.backbone()

    def prepare(self, index: int, data: StageData) -> dict[str, float]:
        """The new member: drawn anew, or where the one before it is now."""
        if self.settings.gens_init == "new":
            self.reset(index)
        return {}

    def finish(self) -> None:
        """Keep the new member."""
        self._keep(self.model.state_dict())

    def _keep(self, state: dict[str, Tensor]) -> None:
        member = self.build({}).to(self.device)
        member.load_state_dict(state)
        self.members.append(member.eval())

    def votes(self, images: Tensor) -> Tensor:
        """Logits of all members, (V, C, n); before the first stage, of the untrained network."""
        return torch.cat([member(images) for member in self.members or [self.model]])

    def log_probabilities(self, logits: Tensor) -> Tensor:
        """Of the mean of the members' probabilities, or with `gens_average` "logits" of their logits."""
        if self.settings.gens_average == "logits":
            logits = logits.mean(0, True)
        return super().log_probabilities(logits)

    @torch.no_grad()
    def predict(self, images: Tensor, kept: dict[str, Any]) -> tuple[Tensor, float]:
        """Sums over members are kept, so that a stage costs the evaluation of its own member only."""
        if not self.members:
            return super().predict(images, {})
        images = aligned(images)
        new = self.members[kept.get("members", 0) :]
        for member in new:
            logits = torch.cat([member(part)[0] for part in images.split(EVALUATION_BATCH)], 1)
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
        return super().state() | {"members": [member.state_dict() for member in self.members]}

    def load(self, state: dict[str, Any]) -> None:
        """With all members."""
        super().load(state)
        self.members = []
        for member in state["members"]:
            self._keep(member)

    @property
    def _count(self) -> int:
        return max(1, len(self.members))
