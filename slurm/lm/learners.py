"""The learners of language models. A new learner is an entry in LEARNERS."""

from dataclasses import dataclass


@dataclass(frozen=True)
class LearnerSpec:
    """What a learner trains in each stage, and which models it deploys (evaluates together) after it."""

    help: str
    members: int | None = None
    """Default of --members, the models trained in each stage; None: one model, without that option."""
    joint: bool = False
    """Whether the members are one model to fairseq-train, trained together; else one training each."""
    fresh: bool = False
    """Whether each stage trains new models, with seeds of their own, instead of those of the stage before."""
    deployed: int | None = 1
    """Number of latest stages whose models are deployed; None: all stages."""
    growth: bool = False
    """Whether experts are added between stages (--grow-experts and related options)."""
    switch: bool = False
    """Whether it needs a Switch Transformer as --arch."""

    @property
    def separate(self) -> bool:
        """Whether each stage trains several models separately, in folders member_0, member_1 and so on."""
        return self.members is not None and not self.joint

    @property
    def options(self) -> tuple[str, ...]:
        """Fields of `Request` that this learner has and some others lack."""
        members = ("members",) if self.members is not None else ()
        return members + (("grow_experts", "grow_router", "grow_optimizer") if self.growth else ())


LEARNERS = {
    "sm": LearnerSpec("one model, trained further in each stage"),
    "moe": LearnerSpec("likewise, a mixture with a fixed number of experts", switch=True),
    "ens": LearnerSpec("models trained apart, with averaged probabilities", members=2),
    "umix": LearnerSpec("models trained as one, with averaged logits", members=2, joint=True, switch=True),
    "gens": LearnerSpec("an ensemble that gains a new model in each stage", fresh=True, deployed=None),
    "gmoe": LearnerSpec("a mixture whose experts split between stages", growth=True, switch=True),
}
"""By --learner. Two members, as in most rows of the paper's Table 2."""
