"""Registry of the learners. A new learner is a file in this folder and a line in LEARNERS."""

from collections.abc import Mapping
from dataclasses import Field, fields
from functools import partial
from typing import Any

from alma.errors import UserError
from alma.options import flag_of
from alma.presets import compatible
from vision import presets
from vision.learners.base import Learner
from vision.learners.ens import Ens, UMix
from vision.learners.firefly import Firefly
from vision.learners.gens import GEns
from vision.learners.gmoe import GMoE, MoE
from vision.learners.sm import SM
from vision.presets import Settings

LEARNERS: dict[str, type[Learner]] = {
    "sm": SM,
    "ens": Ens,
    "umix": UMix,
    "gens": GEns,
    "gmoe": GMoE,
    "moe": MoE,
    "ff": Firefly,
}


def all_settings() -> dict[str, Field]:
    """The settings of all learners by name.

    If several learners define a setting, the definition of the first one counts.
    """
    settings: dict[str, Field] = {}
    for kind in LEARNERS.values():
        for field in fields(kind.settings_class):
            settings.setdefault(field.name, field)
    return settings


def owners(setting: str) -> list[str]:
    """The learners that have a setting."""
    return [name for name, kind in LEARNERS.items() if setting in kind.settings_class.names()]


def refusal(learner: str, name: str, chosen: Mapping[str, Any]) -> str | None:
    """The reason why `learner` does not take the setting `name`; None if it takes it.

    `chosen` has all settings that the user gave, by name: some exclude others.
    """
    learners = owners(name)
    if not learners:
        return f"{name} is not a setting: choose from {', '.join(all_settings())}"
    if learner not in learners:
        reason: str | None = f"it is a setting of {', '.join(learners)}"
    else:
        reason = LEARNERS[learner].settings_class.conflict(name, chosen)
    if not reason:
        return None
    return f"{flag_of(name)} does not apply to {learner}: {reason}"


def resolve(
    dataset: str,
    learner: str,
    preset: str | None = None,
    chosen: Mapping[str, Any] | None = None,
    waiting_time: int = 1,
) -> Settings:
    """The settings of a run: the learner's defaults, overridden in turn by those of the data set,
    the preset, a chosen optimizer, and `chosen`.

    `preset` None is `presets.default_preset`. UserError: an unknown name, a value out of range, or
    a chosen setting that the learner does not take.
    """
    preset = preset or presets.default_preset(dataset)
    chosen = chosen or {}
    if learner not in LEARNERS:
        raise UserError(f"{learner!r}: choose from {', '.join(LEARNERS)}")
    if preset not in presets.PRESETS:
        raise UserError(f"{preset!r}: choose from {', '.join(presets.PRESETS)}")
    for name in chosen:
        _check(learner, name, chosen)
    kind = LEARNERS[learner].settings_class
    of_preset = presets.differences(preset, dataset, kind, waiting_time)
    if preset == "anytime":
        of_preset = compatible(of_preset, chosen, partial(_contradicts, kind))
    settings = presets.OF_DATASET.get(dataset, presets.VGG) | of_preset
    default_optimizer = settings.get("optimizer", "adadelta")
    optimizer = chosen.get("optimizer", default_optimizer)
    if optimizer != default_optimizer:
        settings |= presets.OF_OPTIMIZER.get(optimizer, {})
    _check(learner, "momentum", {"momentum": 0.0, **chosen, "optimizer": optimizer})
    if chosen.get("weights"):
        settings["statistics"] = "imagenet"
    settings |= chosen
    if optimizer != "sgd" and "nesterov" not in chosen:
        settings["nesterov"] = False  # the authors' preset has it for their CIFAR runs, with SGD
    return kind(**settings)


def _contradicts(kind: type[Settings], _: str, together: Mapping[str, Any]) -> bool:
    """Whether one of the settings `together` has no effect beside the others."""
    return any(kind.conflict(name, together) for name in together)


def _check(learner: str, name: str, chosen: Mapping[str, Any]) -> None:
    """Raise a UserError if `learner` does not take the setting `name`."""
    problem = refusal(learner, name, chosen)
    if problem:
        raise UserError(problem)
