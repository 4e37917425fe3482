"""UMix: a uniform mixture of networks that averages their logits (section 4.1)."""

from dataclasses import dataclass
from typing import Any

from vision.learners.base import Learner
from vision.learners.ens import MemberSettings
from vision.models import Backbone
from vision.presets import setting


@dataclass(frozen=True)
class UMixSettings(MemberSettings):
    authors = MemberSettings.authors | {"umix_average": "sum"}

    umix_average: str = setting("mean", "how the members' logits are combined", choices=("mean", "sum"))


class UMix(Learner):
    """An ensemble that averages logits, trained jointly as one network with one loss."""

    settings_class = UMixSettings
    settings: UMixSettings

    def build(self, structure: dict[str, Any]) -> Backbone:
        """A stack of networks with one output."""
        return self.backbone(self.settings.members, joint=self.settings.umix_average)

    @property
    def details(self) -> dict[str, Any]:
        """Number of networks."""
        return {"members": self.settings.members}
