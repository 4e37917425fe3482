"""Kinds of values in JSON files, checked where a file is read, so that other code can rely on them."""

import json
import math
import unicodedata
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

LARGEST = 1e100  # sums, squares and ratios of such numbers are still numbers
_DEPTH = 20
_SHOWN = 60  # characters of a value in a message


class Kind(NamedTuple):
    """What a value should be: words for a message, and the test."""

    what: str
    fits: Callable[[Any], bool]


def parse_json(text: str | bytes, finite: bool = False) -> Any:
    """The value of a JSON text. ValueError: malformed, too deep, or with `finite` NaN or infinity."""
    try:
        return json.loads(text, parse_constant=_refuse if finite else None)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def is_text(value: Any) -> bool:
    """Whether a value is text that can be printed: no control characters, no halves of surrogate pairs."""
    return isinstance(value, str) and not any(unicodedata.category(each) in ("Cc", "Cs") for each in value)


def is_number(value: Any) -> bool:
    """Whether a value is a number, but no bool; NaN and infinity are numbers, 1e300 is none."""
    if isinstance(value, float):
        return not math.isfinite(value) or abs(value) <= LARGEST
    return type(value) is int and -(2**63) <= value < 2**63


def is_plain(value: Any, depth: int = _DEPTH) -> bool:
    """Whether a value is a number, text, bool, null, or a list or object of these, nested up to `depth`."""
    if isinstance(value, dict):
        return depth > 0 and all(is_text(key) and is_plain(each, depth - 1) for key, each in value.items())
    if isinstance(value, list):
        return depth > 0 and all(is_plain(each, depth - 1) for each in value)
    return value is None or isinstance(value, bool) or is_number(value) or is_text(value)


PLAIN = Kind("numbers and printable text in lists and objects", is_plain)
TEXT = Kind("printable text", is_text)
FLAG = Kind("true or false", lambda value: isinstance(value, bool))
NUMBER = Kind("a number", is_number)
_NULL = Kind("null", lambda value: value is None)
AMOUNT = Kind("a number from 0", lambda value: is_number(value) and not value < 0)


def whole(least: int, most: int = 2**63 - 1) -> Kind:
    """Whole numbers from `least` to `most`."""
    what = f"a whole number from {least}" + (f" to {most:,}" if most < 2**63 - 1 else "")
    return Kind(what, lambda value: type(value) is int and least <= value <= most)


def one_of(kinds: Sequence[Kind]) -> Kind:
    """Values of any of the kinds."""
    return Kind(" or ".join(kind.what for kind in kinds), lambda value: any(k.fits(value) for k in kinds))


def optional(kind: Kind) -> Kind:
    """`kind`, or null."""
    return one_of([kind, _NULL])


def list_of(kind: Kind) -> Kind:
    """Lists of `kind`."""
    return Kind(
        f"a list of {kind.what}", lambda value: isinstance(value, list) and all(map(kind.fits, value))
    )


def object_of(kind: Kind) -> Kind:
    """Objects whose values are of `kind`."""
    return Kind(
        f"an object of {kind.what}",
        lambda value: isinstance(value, dict) and all(map(kind.fits, value.values())),
    )


def require(record: Any, kinds: Mapping[str, Kind], needed: Collection[str] = ()) -> None:
    """ValueError: `record` is no object, lacks a field, or one of those it has is not of its kind."""
    if not isinstance(record, dict):
        raise ValueError(f"it is {shown(record)}: it should be an object")
    if lacking := [name for name in needed if name not in record]:
        raise ValueError(f"it lacks {', '.join(lacking)}")
    for name, kind in kinds.items():
        if name in record and not kind.fits(record[name]):
            raise ValueError(f"{name} is {shown(record[name])}: it should be {kind.what}")


def shown(value: Any) -> str:
    """A value in a message: printable, and not longer than a line."""
    text = ascii(value) if not isinstance(value, int) or abs(value) < 10**_SHOWN else "a huge number"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
