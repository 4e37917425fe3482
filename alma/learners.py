"""The table of all learners: what each trains and deploys, and its name and colour in reports.

A learner of images is also a class in `vision/learners/`; one of language models needs only its
entry.
"""

import zlib
from dataclasses import dataclass

DEFAULT_GROWTH = 2  # experts added before each later stage
_EXTENSION_COLOURS = ("#7557C4", "#6B8E00", "#B03A5B", "#5F7A87")


@dataclass(frozen=True)
class LearnerSpec:
    """A learner: which models it trains in each stage, which it deploys, and how reports show it.

    Deployed models are evaluated together, as an ensemble. The fields from `members` on describe
    language models only; learners of images are classes in `vision.learners`.
    """

    help: str
    label: str = ""  # the paper's name; "": the key in LEARNERS
    colour: str = ""  # in every figure and page; "": a colour that depends on the key alone
    text: bool = True  # whether it trains language models too
    members: int | None = None
    """Default of --members, models of a stage; None: one model, without that option."""
    joint: bool = False
    """Whether the members are one model to fairseq-train; else each has a training."""
    fresh: bool = False
    """Whether each stage trains new models with other seeds, instead of the last stage's models."""
    deployed: int | None = 1
    """Number of latest stages whose models are deployed; None: all stages."""
    growth: bool = False
    """Whether experts are added between stages (--grow-experts and related options)."""
    switch: bool = False  # whether it needs a Switch Transformer as --arch

    @property
    def separate(self) -> bool:
        """Whether a stage trains several models separately, in folders member_0, member_1, ..."""
        return self.members is not None and not self.joint

    @property
    def options(self) -> tuple[str, ...]:
        """Options of the launcher that this learner has and some others lack."""
        options: tuple[str, ...] = ()
        if self.members is not None:
            options += ("members",)
        if self.fresh:
            options += ("new_members",)
        if self.growth:
            options += ("grow_experts", "grow_router", "grow_optimizer")
        return options


LEARNERS = {
    "sm": LearnerSpec("one model, trained further in each stage", "SM", "#0072B2"),
    "ens": LearnerSpec(
        "models trained apart, with averaged probabilities", "Ens", "#C84E14", members=2
    ),
    "umix": LearnerSpec(
        "models trained as one, with averaged logits",
        "UMix",
        "#009E73",
        members=2,
        joint=True,
        switch=True,
    ),
    "gens": LearnerSpec(
        "an ensemble that gains a new model in each stage",
        "gEns",
        "#CC79A7",
        fresh=True,
        deployed=None,
    ),
    "gmoe": LearnerSpec(
        "a mixture whose experts split between stages", "gMoE", "#DA9A00", growth=True, switch=True
    ),
    "moe": LearnerSpec("a mixture with a fixed number of experts", "MoE", "#4AA9E0", switch=True),
    "ff": LearnerSpec(
        "a network that grows in width and depth", "FF", "#8A5A33", text=False, growth=True
    ),
}
"""All learners by --learner, in the order of legends, panels and tables.

Ensembles have two members by default, as in most rows of the paper's Table 2. The colours are after
Okabe and Ito, readable on white and dark; colours that a colour-blind reader confuses differ in
lightness.
"""


def text_learners() -> dict[str, LearnerSpec]:
    """The learners of language models."""
    return {name: spec for name, spec in LEARNERS.items() if spec.text}


def label_of(learner: str) -> str:
    """The name of a learner in reports; that of an extension is its key."""
    if learner not in LEARNERS:
        return learner
    return LEARNERS[learner].label or learner


def colour_of(learner: str) -> str:
    """The colour of a learner; that of an extension depends on its key alone."""
    if learner in LEARNERS and LEARNERS[learner].colour:
        return LEARNERS[learner].colour
    return _EXTENSION_COLOURS[zlib.crc32(learner.encode()) % len(_EXTENSION_COLOURS)]
