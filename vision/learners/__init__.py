"""Registry of the learners. A new learner is a file in this folder and a line in LEARNERS."""

from collections.abc import Mapping
from dataclasses import Field, fields
from typing import Any

from alma.errors import UserError
from alma.options import flag_of
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
    """The settings of all learners by name, each as the first learner that has it defines it."""
    known: dict[str, Field] = {}
    for kind in LEARNERS.values():
        known |= {field.name: field for field in fields(kind.settings_class) if field.name not in known}
    return known


def owners(setting: str) -> list[str]:
    """The learners that have a setting."""
    return [name for name, kind in LEARNERS.items() if setting in kind.settings_class.names()]


def refusal(learner: str, name: str, chosen: Mapping[str, Any]) -> str | None:
    """Why `learner` does not take the setting `name`, one of those `chosen`; None if it does."""
    having = owners(name)
    if not having:
        return f"{name} is not a setting: choose from {', '.join(all_settings())}"
    if learner not in having:
        reason: str | None = f"it is a setting of {', '.join(having)}"
    else:
        reason = LEARNERS[learner].settings_class.conflict(name, chosen)
    return reason and f"{flag_of(name)} does not apply to {learner}: {reason}"


def resolve(
    dataset: str,
    learner: str,
    preset: str | None = None,
    chosen: Mapping[str, Any] | None = None,
    waiting_time: int = 1,
) -> Settings:
    """The settings of a run: the learner's defaults, overridden in turn by those of the data set, the preset,
    a chosen optimizer, and `chosen`. `preset` None: `presets.default_preset`. UserError: an unknown name, a
    value out of range, a chosen setting that the learner does not take."""
    preset = preset or presets.default_preset(dataset)
    for name, known in ((learner, LEARNERS), (preset, presets.PRESETS)):
        if name not in known:
            raise UserError(f"{name!r}: choose from {', '.join(known)}")
    chosen = chosen or {}
    for name in chosen:
        if problem := refusal(learner, name, chosen):
            raise UserError(problem)
    kind = LEARNERS[learner].settings_class
    of_preset = presets.of_preset(preset, dataset, kind, waiting_time)
    if preset == "anytime":  # without what conflicts with a chosen setting
        for name, value in list(of_preset.items()):
            together = {**chosen, name: value}
            if any(kind.conflict(other, together) for other in together):
                del of_preset[name]
    given = presets.OF_DATASET.get(dataset, presets.VGG) | of_preset
    usual = given.get("optimizer", "adadelta")
    optimizer = chosen.get("optimizer", usual)
    if optimizer != usual:
        given |= presets.OF_OPTIMIZER.get(optimizer, {})
    if problem := refusal(learner, "momentum", {"momentum": 0.0, **chosen, "optimizer": optimizer}):
        raise UserError(problem)
    if chosen.get("weights"):
        given["statistics"] = "imagenet"
    given |= chosen
    if optimizer != "sgd" and "nesterov" not in chosen:
        given["nesterov"] = False  # the authors' preset has it for their CIFAR runs, which use SGD
    return kind(**given)
