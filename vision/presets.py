"""Settings of a vision run: the paper's for each dataset, and where its first draft and the authors' released
code differ.

Each field of `Settings` is a flag of `vision/run.py` of the same name, and a line of its --help.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from alma.errors import UserError

LEARNERS = ("sm", "ens", "umix", "gens", "gmoe", "moe", "ff")
DATASETS = ("digits", "mnist", "emnist", "cifar10", "cifar100", "folder")
PRESETS = ("paper", "draft", "authors")
_MIXTURES = ("gmoe", "moe")
_MAYBE_MIXTURES = ("ens", "gens")
"""Their members are mixtures where there are several `experts`."""


def _setting(
    default: Any, text: str, *, choices: tuple[str, ...] | None = None, learners: tuple[str, ...] = LEARNERS
) -> Any:
    return field(default=default, metadata={"help": text, "choices": choices, "learners": learners})


@dataclass(frozen=True)
class Settings:
    """How a learner is built and trained. UserError for a value out of range."""

    arch: str = _setting("mlp", "backbone", choices=("mlp", "vgg"))
    hidden: int = _setting(64, "units of a hidden layer, or channels of a convolution")
    optimizer: str = _setting("adadelta", "optimizer", choices=("adadelta", "sgd"))
    lr: float = _setting(1.0, "learning rate")
    momentum: float = _setting(0.0, "momentum of SGD")
    weight_decay: float = _setting(0.0, "weight decay")
    nesterov: bool = _setting(False, "Nesterov momentum")
    batch_size: int = _setting(128, "examples of a minibatch")
    epochs: int = _setting(100, "epochs of a stage")
    augment: bool = _setting(False, "random crops (padding 4) and flips")
    select: str = _setting(
        "loss", "what the best epoch has least of, on validation", choices=("loss", "error")
    )
    patience: int = _setting(0, "end a stage after this many epochs without a better one (0: never)")
    patience_delta: float = _setting(0.0, "by how much an epoch has to be better than the best so far")
    from_scratch: bool = _setting(
        False,
        "draw all weights anew before every stage",
        learners=tuple(learner for learner in LEARNERS if learner != "gens"),
    )
    members: int = _setting(5, "networks of the ensemble", learners=("ens", "umix"))
    member_order: str = _setting(
        "own",
        "minibatches and augmentation drawn for each member, or shared by all",
        choices=("own", "shared"),
        learners=("ens",),
    )
    umix_average: str = _setting(
        "mean", "what joins the members' logits", choices=("mean", "sum"), learners=("umix",)
    )
    gens_init: str = _setting(
        "new", "what a new member starts from", choices=("new", "copy"), learners=("gens",)
    )
    gens_average: str = _setting(
        "probs", "what is averaged over members", choices=("probs", "logits"), learners=("gens",)
    )
    gate: str = _setting(
        "soft",
        "all experts weighted, or one sampled",
        choices=("soft", "hard"),
        learners=_MIXTURES + _MAYBE_MIXTURES,
    )
    router: str = _setting(
        "tree",
        "binary tree of gates, or one flat softmax",
        choices=("tree", "flat"),
        learners=_MIXTURES + _MAYBE_MIXTURES,
    )
    experts: int = _setting(
        1,
        "experts of a layer at the start; of each member (ens, gens)",
        learners=_MIXTURES + _MAYBE_MIXTURES,
    )
    grow_every: int = _setting(1, "grow before every K-th stage", learners=("gmoe", "ff"))
    grow_by: str = _setting(
        "loss",
        "split the expert of most validation loss, or of most usage",
        choices=("loss", "usage"),
        learners=("gmoe",),
    )
    grow_on: str = _setting(
        "finished",
        "validation data to choose the expert on: of the finished stage, or of the new one",
        choices=("finished", "new"),
        learners=("gmoe",),
    )
    ff_rate: float = _setting(
        0.25, "parameters added by a growth, as a share of the initial ones", learners=("ff",)
    )
    ff_depth: bool = _setting(True, "also grow new layers", learners=("ff",))

    def __post_init__(self) -> None:
        for setting in fields(self):
            value, flag = getattr(self, setting.name), "--" + setting.name.replace("_", "-")
            choices = setting.metadata["choices"]
            if choices and value not in choices:
                raise UserError(f"{flag} {value}: one of {', '.join(choices)}")
            if setting.name in _AT_LEAST_1 and value < 1:
                raise UserError(f"{flag} {value}: at least 1")
            if setting.name in _MORE_THAN_0 and not value > 0:
                raise UserError(f"{flag} {value}: more than 0")
            if setting.type is float and not value >= 0:
                raise UserError(f"{flag} {value}: at least 0")
        if self.patience < 0:
            raise UserError(f"--patience {self.patience}: at least 0")
        if self.nesterov and not (self.optimizer == "sgd" and self.momentum > 0):
            raise UserError("--nesterov needs --optimizer sgd and --momentum above 0")


_AT_LEAST_1 = ("hidden", "batch_size", "epochs", "members", "experts", "grow_every")
_MORE_THAN_0 = ("lr", "ff_rate")
_SGD = {"arch": "vgg", "optimizer": "sgd", "lr": 0.01, "momentum": 0.9, "weight_decay": 1e-4, "augment": True}
_MEGABATCHES = {"digits": 20, "mnist": 500, "emnist": 500, "cifar10": 100, "cifar100": 100, "folder": 100}
_OF_DATASET: dict[str, dict[str, Any]] = {
    "digits": {"hidden": 32},
    "mnist": {},
    "emnist": {},
    "cifar10": _SGD,
    "cifar100": _SGD,
    "folder": _SGD,
}
_OF_LEARNER: dict[str, dict[str, Any]] = {"moe": {"experts": 2}}

_EARLY_STOP = {"select": "error", "patience": 25, "patience_delta": 0.001}
_PATIENT = {"select": "error", "patience": 100, "members": 3}
_NESTEROV = {"nesterov": True}
AUTHORS: dict[str, dict[str, Any]] = {
    "sm": _EARLY_STOP,
    "ens": _PATIENT,
    "umix": _PATIENT | {"umix_average": "sum"},
    "gens": _EARLY_STOP | {"gens_init": "copy", "gens_average": "logits"},
    "gmoe": _EARLY_STOP | _NESTEROV | {"experts": 2, "grow_by": "usage", "grow_on": "new"},
    "moe": _EARLY_STOP,
    "ff": _EARLY_STOP | _NESTEROV | {"ff_rate": 0.6, "ff_depth": False},
}
"""Where the authors' released code differs from the paper, by learner (see README, "Two presets")."""


_DRAFT_ONLY = ("emnist", "cifar100")
_DRAFT_MEGABATCHES = 50
_DRAFT_GROWTH = 5  # mega-batches


def default_preset(dataset: str) -> str:
    """The paper's, or for the data sets that only its first draft has, the draft's."""
    return "draft" if dataset in _DRAFT_ONLY else "paper"


def megabatches(dataset: str, preset: str | None = None) -> int:
    """B for a dataset, by a preset or the default one."""
    drafted = (preset or default_preset(dataset)) == "draft"
    return _DRAFT_MEGABATCHES if drafted and dataset != "digits" else _MEGABATCHES[dataset]


def draft(dataset: str, learner: str, waiting_time: int) -> dict[str, Any]:
    """Where the paper's first draft (arXiv 2106.09563v1) differs from its final version.

    Sections 5 (Models: 4 to 32 units, growth every 5 mega-batches, soft gates on CIFAR), 5.1 (w = 50 waits
    for all), 5.2 and E (two experts at the start), C.1.1 (hard gates on MNIST and EMNIST), C.1.2 (200 epochs
    on CIFAR). How often ff grows it does not say: as gmoe here.
    """
    given: dict[str, Any] = {"hidden": 32}
    if _OF_DATASET[dataset].get("arch") == "vgg":
        given["epochs"] = 200
    elif learner in _MIXTURES + _MAYBE_MIXTURES:
        given["gate"] = "hard"
    if learner == "gmoe":
        given["experts"] = 2
    if learner in ("gmoe", "ff"):
        given["grow_every"] = -(-_DRAFT_GROWTH // waiting_time)  # in stages
    return given


def resolve(
    dataset: str,
    learner: str,
    preset: str | None = None,
    chosen: Mapping[str, Any] | None = None,
    waiting_time: int = 1,
) -> Settings:
    """The settings of a run: the dataset's, the preset's (that of `default_preset` where none is given), then
    those that were `chosen`. Those of the draft depend on the waiting time.

    UserError for an unknown name, and for a setting that is not one of the learner's.
    """
    for name, known in ((dataset, DATASETS), (learner, LEARNERS), (preset or "paper", PRESETS)):
        if name not in known:
            raise UserError(f"{name!r} is not one of {', '.join(known)}")
    chosen, preset = dict(chosen or {}), preset or default_preset(dataset)
    for name in chosen:
        require(learner, name, chosen)
    given = _OF_DATASET[dataset] | _OF_LEARNER.get(learner, {})
    if preset == "authors":
        given |= AUTHORS[learner]
    if preset == "draft":
        given |= draft(dataset, learner, waiting_time)
    given |= chosen
    if given.get("optimizer", "adadelta") != "sgd" and "nesterov" not in chosen:
        given["nesterov"] = False  # of SGD only
    return Settings(**given)


def require(learner: str, name: str, chosen: Mapping[str, Any]) -> None:
    """UserError where `name` is no setting, or not one of the learner's."""
    of = {setting.name: setting.metadata["learners"] for setting in fields(Settings)}
    flag = "--" + name.replace("_", "-")
    if name not in of:
        raise UserError(f"{name} is not a setting; there are {', '.join(of)}")
    if name == "from_scratch" and learner == "gens":
        if chosen[name]:
            raise UserError("--from-scratch: every member of gens is new in its stage; leave it out")
    elif learner not in of[name]:
        raise UserError(f"{flag} is of {', '.join(of[name])}: {learner} has no such setting")
    elif not applies(name, learner, chosen):
        raise UserError(f"{flag}: members of {learner} have gates with --experts 2 or more only")


def applies(name: str, learner: str, chosen: Mapping[str, Any]) -> bool:
    """Whether a learner has a setting, given the others: members without experts have no gates."""
    mixed = learner not in _MAYBE_MIXTURES or chosen.get("experts", 1) > 1
    of = {setting.name: setting.metadata["learners"] for setting in fields(Settings)}
    return learner in of[name] and (mixed or name not in ("gate", "router"))


def of_learner(settings: Settings, learner: str) -> dict[str, Any]:
    """The settings that change this learner's results, for run.json.

    Settings that are newer than some runs are left out where they say what those runs did."""
    values = {s.name: getattr(settings, s.name) for s in fields(settings)}
    written = {name: value for name, value in values.items() if applies(name, learner, values)}
    if learner in _MAYBE_MIXTURES and settings.experts == 1:
        del written["experts"]
    if written.get("member_order") == "shared":
        del written["member_order"]
    if learner == "gens":
        written["from_scratch"] = False
    return written
