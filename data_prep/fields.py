"""The fields of a record of .jsonl, .wet and .parquet files that make a document."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from data_prep.blocks import Skipped

HINT = "choose one of its fields by --text-key: "
_SHOWN = 30  # fields in a message, and characters of a field's name


class Keys(NamedTuple):
    """Names of the fields of a record."""

    text: str
    date: str = ""
    """Empty: dates are not read."""


class DatedText(NamedTuple):
    """The text of a document, and its date as it is in the file; None: it has none."""

    text: str
    date: Any
    offset: int | None
    """See `Skipped`."""


Raw = str | DatedText | Skipped
"""The text of a document, not normalised, dated only if dates are read; or what is wrong with it."""


def dated(text: str | Skipped, date: Any, offset: int, keys: Keys) -> Raw:
    """A document with its date, if dates are read."""
    return DatedText(text, date, offset) if keys.date and isinstance(text, str) else text


def field(record: Any, key: str) -> Any:
    """A field of a record; a key with dots that is no field leads into objects. None: it is missing."""
    if not isinstance(record, dict):
        return None
    if key in record or "." not in key:
        return record.get(key)
    name, _, rest = key.partition(".")
    return field(record.get(name), rest)


def strings(record: Any) -> list[str]:
    """The keys of all strings in a record, those of objects in it with dots."""
    found, objects = [], [("", record)] if isinstance(record, dict) else []
    for prefix, fields in objects:  # grows as it is read
        found += [prefix + name for name, value in fields.items() if isinstance(value, str)]
        objects += [(f"{prefix}{name}.", value) for name, value in fields.items() if isinstance(value, dict)]
    return found


def no_text(key: str, fields: Iterable[str], hint: str = HINT) -> str:
    """Why a record has no text; `fields`: those that may hold it instead."""
    names = [f"`{name[:_SHOWN]}`".encode(errors="replace").decode() for name in fields]
    more = ", ..." if len(names) > _SHOWN else ""
    shown = f" ({hint}{', '.join(names[:_SHOWN])}{more})" if names and hint else ""
    return f"no field `{key}` that holds a string{shown}"
