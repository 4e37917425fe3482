"""Options, declared once as fields, from which flags, checks, words of a command and records follow."""

import argparse
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import Field, field, fields
from functools import partial, reduce
from operator import or_
from types import NoneType, UnionType
from typing import Any, get_args

from alma.errors import UserError, hint, number_list
from alma.schema import NATURAL, is_number, whole

ALWAYS, CHANGED, NEVER = "always", "changed", "never"
"""When run.json records an option: with any value but None, with another than its default, or never."""


def option(
    default: Any,
    text: str,
    *,
    choices: Sequence[str] | None = None,
    at_least: float = 0,
    above: float | None = None,
    read: Callable[[Any], Any] | None = None,
    metavar: str | None = None,
    record: str = ALWAYS,
    passed: bool = False,
) -> Any:
    """A field with a default and a help text; the value None means "not given".

    Its range: `choices` of a string; for a number, the least value or a bound that it must be `above`; for
    another value, a function that reads it from a command line and raises ValueError. `record`: see ALWAYS.
    `passed`: fairseq-train has the option too; the launcher passes it on unless it has its default.
    """
    limits = {"choices": choices, "at_least": at_least, "above": above, "read": read}
    about = {"help": text, "metavar": metavar, "record": record, "passed": passed}
    return field(default=default, metadata={**about, **limits})


def options_of(kind: Any) -> dict[str, Field]:
    """The options of a dataclass by name; it may have other fields too."""
    return {declared.name: declared for declared in fields(kind) if "help" in declared.metadata}


def flag_of(name: str) -> str:
    """The flag of an option: `batch_size` -> `--batch-size`."""
    return "--" + name.replace("_", "-")


def flag_words(flag: str, value: object) -> list[str]:
    """The words of a flag: none for None and False, only its name for True; commas join a list."""
    if value is None or value is False:
        return []
    text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    return [flag] if value is True else [flag, text]


def joined_words(flag: str, value: object) -> list[str]:
    """As `flag_words`, in one word with "=": a value that begins with a dash is then no flag."""
    return ["=".join(flag_words(flag, value))] if flag_words(flag, value) else []


def changed(options: Any) -> dict[str, Any]:
    """The options that do not have their defaults."""
    defaults = {name: declared.default for name, declared in options_of(options).items()}
    return {name: value for name in defaults if (value := getattr(options, name)) != defaults[name]}


def recorded(options: Any) -> dict[str, Any]:
    """The options that run.json records."""
    values = {ALWAYS: vars(options), CHANGED: changed(options), NEVER: {}}
    record = {name: declared.metadata["record"] for name, declared in options_of(options).items()}
    return {name: value for name in record if (value := values[record[name]].get(name)) is not None}


def kinds_of(kind: Any) -> dict[str, Any]:
    """The kinds of values that run.json records, by name of the option."""
    kinds = {}
    for name, declared in options_of(kind).items():
        exact = {int: whole(int(declared.metadata["at_least"])), list[int]: list[NATURAL]}
        kinds[name] = reduce(or_, (exact.get(type, type) for type in _types(declared)))
    return kinds


def _types(option: Field) -> list[Any]:
    """The types of its values, without None."""
    types = get_args(option.type) if isinstance(option.type, UnionType) else (option.type,)
    return [type for type in types if type is not NoneType]


def check_ranges(options: Any) -> None:
    """Raise UserError for an option that is out of range."""
    for name, declared in options_of(options).items():
        if (value := getattr(options, name)) is None:
            continue
        flag, limits, kinds = flag_of(name), declared.metadata, tuple(_types(declared))
        if {int, float, bool}.issuperset(kinds) and not isinstance(value, kinds + (int,) * (float in kinds)):
            raise UserError(f"{flag} {value!r}: of type {type(value).__name__}, give {kinds[0].__name__}")
        if type(value) in (int, float) and (math.isinf(value) or not is_number(value)):
            raise UserError(f"{flag} {value:.3g}: larger than any value that a run can record")
        if limits["choices"] and value not in limits["choices"]:
            raise UserError(f"{flag} {value}: choose from {', '.join(limits['choices'])}")
        if limits["read"]:
            try:
                limits["read"](value)
            except ValueError as error:
                raise UserError(f"{flag} {error}") from None
        elif limits["above"] is not None and not value > limits["above"]:
            raise UserError(f"{flag} {value}: more than {limits['above']}")
        elif {int, float}.intersection(kinds) and not value >= limits["at_least"]:
            raise UserError(f"{flag} {value}: at least {limits['at_least']}")


def given(kind: Any, parsed: argparse.Namespace) -> dict[str, Any]:
    """The options of a dataclass that a command line gives, in its order of fields."""
    return {name: value for name in options_of(kind) if (value := getattr(parsed, name)) is not None}


def add_options(
    group: Any,
    options: Iterable[Field],
    defaults: Any = None,
    several: bool = False,
    changes: Mapping[str, Mapping[str, Any]] | None = None,
) -> None:
    """Add a flag for each option; argparse then has None for those that are not given.

    `defaults`: an object whose values the help shows as defaults, such as the dataclass. `several`: each flag
    takes a comma list of values. `changes`: other arguments of add_argument, by name of the option.
    """
    for declared in options:
        limits, kind = declared.metadata, _types(declared)[0]
        read = limits["read"]
        words: dict[str, Any]
        if kind is bool:
            words = {"action": Switch} if several else {"action": "store_true", "default": None}
        elif limits["choices"]:
            words = names_of(limits["choices"]) if several else {"choices": limits["choices"]}
        elif several:
            lists = number_list if kind is int else reals
            words = {"type": _reading(partial(_list, read)) if read else lists}
            words["metavar"] = f"{limits['metavar']},..." if limits["metavar"] else "N"
        else:
            words = {"type": _reading(read) if read else kind}
            words["metavar"] = limits["metavar"] or ("N" if kind in (int, float) else "TEXT")
        default, words["help"] = getattr(defaults, declared.name, None), limits["help"]
        if default is not None and default is not False:
            shown = f"{default:g}" if isinstance(default, int | float) else default
            words["help"] += f" (default: {shown})"
        group.add_argument(flag_of(declared.name), **(words | dict((changes or {}).get(declared.name, {}))))


def _reading(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """`read` as a type of argparse, which shows the message of a ValueError."""

    def convert(text: str) -> Any:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def _list(read: Callable[[str], Any], text: str) -> list[Any]:
    return list(dict.fromkeys(map(read, text.split(","))))


def reals(text: str) -> list[float]:
    """Parse ".3,1,3"."""
    try:
        return _list(float, text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: a number, or a list such as .3,1,3") from None


def names_of(known: Iterable[str]) -> dict[str, Any]:
    """Arguments of add_argument for a flag that takes a comma list of `known` names."""

    def names(words: str) -> list[str]:
        chosen = list(dict.fromkeys(words.split(",")))
        for word in chosen:
            if word not in known:
                raise argparse.ArgumentTypeError(f"{word!r}: {hint(word, known)}")
        return chosen

    return {"type": names, "metavar": f"{{{','.join(known)}}}"}


class Switch(argparse.Action):
    """`--flag`, `--no-flag` or `--flag off,on`: a list of booleans."""

    def __init__(self, option_strings: Sequence[str], dest: str, **rest: Any):
        off = [f"--no-{text.removeprefix('--')}" for text in option_strings]
        super().__init__([*option_strings, *off], dest, nargs="?", metavar="off,on", **rest)

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        """Store the values; UserError through `parser` for others than off and on."""
        known = {"off": False, "on": True}
        off = option_string is not None and option_string.startswith("--no-")
        words = dict.fromkeys([] if values is None else values.split(","))
        if not words.keys() <= known.keys() or (off and words):
            problem = f"{values!r}: off, on or off,on; give an experiment before flags"
            raise argparse.ArgumentError(self, problem)
        setattr(namespace, self.dest, [known[word] for word in words] or [not off])
