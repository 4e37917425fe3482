"""The configuration that `accelerate launch` gets: ours, or the file of --accelerate_config.

Without one it would read that of `accelerate config` in the user's home.
"""

from pathlib import Path
from typing import Any

import yaml

from alma.errors import UserError

_KINDS = ("NO", "MULTI_GPU", "MULTI_CPU", "FSDP")
"""Values of distributed_type with which each process has the whole model, or FSDP's share of it."""
_OURS = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "MULTI_GPU",
    "mixed_precision": "no",
    "use_cpu": False,
    "debug": False,
    "num_machines": 1,
    "num_processes": 1,
    "machine_rank": 0,
}


def read(file: str) -> dict[str, Any]:
    """The contents of a file of --accelerate_config. UserError: none, or of another kind."""
    flag = f"--accelerate_config {file}"
    try:
        config = yaml.safe_load(Path(file).read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        problem = " ".join(str(error).split())
        raise UserError(f"{flag}: {problem}: make it by `accelerate config`") from error
    if not isinstance(config, dict):
        raise UserError(f"{flag}: no YAML mapping: make it by `accelerate config`")
    kind = config.get("distributed_type", "NO")
    if kind not in _KINDS:
        raise UserError(f"{flag}: distributed_type {kind}: give one of {', '.join(_KINDS)}")
    environment = config.get("compute_environment", "LOCAL_MACHINE")
    if environment != "LOCAL_MACHINE":
        raise UserError(f"{flag}: compute_environment {environment}: give LOCAL_MACHINE")
    return config


def check(file: str, training: dict[str, Any]) -> None:
    """UserError: the file, or it contradicts flags of TrainingArguments."""
    config = read(file)
    flag = f"--accelerate_config {file}"
    precision = str(config.get("mixed_precision") or "no")
    if precision not in ("no", precision_of(training)):
        problem = f"its mixed_precision is {precision}, which an evaluation would not have"
        raise UserError(f"{flag}: {problem}: give --{precision} too, or set it to no")
    if training["fsdp"] and config.get("distributed_type") == "FSDP":
        raise UserError(f"{flag}: it has FSDP: leave out --fsdp")


def is_sharded(file: str | None, training: dict[str, Any]) -> bool:
    """Whether each process has a share of the weights (FSDP)."""
    if training["fsdp"]:
        return True
    return file is not None and read(file).get("distributed_type") == "FSDP"


def precision_of(training: dict[str, Any]) -> str:
    """Mixed precision of the flags, as accelerate names it."""
    for precision in ("bf16", "fp16"):
        if training[precision]:
            return precision
    return "no"


def write_default(place: Path) -> Path:
    """A configuration in which every process has the whole model."""
    file = place / "accelerate.yaml"
    file.write_text(yaml.safe_dump(_OURS))
    return file
