"""Ens: N networks with seeds of their own, trained independently; probabilities averaged (section 4.1)."""

from typing import Any

from vision.learners.base import Learner
from vision.mixture import Committee
from vision.models import Backbone


class Ens(Learner):
    """An ensemble of networks, or of mixtures where there are several `experts`. Members are computed
    together; each has its own order of minibatches (or all the same one, by `member_order`), and keeps its
    own best epoch."""

    @property
    def orders(self) -> int:  # type: ignore[override]
        """One for each member, or one for all."""
        return self.settings.members if self.settings.member_order == "own" else 1

    def build(self, structure: dict[str, Any]) -> Backbone | Committee:
        """A stack of networks, each a voter."""
        members, experts = self.settings.members, self.settings.experts
        if experts > 1:
            return Committee([self.mixture(experts) for _ in range(members)])
        return self.backbone(members)

    def reset(self, stage: int) -> None:
        """Member 0 starts as `sm` would."""
        for member in range(self.settings.members):
            self.model.reset(self.drawing("init", member, stage), member)

    @property
    def details(self) -> dict[str, Any]:
        """The number of networks."""
        return {"members": self.settings.members}
