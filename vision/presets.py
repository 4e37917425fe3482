"""Settings of a vision run: the paper's for each dataset, and where the authors' released code differs.

Each field of `Settings` is a flag of `vision/run.py` of the same name, and a line of its --help.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from alma.errors import UserError

LEARNERS = ("sm", "ens", "umix", "gens", "gmoe", "moe", "ff")
DATASETS = ("digits", "mnist", "emnist", "cifar10", "cifar100", "folder")
_MIXTURES = ("gmoe", "moe")


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
    from_scratch: bool = _setting(False, "draw all weights anew before every stage")
    members: int = _setting(5, "networks of the ensemble", learners=("ens", "umix"))
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
        "soft", "all experts weighted, or one sampled", choices=("soft", "hard"), learners=_MIXTURES
    )
    router: str = _setting(
        "tree", "binary tree of gates, or one flat softmax", choices=("tree", "flat"), learners=_MIXTURES
    )
    experts: int = _setting(1, "experts of a layer at the start", learners=_MIXTURES)
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


def megabatches(dataset: str) -> int:
    """The paper's B for a dataset."""
    return _MEGABATCHES[dataset]


def resolve(
    dataset: str, learner: str, preset: str = "paper", chosen: Mapping[str, Any] | None = None
) -> Settings:
    """The settings of a run: the dataset's, the preset's, then those that were `chosen`.

    UserError for an unknown name, and for a setting that is not one of the learner's.
    """
    for name, known in ((dataset, DATASETS), (learner, LEARNERS), (preset, ("paper", "authors"))):
        if name not in known:
            raise UserError(f"{name!r} is not one of {', '.join(known)}")
    chosen = dict(chosen or {})
    allowed = {setting.name: setting.metadata["learners"] for setting in fields(Settings)}
    for name in chosen:
        if name not in allowed:
            raise UserError(f"{name} is not a setting; there are {', '.join(allowed)}")
        if learner not in allowed[name]:
            raise UserError(
                f"--{name.replace('_', '-')} is of {', '.join(allowed[name])}: {learner} has no such setting"
            )
    given = _OF_DATASET[dataset] | _OF_LEARNER.get(learner, {})
    if preset == "authors":
        given |= AUTHORS[learner]
    given |= chosen
    if given.get("optimizer", "adadelta") != "sgd" and "nesterov" not in chosen:
        given["nesterov"] = False  # of SGD only
    return Settings(**given)


def of_learner(settings: Settings, learner: str) -> dict[str, Any]:
    """The settings that change this learner's results, for run.json."""
    return {s.name: getattr(settings, s.name) for s in fields(settings) if learner in s.metadata["learners"]}
