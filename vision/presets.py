"""Settings of a vision run: ranges and help of each, defaults of each data set, presets.

Each field of `Settings`, and of the subclass that belongs to a learner, is a flag of
`vision/run.py` of the same name. The presets are those of the paper, of its first draft, of the
authors' released code, and `anytime`, at a tenth of the paper's compute or, with a VGG, three
tenths; docs/results/average.md says how its settings were chosen.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

from alma import averages
from alma.errors import UserError, closest
from alma.files import sha256_file
from alma.options import CHANGED, NEVER, check_ranges, option, recorded
from alma.presets import compatible, contradicts_replay
from vision.alpha import BACKGROUND, check_background

DATASETS = ("digits", "mnist", "emnist", "cifar10", "cifar100", "folder")
PRESETS = ("paper", "draft", "authors", "anytime")
OF_OPTIMIZER: dict[str, dict[str, Any]] = {
    "adadelta": {"lr": 1.0, "momentum": 0.0},
    "sgd": {"lr": 0.01, "momentum": 0.9},
    "adam": {"lr": 0.001, "momentum": 0.0},
    "adamw": {"lr": 0.001, "momentum": 0.0, "weight_decay": 0.01},
}
"""Default settings of each optimizer, used if the user chooses it instead of the data set's."""
TORCHVISION = "torchvision:"
"""Prefix of --arch for a classifier of torchvision."""
OWN = "own:"
"""Prefix of --arch for the network of `run(backbone=...)`."""


def _arch(value: str) -> str:
    """A value of --arch. ValueError: it is unknown."""
    if value.startswith(OWN):
        return value
    choices = ["mlp", "vgg"]
    if value.startswith(TORCHVISION):
        from torchvision import models

        choices = [TORCHVISION + name for name in models.list_models(module=models)]
    if value in choices:
        return value
    near = closest(value, choices) or f"{TORCHVISION}resnet18"
    raise ValueError(f"{value}: choose from mlp, vgg, or {TORCHVISION}NAME such as {near}")


def _file(value: str) -> str:
    """The path of a file. ValueError: it is none."""
    if not Path(value).is_file():
        raise ValueError(f"{value}: there is no such file")
    return value


@dataclass(frozen=True)
class Settings:
    """Settings that all learners share; a learner with further ones adds them in a subclass.

    UserError for a value out of range.
    """

    authors: ClassVar[dict[str, Any]] = {"select": "error", "patience": 25, "patience_delta": 0.001}
    """Where the authors' released code differs from the paper."""
    draft: ClassVar[dict[str, Any]] = {}
    """Where the first draft differs for this learner; `differences` adds the general ones."""

    own_layers: ClassVar[bool] = False
    """Whether the model needs ALMA's own layers, which grow or have gates."""

    arch: str = option(
        "mlp",
        "backbone: mlp, vgg, or a classifier of torchvision by its name, such as "
        f"{TORCHVISION}resnet18",
        read=_arch,
        metavar="ARCH",
    )
    hidden: int = option(
        64, "units of a hidden layer, or channels of a convolution", at_least=1, metavar="H"
    )
    weights: str | None = option(
        None,
        f"with --arch {TORCHVISION}NAME: initial weights, a state_dict in a file; the layer of the "
        "classes starts at random if their numbers differ",
        read=_file,
        metavar="FILE",
        record=NEVER,
    )
    statistics: str = option(
        "data",
        "mean and deviation that normalise pixels: of the training images, or ImageNet's, the "
        "default with --weights",
        choices=("data", "imagenet"),
        record=CHANGED,
    )
    optimizer: str = option("adadelta", "optimizer", choices=tuple(OF_OPTIMIZER))
    lr: float = option(1.0, "learning rate", above=0)
    lr_scheduler: str = option(
        "constant",
        "learning rate within a stage, set every epoch: constant, or a decay towards 0",
        choices=("constant", "linear", "cosine"),
        record=CHANGED,
    )
    momentum: float = option(0.0, "momentum of SGD")
    weight_decay: float = option(0.0, "weight decay")
    nesterov: bool = option(False, "Nesterov momentum")
    batch_size: int = option(128, "examples per minibatch", at_least=1)
    amp: str = option(
        "off",
        "automatic mixed precision of training; weights and tests are fp32",
        choices=("off", "bf16"),
        record=CHANGED,
    )
    no_tf32: bool = option(
        False,
        "compute products and convolutions of fp32 in full, also on GPUs that have TF32",
        record=CHANGED,
    )
    epochs: int = option(100, "epochs per stage", at_least=1)
    augment: bool = option(False, "random crops (padding 4) and flips")
    select: str = option(
        "loss",
        "validation metric that selects the best epoch; last: the last epoch, without selection",
        choices=("loss", "error", "last"),
    )
    patience: int = option(0, "end a stage after this many epochs without improvement (0: never)")
    patience_delta: float = option(
        0.0, "smallest decrease of the validation metric that is an improvement"
    )
    from_scratch: bool = option(False, "draw new weights before every stage (gens has --gens-init)")
    average: float | str = option(
        0.0,
        "average of the weights that is tested: a decay, over stages (0: off), or poly:ETA, over "
        "epochs",
        read=averages.read,
        metavar="AVERAGE",
        record=CHANGED,
    )

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.nesterov and not (self.optimizer == "sgd" and self.momentum > 0):
            raise UserError("--nesterov needs --optimizer sgd and --momentum above 0")
        if self.momentum >= 1:
            raise UserError(f"--momentum {self.momentum}: below 1, or steps grow without end")
        if self.whole and self.own_layers:
            whose = "torchvision" if self.torchvision else "yours"
            reason = f"--arch {self.arch}: a model of {whose} neither grows nor has experts"
            raise UserError(f"{reason}; choose --arch mlp or vgg, or another learner")

    @property
    def whole(self) -> bool:
        """Whether the backbone is a network of torchvision or of the user, without ALMA's
        layers."""
        return ":" in self.arch

    @property
    def torchvision(self) -> str:
        """The name of a classifier of torchvision; "" for other backbones."""
        if not self.arch.startswith(TORCHVISION):
            return ""
        return self.arch.removeprefix(TORCHVISION)

    @classmethod
    def names(cls) -> list[str]:
        """Names of all fields."""
        return [field.name for field in fields(cls)]

    @classmethod
    def conflict(cls, name: str, chosen: Mapping[str, Any]) -> str | None:
        """Why the setting `name` has no effect with the others in `chosen`; None if it has."""
        value = chosen[name]
        arch = chosen.get("arch", "")
        optimizer = chosen.get("optimizer", "sgd")
        if name == "average" and value and chosen.get("from_scratch"):
            return (
                "--from-scratch draws new weights, and weights of unrelated models have no average"
            )
        if name == "patience" and value and chosen.get("select") == "last":
            return "--select last does not ask which epoch is best"
        if name == "momentum" and value and optimizer != "sgd":
            return f"{optimizer.capitalize()} has none"
        if name == "hidden" and ":" in arch:
            return f"{arch} has sizes of its own"
        if name == "weights" and value and not arch.startswith(TORCHVISION):
            return f"it needs --arch {TORCHVISION}NAME"
        return None

    def config(self) -> dict[str, Any]:
        """The settings that affect results, for run.json; `weights` is a hash of the file."""
        written = recorded(self)
        if self.whole:
            del written["hidden"]
        if self.weights:
            written["weights"] = sha256_file(self.weights)[:16]
        return written


VGG = {
    "arch": "vgg",
    "optimizer": "sgd",
    "lr": 0.01,
    "momentum": 0.9,
    "weight_decay": 1e-4,
    "augment": True,
}
"""Default settings of `folder` and of users' data sets."""
OF_DATASET: dict[str, dict[str, Any]] = {"digits": {"hidden": 32}, "mnist": {}, "emnist": {}}
OF_DATASET |= {"cifar10": VGG, "cifar100": VGG}
"""Settings of each data set that differ from the defaults (appendix B.1)."""
ANYTIME: dict[str, Any] = {"epochs": 10, "select": "last", "average": "poly:8"}
"""Settings of --preset anytime for learners that take them."""
SCENARIOS = ("classes", "rotated", "permuted")
"""Streams that drift; see `scenarios.make_stream`."""
SCENARIO_MEGABATCHES = 5
_MEGABATCHES = {"digits": 20, "mnist": 500, "emnist": 500, "cifar10": 100, "cifar100": 100}
SIZES = {"digits": (1, 8, 1437, 360, 10), "mnist": (1, 28, 60_000, 10_000, 10)}
SIZES |= {"emnist": (1, 28, 112_800, 18_800, 47)}
SIZES |= {f"cifar{classes}": (3, 32, 50_000, 10_000, classes) for classes in (10, 100)}
"""Channels, height and width, training images, test images and classes of each data set."""


def default_preset(dataset: str) -> str:
    """The default preset of a data set: paper, or draft for data sets that only the draft has."""
    return "draft" if dataset in ("emnist", "cifar100") else "paper"


def differences(
    preset: str, dataset: str, kind: type[Settings], waiting_time: int
) -> dict[str, Any]:
    """The settings in which a preset differs from the paper, for learners with settings of the
    class `kind`.

    The first draft (arXiv 2106.09563v1): sections 5 (Models: 4 to 32 units, growth every 5
    mega-batches, soft gates on CIFAR), 5.1 (w = 50 waits for the whole stream), 5.2 and E (two
    experts at the start), C.1.1 (hard gates on MNIST and EMNIST), C.1.2 (200 epochs on CIFAR). It
    leaves open how often ff grows; we take the value of gmoe.
    """
    if preset == "paper":
        return {}
    if preset == "authors":
        return dict(kind.authors)
    is_vgg = OF_DATASET.get(dataset, VGG).get("arch") == "vgg"
    if preset == "anytime":
        if dataset == "digits":  # 10 epochs in each of 20 stages would be 200 updates in all
            return ANYTIME | {"epochs": 100}
        if is_vgg:
            return ANYTIME | {"epochs": 30}
        return dict(ANYTIME)
    of_draft: dict[str, Any] = {"hidden": 32, **kind.draft}
    if is_vgg:
        of_draft["epochs"] = 200
    elif "gate" in kind.names():
        of_draft["gate"] = "hard"
    if "grow_every" in kind.names():
        of_draft["grow_every"] = math.ceil(5 / waiting_time)  # 5 mega-batches, in stages
    return of_draft


def replay_share(preset: str | None, replay: bool) -> float:
    """The default share of replay under a preset; 0 with `replay` of all earlier mega-batches."""
    values = {"replay_share": 0.9} if preset == "anytime" else {}
    of_preset = compatible(values, {"replay": replay}, contradicts_replay)
    return of_preset.get("replay_share", 0.0)


def megabatches(dataset: str, preset: str | None = None, scenario: str | None = None) -> int:
    """Number of mega-batches B of a data set under a preset (None: its default preset), or of a
    scenario."""
    if scenario:
        return SCENARIO_MEGABATCHES
    drafted = (preset or default_preset(dataset)) == "draft"
    return 50 if drafted and dataset != "digits" else _MEGABATCHES.get(dataset, 100)


def check_dataset(
    name: str,
    image_size: int | None,
    resize_size: int | None,
    cache_images: str | None = None,
    background: str = BACKGROUND,
    skip_unreadable: bool = False,
    **_: Any,
) -> None:
    """Raise a UserError if these arguments of `data.load` contradict one another."""
    if name not in DATASETS:
        raise UserError(f"--dataset {name}: choose from {', '.join(DATASETS)}")
    if cache_images is not None and name != "folder":
        raise UserError(
            f"--cache-images needs --dataset folder: the images of {name} are read into memory"
        )
    if skip_unreadable and name != "folder":
        raise UserError("--skip-unreadable needs --dataset folder, or --by")
    if background != BACKGROUND and name != "folder":
        raise UserError(f"--background needs --dataset folder, or --by: {name} has no alpha")
    check_background(background)
    if image_size is not None and image_size < 1:
        raise UserError(f"--image-size {image_size}: at least 1")
    if resize_size is not None and resize_size < (image_size or resize_size + 1):
        raise UserError(f"--resize-size {resize_size}: at least --image-size, which it needs")


def check_megabatches(number: int, images: int, classes: int = 0) -> None:
    """Raise a UserError if `images` or `classes` are too few for `number` mega-batches.

    `images` are those for training; `classes` are those that --scenario classes divides, else 0.
    """
    if classes:
        most = classes
        divided = f"{classes} classes"
        reason = ""
    else:
        most = images // 2
        divided = f"{images} training images"
        reason = ", so that each has an image for training and one for validation"
    if not 1 <= number <= most:
        choice = f"choose 1 to {most}" if most else "give more"
        raise UserError(f"{number} mega-batches of {divided}: {choice}{reason}")


def check_seed(seed: int) -> None:
    """Raise a UserError if the seed is out of NumPy's range."""
    if not 0 <= seed < 2**32:
        raise UserError(f"--seed {seed}: from 0 to {2**32 - 1}")
