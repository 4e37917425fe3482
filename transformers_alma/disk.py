"""Bytes on the disk that a stage keeps, and that its training needs while it runs."""

from typing import Any

import torch
from transformers import PreTrainedConfig

from alma import averages
from transformers_alma.arguments import Arguments

_FP32 = 4
_STATES = {"sgd": 0, "adafactor": 0, "adagrad": 1, "rmsprop": 1, "lion": 1}
"""Numbers that an optimizer keeps for each weight, by the beginning of its name; others keep 2."""


def disk_use(
    arguments: Arguments, config: PreTrainedConfig, whole: int, trained: int
) -> dict[str, int]:
    """For the plan: `model_bytes` and `checkpoint_bytes`, and the number of checkpoints.

    whole, trained: parameters of the model, and those that are trained. While a training writes a
    checkpoint, it has one more than it keeps.
    """
    engine = arguments.engine
    width = _FP32 if engine.lora else _width(engine.dtype, config)
    model = trained * width if engine.lora else whole * width
    checkpoint = model + _states(arguments.training["optim"]) * trained * width
    if averages.read(engine.average):
        checkpoint += trained * _FP32
        model *= 2  # and the weights from which the next stage goes on
    return {
        "model_bytes": model,
        "checkpoint_bytes": checkpoint,
        "checkpoints": arguments.training["save_total_limit"] + 1,
    }


def _width(dtype: str, config: PreTrainedConfig) -> int:
    """Bytes of a weight."""
    kind: Any = config.dtype if dtype == "auto" else getattr(torch, dtype)
    return (kind or torch.float32).itemsize


def _states(optimizer: str) -> int:
    for name, count in _STATES.items():
        if str(optimizer).startswith(name):
            return count
    return 2
