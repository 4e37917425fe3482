"""Ens: N networks with seeds of their own, trained independently; probabilities averaged (section 4.1)."""

from typing import Any

from vision.learners.base import Learner
from vision.models import Backbone


class Ens(Learner):
    """An ensemble. All members see the same minibatches, so their first layer is one product; each keeps
    its own best epoch."""

    def build(self, structure: dict[str, Any]) -> Backbone:
        """A stack of networks, each a voter."""
        return self.backbone(self.settings.members)

    def reset(self, stage: int) -> None:
        """Member 0 starts as `sm` would."""
        for member in range(self.settings.members):
            self.model.reset(self.drawing("init", member, stage), member)

    @property
    def details(self) -> dict[str, Any]:
        """The number of networks."""
        return {"members": self.settings.members}
