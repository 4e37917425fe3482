"""The defaults of `--task alma_lm`: the paper's training, on 32 GB GPUs.

The defaults are the paper's training (section 5, appendix B.2) on 32 GB GPUs. This module imports
neither torch nor fairseq, so that our commands parse at once.
"""

from collections.abc import Collection
from dataclasses import field
from pathlib import Path
from typing import Any

from alma.options import options_of
from alma.protocol import TextOptions

SCHEDULES = {
    "stage": "polynomial_decay",
    "continuous": "fixed",
}  # --lr-scheduler of each --schedule


def flag(default: Any, text: str) -> Any:
    """A field of a fairseq config: a flag with its default and help."""
    return field(default=default, metadata={"help": text})


def shared(name: str) -> Any:
    """The field of a task option that is also an option of `alma train`: same name, default, help.

    `name` is a field of alma.protocol.TextOptions. If it has no default there, the default is its
    first choice.
    """
    option = options_of(TextOptions)[name]
    default = option.default
    choices = option.metadata["choices"]
    if choices and default is None:
        default = choices[0]
    return flag(default, option.metadata["help"])


def attribute_of(flag_name: str) -> str:
    """The attribute in which argparse keeps the value of a flag: max_update for --max-update."""
    return flag_name[2:].replace("-", "_")


TRAINING: dict[str, object] = {
    "--arch": "switch_gmoe",
    "--batch-size": 8,
    "--update-freq": "3",
    "--max-update": 120_000,
    "--optimizer": "adam",
    "--adam-betas": "(0.9,0.98)",
    "--adam-eps": 1e-8,
    "--lr": "1e-3",
    "--lr-scheduler": "polynomial_decay",
    "--clip-norm": 1.0,
    "--save-interval-updates": 5000,
    "--keep-interval-updates": 1,
    "--no-epoch-checkpoints": True,
    # Blocks are slices of a memory map: fairseq's thread that reads ahead suffices.
    "--num-workers": 0,
}
"""As size base of experiments/table2.yaml, but without worker processes and without --fp16, which
gains nothing on a CPU."""

_SAVING: tuple[str, ...] = ("--save-interval", "--save-interval-updates", "--no-epoch-checkpoints")
_SAVING += ("--keep-interval-updates", "--keep-last-epochs", "--keep-best-checkpoints")

UNLESS = {  # defaults that do not apply if one of these flags is given
    "--batch-size": ("--max-tokens",),
    "--update-freq": ("--max-tokens", "--batch-size"),
    "--save-interval-updates": _SAVING,
    "--keep-interval-updates": _SAVING,
    "--no-epoch-checkpoints": _SAVING,
}

FLAGS = Path(__file__).with_name("flags.yaml")
"""A table of fairseq-train's flags: which survive an interruption, and which are refused."""


def chosen(given_flags: Collection[str], scheduler: str) -> dict[str, object]:
    """The defaults that apply to a command line that has the flags `given_flags`.

    `scheduler` is the default of --lr-scheduler.
    """
    defaults = TRAINING | {"--lr-scheduler": scheduler}
    applicable = {}
    for name, value in defaults.items():
        if name not in given_flags and not set(given_flags).intersection(UNLESS.get(name, ())):
            applicable[name] = value
    return applicable
