"""Flags for fairseq-train as a user gives them: on a command line after `--`, or in an experiment's file."""

import re
from collections.abc import Mapping, Sequence

from alma.errors import UserError

Flags = Mapping[str, Sequence[str]]
"""Flags by name: the words of each as they were given, its name included."""

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


def flag(name: str, value: object | None) -> list[str]:
    """The words of a flag; none where it has no value."""
    return [] if value is None else [name, str(value)]


def chosen(flags: Flags, names: Sequence[str]) -> list[str]:
    """The words of those flags that are among `names`."""
    return [word for name in names for word in flags.get(name, ())]


def words_of(flags: Flags) -> list[str]:
    """All words, in order."""
    return [word for words in flags.values() for word in words]


def value(flags: Flags, name: str) -> str | None:
    """The value of a flag given as `--name value` or `--name=value`; the last one counts, as in fairseq."""
    return flags[name][-1].removeprefix(f"{name}=") if name in flags else None


def number(flags: Flags, name: str) -> int | None:
    """The value of a flag that takes a whole number. UserError: it is none."""
    text = value(flags, name)
    if text is not None and not text.isdecimal():
        raise UserError(f"{name} needs a whole number")
    return None if text is None else int(text)
