"""Ensembles of a fixed number of networks (section 4.1). Ens averages the probabilities of independently
trained networks; UMix, a uniform mixture, averages the logits of jointly trained ones."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from alma.options import CHANGED, option
from vision.learners.base import Learner
from vision.presets import Settings

if TYPE_CHECKING:
    from torch import Tensor

    from vision.data import StageData


@dataclass(frozen=True)
class MemberSettings(Settings):
    """Settings of ensembles of a fixed number of networks."""

    authors: ClassVar = {"select": "error", "patience": 100, "members": 3}

    members: int = option(5, "networks of the ensemble", at_least=1)


@dataclass(frozen=True)
class EnsSettings(MemberSettings):
    member_order: str = option(
        "own", "order of minibatches and augmentation: one per member, or shared", choices=("own", "shared")
    )
    combine: str = option(
        "mean",
        "prediction: from the mean of the members' probabilities, or by majority vote; ties go to the mean",
        choices=("mean", "vote"),
        record=CHANGED,
    )
    bootstrap: bool = option(
        False,
        "bagging: each member trains on its own resample of each mega-batch, of equal size, with replacement",
        record=CHANGED,
    )

    @classmethod
    def conflict(cls, name: str, chosen: Mapping[str, Any]) -> str | None:
        if name == "bootstrap" and chosen[name] and chosen.get("member_order") == "shared":
            return "--member-order shared gives all members the same minibatches"
        return super().conflict(name, chosen)


class Ens(Learner):
    """An ensemble of networks, trained independently on the same data.
    Members are computed together. Each has initial weights and by default an order of minibatches of its
    own, and keeps its own best epoch. Member 0 starts as `sm` does. Bagging and majority vote are those of
    section 4.2, footnote 2."""

    settings_class = EnsSettings
    settings: EnsSettings

    @property
    def orders(self) -> int:
        """One per member, or one shared by all."""
        return self.settings.members if self.settings.member_order == "own" else 1

    def build(self, structure: dict[str, Any]) -> Any:
        return self.backbone(self.settings.members)

    def resamples(self, index: int, data: "StageData") -> "Tensor | None":
        """With `bootstrap`, indices (M, n) of each member's training examples: each mega-batch resampled with
        replacement, at its own size. A replayed mega-batch keeps the resample of its own stage."""
        if not self.settings.bootstrap:
            return None
        import torch

        sizes, drawn = data.sizes(index), []
        for member in range(self.settings.members):
            start = 0
            for t, size in sizes.items():
                generator = self.generator_for("bootstrap", member, t)
                drawn.append(start + torch.randint(size, (size,), generator=generator))
                start += size
        return torch.cat(drawn).view(self.settings.members, -1)

    def scores(self, logits: "Tensor") -> "Tensor":
        """As the base class; with `combine` "vote", minus infinity for classes without the most votes."""
        means = super().scores(logits)
        if self.settings.combine == "mean":
            return means
        import torch
        from torch.nn import functional as F

        votes = F.one_hot(logits.argmax(1), self.classes).sum(0).t()  # (C, n)
        return means.where(votes == votes.amax(0), -torch.inf)

    def choice(self, logits: "Tensor", log_probabilities: "Tensor") -> "Tensor":
        if self.settings.combine == "mean":
            return super().choice(logits, log_probabilities)
        return self.scores(logits).argmax(0)


@dataclass(frozen=True)
class UMixSettings(MemberSettings):
    authors = MemberSettings.authors | {"umix_average": "sum"}

    umix_average: str = option("mean", "how the members' logits are combined", choices=("mean", "sum"))


class UMix(Learner):
    """An ensemble that averages logits, trained jointly as one network with one loss."""

    settings_class = UMixSettings
    settings: UMixSettings

    def build(self, structure: dict[str, Any]) -> Any:
        return self.backbone(self.settings.members, joint=self.settings.umix_average)
