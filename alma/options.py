"""Options, each declared once as a dataclass field.

Flags, range checks, words of a command line and records are derived from the declarations.
"""

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

ALWAYS = "always"
CHANGED = "changed"
NEVER = "never"
"""When run.json records an option: always (unless it is None), if it is not the default, never."""


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

    The range is given by `choices` for a string, `at_least` or `above` for a number, and for other
    values by `read`, which parses a word of the command line and raises ValueError. `record`: see
    ALWAYS. `passed`: fairseq-train has the option too, and the launcher passes it on unless it has
    its default.
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
    values = {}
    for name, declared in options_of(options).items():
        value = getattr(options, name)
        if value != declared.default:
            values[name] = value
    return values


def recorded(options: Any) -> dict[str, Any]:
    """The options that run.json records."""
    not_default = changed(options)
    record = {}
    for name, declared in options_of(options).items():
        value = getattr(options, name)
        when = declared.metadata["record"]
        if value is None or when == NEVER or (when == CHANGED and name not in not_default):
            continue
        record[name] = value
    return record


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
        value = getattr(options, name)
        if value is None:
            continue
        flag = flag_of(name)
        limits = declared.metadata
        kinds = tuple(_types(declared))
        accepted = (*kinds, int) if float in kinds else kinds
        if {int, float, bool}.issuperset(kinds) and not isinstance(value, accepted):
            raise UserError(
                f"{flag} {value!r}: of type {type(value).__name__}, give {kinds[0].__name__}"
            )
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
    values = {name: getattr(parsed, name) for name in options_of(kind)}
    return {name: value for name, value in values.items() if value is not None}


def add_options(
    group: Any,
    options: Iterable[Field],
    defaults: Any = None,
    sweeps: bool = False,
    changes: Mapping[str, Mapping[str, Any]] | None = None,
) -> None:
    """Add a flag for each option; argparse then has None for those that are not given.

    `defaults`: an object whose values the help shows as defaults, such as the dataclass. `sweeps`:
    each flag takes a comma list of values. `changes`: other arguments of add_argument, by name of
    the option.
    """
    for declared in options:
        words = _comma_list(declared) if sweeps else _single(declared)
        words["help"] = declared.metadata["help"]
        default = getattr(defaults, declared.name, None)
        if default is not None and default is not False:
            text = f"{default:g}" if isinstance(default, int | float) else default
            words["help"] += f" (default: {text})"
        if changes and declared.name in changes:
            words |= changes[declared.name]
        group.add_argument(flag_of(declared.name), **words)


def _single(declared: Field) -> dict[str, Any]:
    """Arguments of add_argument for a flag with one value."""
    limits = declared.metadata
    kind = _types(declared)[0]
    if kind is bool:
        return {"action": "store_true", "default": None}
    if limits["choices"]:
        return {"choices": limits["choices"]}
    type_of_value = _reading(limits["read"]) if limits["read"] else kind
    placeholder = "N" if kind in (int, float) else "TEXT"
    return {"type": type_of_value, "metavar": limits["metavar"] or placeholder}


def _comma_list(declared: Field) -> dict[str, Any]:
    """Arguments of add_argument for a flag with a comma list of values."""
    limits = declared.metadata
    kind = _types(declared)[0]
    if kind is bool:
        return {"action": Switch}
    if limits["choices"]:
        return names_of(limits["choices"])
    type_of_list: Callable[[str], Any] = number_list if kind is int else reals
    if limits["read"]:
        type_of_list = _reading(partial(_list, limits["read"]))
    placeholder = f"{limits['metavar']},..." if limits["metavar"] else "N"
    return {"type": type_of_list, "metavar": placeholder}


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


def names_of(choices: Iterable[str]) -> dict[str, Any]:
    """Arguments of add_argument for a flag that takes a comma list of `choices`."""

    def names(words: str) -> list[str]:
        chosen = list(dict.fromkeys(words.split(",")))
        for word in chosen:
            if word not in choices:
                raise argparse.ArgumentTypeError(f"{word!r}: {hint(word, choices)}")
        return chosen

    return {"type": names, "metavar": f"{{{','.join(choices)}}}"}


class Switch(argparse.Action):
    """`--flag`, `--no-flag` or `--flag off,on`: a list of booleans."""

    def __init__(self, option_strings: Sequence[str], dest: str, **rest: Any):
        off = [f"--no-{text.removeprefix('--')}" for text in option_strings]
        super().__init__([*option_strings, *off], dest, nargs="?", metavar="off,on", **rest)

    def __call__(
        self, parser: Any, namespace: Any, values: Any, option_string: str | None = None
    ) -> None:
        """Store the values; UserError through `parser` for others than off and on."""
        values_of_words = {"off": False, "on": True}
        off = option_string is not None and option_string.startswith("--no-")
        words = dict.fromkeys([] if values is None else values.split(","))
        if not words.keys() <= values_of_words.keys() or (off and words):
            problem = f"{values!r}: off, on or off,on; give an experiment before flags"
            raise argparse.ArgumentError(self, problem)
        setattr(namespace, self.dest, [values_of_words[word] for word in words] or [not off])
