"""Ensembles of a fixed number of networks (section 4.1).

Ens averages the probabilities of independently trained networks; UMix, a uniform mixture, averages
the logits of jointly trained ones.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from alma.options import option
from vision.learners.base import Learner
from vision.presets import Settings


@dataclass(frozen=True)
class MemberSettings(Settings):
    """Settings of ensembles of a fixed number of networks."""

    authors: ClassVar = {"select": "error", "patience": 100, "members": 3}

    members: int = option(5, "networks of the ensemble", at_least=1)


@dataclass(frozen=True)
class EnsSettings(MemberSettings):
    member_order: str = option(
        "own",
        "order of minibatches and augmentation: one per member, or shared",
        choices=("own", "shared"),
    )


class Ens(Learner):
    """An ensemble of networks, trained independently on the same data.

    Members are computed together. Each has its own initial weights and best epoch and, by default,
    its own order of minibatches. Member 0 starts as `sm` does.
    """

    settings_class = EnsSettings
    settings: EnsSettings

    @property
    def orders(self) -> int:
        """One generator per member or, by `member_order`, one shared by all."""
        return self.settings.members if self.settings.member_order == "own" else 1

    def build(self, structure: dict[str, Any]) -> Any:
        return self.backbone(self.settings.members)


@dataclass(frozen=True)
class UMixSettings(MemberSettings):
    authors = MemberSettings.authors | {"umix_average": "sum"}

    umix_average: str = option(
        "mean", "how the members' logits are combined", choices=("mean", "sum")
    )


class UMix(Learner):
    """An ensemble that averages logits, trained jointly as one network with one loss."""

    settings_class = UMixSettings
    settings: UMixSettings

    def build(self, structure: dict[str, Any]) -> Any:
        return self.backbone(self.settings.members, joint=self.settings.umix_average)
