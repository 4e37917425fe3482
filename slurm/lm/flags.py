"""Flags for fairseq-train: as a user gives them, and what fairseq makes of them."""

import json
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from alma.errors import UserError
from slurm.engine import children as child

Flags = Mapping[str, Sequence[str]]
"""Flags by name: the words of each as they were given, its name included."""
Settings = Mapping[str, Any]
"""All flags of fairseq-train by name (the first, where a flag has several), with the values that hold."""

_EVERY_STAGE = "leave it out, the launcher sets it for every stage"
_LAUNCHERS = {
    "--save-dir": "give --out RUN before the `--`",
    "--task": "leave it out, it is always alma_lm",
    "--stage": _EVERY_STAGE,
    "--finetune-from-model": _EVERY_STAGE,
    "--restore-file": _EVERY_STAGE,
    **{
        flag: f"give {flag} before the `--`"
        for flag in (
            "--waiting-time",
            "--replay",
            "--seed",
            "--members",
            "--grow-experts",
            "--grow-router",
            "--grow-optimizer",
        )
    },
}
MAIN = (
    "--arch",
    "--optimizer",
    "--lr",
    "--lr-scheduler",
    "--warmup-updates",
    "--tokens-per-sample",
    "--max-tokens",
    "--batch-size",
    "--update-freq",
    "--max-update",
    "--max-epoch",
)
"""What tells most of a training."""
_NOTHING: tuple[Any, ...] = (None, False, 0, "", [])
COMMON = (
    *MAIN,
    "--max-sentences",
    "--total-num-update",
    "--adam-betas",
    "--adam-eps",
    "--weight-decay",
    "--clip-norm",
    "--criterion",
    "--dropout",
    "--attention-dropout",
    "--decoder-layers",
    "--decoder-embed-dim",
    "--decoder-attention-heads",
    "--moe-expert-count",
    "--moe-freq",
    "--save-interval-updates",
    "--keep-interval-updates",
    "--no-epoch-checkpoints",
    "--num-workers",
    "--cpu",
    "--fp16",
    "--bf16",
    "--ddp-backend",
    "--distributed-world-size",
    "--log-interval",
    "--megabatch-words",
    "--megabatch-tokens",
)
"""Those that are given most, which the launcher knows without asking fairseq."""


def read_flags(words: Sequence[str]) -> Flags:
    """The words of a command line by flag. UserError: no flag, or one that the launcher sets itself."""
    flags: dict[str, list[str]] = {}
    for word in words:
        if re.match(r"--?[A-Za-z]", word):
            name = word.partition("=")[0]
            name = "--arch" if name == "-a" else name
            if name in _LAUNCHERS:
                raise UserError(f"{name} is not for fairseq-train here: {_LAUNCHERS[name]}")
            flags.setdefault(name, []).append(word)
        elif flags:
            flags[name].append(word)
        else:
            raise UserError(f"{word!r}: after `--` come flags of fairseq-train, such as --max-update 400")
    return flags


def resolve(lines: Sequence[Sequence[str]]) -> list[Settings]:
    """The settings of each command line of fairseq-train, its data first: those given, and the defaults.

    fairseq is imported once, in a process of its own. UserError: fairseq-train would refuse one of them.
    """
    distinct = list(dict.fromkeys(map(tuple, lines)))
    command = [sys.executable, "-m", "fairseq_alma.check"]
    answer = child.ask(command, "checking the flags of fairseq-train", json.dumps(distinct))
    found = [each["settings"] | {"--arch": each["arch"]} for each in json.loads(answer)]
    return [found[distinct.index(tuple(line))] for line in lines]


def flag(name: str, value: object | None) -> list[str]:
    """The words of a flag; none where it has no value or is off, its name alone where it is on."""
    if value is None or value is False:
        return []
    return [name] if value is True else [name, _text(value)]


def chosen(settings: Settings, names: Sequence[str]) -> list[str]:
    """The words of those flags that are among `names`."""
    return [word for name in names for word in flag(name, settings.get(name))]


def described(settings: Settings, whole: bool) -> str:
    """The settings that tell most of a training as a command line; `whole`: all of them, a line for each."""
    names = [name for name in settings if name not in _LAUNCHERS] if whole else MAIN
    words = [" ".join(flag(name, settings[name])) for name in names if settings.get(name) not in _NOTHING]
    return "\n  ".join(["fairseq-train", *words]) if whole else f"fairseq-train {' '.join(words)}"


def words_of(flags: Flags) -> list[str]:
    """All words, in order."""
    return [word for words in flags.values() for word in words]


def _text(value: object) -> str:
    """As fairseq reads it: of a list its numbers, one for each epoch."""
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
