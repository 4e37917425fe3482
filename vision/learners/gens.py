"""gEns: a growing ensemble; every stage adds a network and trains that one only (section 4.2)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from alma.options import CHANGED, option
from vision.learners.base import Learner, MixtureSettings
from vision.presets import Settings

if TYPE_CHECKING:
    from torch import Tensor

    from vision.examples import AnyExamples
    from vision.stage_data import StageData


@dataclass(frozen=True)
class GEnsSettings(MixtureSettings):
    """Settings of gens, whose members are mixtures if `experts` > 1 and plain networks
    otherwise."""

    authors = Settings.authors | {"gens_init": "copy", "gens_average": "logits"}

    gens_init: str = option(
        "new", "initial weights of a member: new, or the last one's", choices=("new", "copy")
    )
    new_members: int = option(
        1, "networks that each stage adds, trained together as ens does", at_least=1, record=CHANGED
    )
    gens_average: str = option(
        "probs", "what is averaged over members", choices=("probs", "logits")
    )

    @property
    def own_layers(self) -> bool:  # type: ignore[override]
        """Whether members have several experts."""
        return self.experts > 1

    def config(self) -> dict[str, Any]:
        """As in the base class, but without gate settings if the members are plain networks."""
        written = super().config()
        if self.experts == 1:
            for name in ("gate", "router", "experts"):
                del written[name]
        return written

    @classmethod
    def conflict(cls, name: str, chosen: Mapping[str, Any]) -> str | None:
        if name in ("gate", "router") and chosen.get("experts", 1) == 1:
            return "its members have gates only with --experts 2 or more"
        if name == "new_members" and chosen[name] > 1 and chosen.get("experts", 1) > 1:
            return "a stage adds one mixture"
        if name == "from_scratch" and chosen[name]:
            return "every stage adds a new member; see --gens-init"
        if name == "average" and chosen[name]:
            return "each member is trained in one stage only"
        return super().conflict(name, chosen)


class GEns(Learner):
    """An ensemble that gains a network, or `new_members`, per stage and trains only the new ones.

    `model` is what the newest stage added, `members` are copies of all that stages have added.
    """

    settings_class = GEnsSettings
    settings: GEnsSettings

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.members: list[Any] = []
        # Classes that each member has learned; it gives later classes the probability 0.
        self._classes: list[int] = []

    @property
    def orders(self) -> int:
        """One generator of minibatches per new network."""
        return self.settings.new_members

    def build(self, structure: dict[str, Any]) -> Any:
        """What a stage adds, for structure["classes"] classes if given."""
        classes = structure.get("classes", self.classes)
        experts = self.settings.experts
        if experts > 1:
            return self.mixture(experts, classes)
        return self.backbone(self.settings.new_members, classes=classes)

    def prepare(self, index: int, data: "StageData") -> dict[str, float]:
        """Initialise the new member, with new weights or those of the last member."""
        if self.settings.gens_init == "new":
            self.reset(index)
        return {}

    def finish(self) -> None:
        """Add a copy of the trained network to the members."""
        self._add(self.model.state_dict(), self.classes)

    def _add(self, state: "dict[str, Tensor]", classes: int) -> None:
        """Add a member that has learned `classes` classes, with the weights `state`."""
        member = self.build({"classes": classes}).to(self.device)
        member.load_state_dict(state)
        self.members.append(member.eval())
        self._classes.append(classes)

    def votes(self, model: Any, images: "Tensor") -> "Tensor":
        """Logits (V, C, n) of all members; before the first stage, of `model`."""
        import torch

        members = self.members or [model]
        return torch.cat([self._whole(member(images), -torch.inf) for member in members])

    def _whole(self, scores: "Tensor", value: float) -> "Tensor":
        """Scores (..., C', n) of a member with C' classes, padded to (..., C, n) by `value`."""
        from torch.nn import functional as F

        later_classes = self.classes - scores.shape[-2]
        return F.pad(scores, (0, 0, 0, later_classes), value=value)

    def log_probabilities(self, logits: "Tensor") -> "Tensor":
        """Logits (V, C, n) of the members -> logarithms of the ensemble's probabilities (C, n).

        They come from the mean of the members' probabilities, or of their logits (`gens_average`).
        """
        if self.settings.gens_average == "logits":
            logits = logits.mean(0, True)
        return super().log_probabilities(logits)

    def predict(self, examples: "AnyExamples", cache: dict[str, Any]) -> tuple["Tensor", float]:
        """As in the base class; `cache` keeps the sum of the finished members' scores.

        Each member is then evaluated on `examples` only once.
        """
        from vision.train import evaluate

        if not self.members:
            return super().predict(examples, {})
        new = self.members[cache.get("members", 0) :]
        for member in new:
            logits = evaluate(member, examples)
            scores = logits.softmax(1) if self.settings.gens_average == "probs" else logits
            scores = self._whole(scores.sum(0), 0.0)
            if "sum" in cache:
                scores = self._whole(cache["sum"], 0.0) + scores
            cache["sum"] = scores
        cache["members"] = len(self.members)
        flops = len(examples.labels) * sum(member.flops.inference for member in new)
        return cache["sum"].argmax(0), flops

    @property
    def parameters(self) -> int:
        members = self.members or [self.model]
        return sum(p.numel() for member in members for p in member.parameters())

    @property
    def eval_flops_per_example(self) -> float:
        return sum(member.flops.inference for member in self.members or [self.model])

    @property
    def details(self) -> dict[str, Any]:
        return {"members": self.settings.new_members * max(1, len(self.members))}

    def state(self) -> dict[str, Any]:
        members = [member.state_dict() for member in self.members]
        return super().state() | {"members": members, "classes_of_members": self._classes}

    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        self.members = []
        self._classes = []
        for member, classes in zip(state["members"], state["classes_of_members"], strict=True):
            self._add(member, classes)
