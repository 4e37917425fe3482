"""UMix: N networks trained together as one model that averages their logits (section 4.1)."""

from typing import Any

from vision.learners.ens import Ens
from vision.models import Backbone


class UMix(Ens):
    """A uniform mixture: one voter of all members, trained as one network."""

    orders = 1

    def build(self, structure: dict[str, Any]) -> Backbone:
        """A stack of networks with one output."""
        return self.backbone(self.settings.members, joint=self.settings.umix_average)
