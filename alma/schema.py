"""Kinds of values in JSON files, as types of msgspec, checked where a file is read."""

import math
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from alma.errors import UserError

LARGEST = 1e100  # so that sums, squares and ratios of accepted numbers are finite
_MOST = 2**63 - 1
_SHOWN = 60  # most characters of a value in a message
_PRINTABLE = r"^[^\x00-\x1f\x7f-\x9f\ud800-\udfff]*\Z"  # no control characters, no lone surrogates

TEXT = Annotated[str, Meta(pattern=_PRINTABLE)]
NUMBER = Annotated[float, Meta(ge=-LARGEST, le=LARGEST)]
AMOUNT = Annotated[float, Meta(ge=0, le=LARGEST)]
NATURAL = Annotated[int, Meta(ge=0, le=_MOST)]
COUNT = Annotated[int, Meta(ge=1, le=_MOST)]


def whole(least: int, most: int = _MOST) -> Any:
    """Whole numbers from `least` to `most`."""
    return Annotated[int, Meta(ge=least, le=most)]


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text. ValueError: malformed, with NaN, or nested too deeply."""
    try:
        return msgspec.json.decode(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def is_number(value: Any) -> bool:
    """Whether a value is a number and no bool.

    NaN and infinity count as numbers; finite ones beyond LARGEST do not.
    """
    if isinstance(value, float):
        return not math.isfinite(value) or abs(value) <= LARGEST
    return type(value) is int and -_MOST <= value <= _MOST


def is_plain(value: Any, depth: int = 20) -> bool:
    """Whether a value is a number, printable text, bool, null, or a list or object of these.

    Lists are nested up to `depth`.
    """
    if isinstance(value, str):
        return re.match(_PRINTABLE, value) is not None
    if isinstance(value, dict):
        names = all(isinstance(name, str) and is_plain(name) for name in value)
        return names and is_plain(list(value.values()), depth)
    if isinstance(value, list):
        return depth > 0 and all(is_plain(item, depth - 1) for item in value)
    return value is None or isinstance(value, bool) or is_number(value)


def require(record: Any, kinds: Mapping[str, Any], needed: Collection[str] = ()) -> None:
    """Raise ValueError unless `record` is an object with the right types.

    `kinds` are the types of its fields by name, `needed` the fields that it must have.
    """
    if not isinstance(record, dict):
        raise ValueError(f"it is {shown(record)}: it should be an object")
    lacking = [name for name in needed if name not in record]
    if lacking:
        raise ValueError(f"it lacks {', '.join(lacking)}")
    for name, kind in kinds.items():
        if name in record:
            try:
                msgspec.convert(record[name], kind)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None


def check_names(place: object, names: Iterable[str]) -> None:
    """Raise a UserError if a class or period has a name that a JSON record cannot hold."""
    for name in names:
        if not is_plain(name):
            problem = "has control characters in its name, or is no UTF-8"
            raise UserError(f"{place}: {shown(name)} {problem}: rename it")


def shown(value: Any) -> str:
    """A value in a message: printable, and not longer than a line."""
    if isinstance(value, int) and abs(value) >= 10**_SHOWN:
        return "a huge number"
    text = ascii(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
