"""Flags of fairseq-train: the words a user gives, and the values that fairseq's own parser makes of them."""

import json
import re
import sys
from collections.abc import Sequence
from typing import Any

from alma.errors import UserError
from alma.options import flag_of, flag_words, options_of
from slurm.engine import children
from slurm.lm.options import MAIN_FLAGS
from slurm.lm.settings import Flags, FlagValues, Request

_EVERY_STAGE = "leave it out, the launcher sets it for every stage"
_OF_THE_LAUNCHER = {
    "--save-dir": "give --out RUN before the `--`",
    "--task": "leave it out, it is always alma_lm",
    "--stage": _EVERY_STAGE,
    "--finetune-from-model": _EVERY_STAGE,
    "--restore-file": _EVERY_STAGE,
    **{flag_of(name): f"give {flag_of(name)} before the `--`" for name in options_of(Request)},
}
_OFF: tuple[Any, ...] = (None, False, 0, "", [])


def read_flags(words: Sequence[str]) -> Flags:
    """Group words by flag. Raises UserError for a word before any flag, or a flag of the launcher."""
    flags: dict[str, list[str]] = {}
    for word in words:
        if re.match(r"--?[A-Za-z]", word):
            name = word.partition("=")[0]
            name = "--arch" if name == "-a" else name
            if name in _OF_THE_LAUNCHER:
                raise UserError(f"{name} is not for fairseq-train here: {_OF_THE_LAUNCHER[name]}")
            flags.setdefault(name, []).append(word)
        elif flags:
            flags[name].append(word)
        else:
            raise UserError(f"{word!r}: after `--` come flags of fairseq-train, such as --max-update 400")
    return flags


def resolve(lines: Sequence[Sequence[str]]) -> list[FlagValues]:
    """The flag values of each command line of fairseq-train; a command line starts with its data.

    Imports fairseq once, in another process. Raises UserError if fairseq-train would refuse a command line.
    """
    distinct = list(dict.fromkeys(map(tuple, lines)))
    command = [sys.executable, "-m", "fairseq_alma.check"]
    answer = children.ask(command, "checking the flags of fairseq-train", json.dumps(distinct))
    found = [each["settings"] | {"--arch": each["arch"]} for each in json.loads(answer)]
    return [found[distinct.index(tuple(line))] for line in lines]


def chosen(settings: FlagValues, names: Sequence[str]) -> list[str]:
    """The words of the flags `names`."""
    return [word for name in names for word in flag_words(name, settings.get(name))]


def described(settings: FlagValues, whole: bool) -> str:
    """A training as a command line: its main flags, or if `whole` all flags, one in each line."""
    names = [name for name in settings if name not in _OF_THE_LAUNCHER] if whole else MAIN_FLAGS
    one = {"--distributed-world-size": 1}
    shown = [name for name in names if settings.get(name) not in (*_OFF, one.get(name))]
    words = [" ".join(flag_words(name, settings[name])) for name in shown]
    return "\n  ".join(["fairseq-train", *words]) if whole else f"fairseq-train {' '.join(words)}"
