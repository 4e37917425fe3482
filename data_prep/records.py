"""What a format of corpus files is, and fields of records."""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from data_prep.compressed import Document, Input, Skipped


class Keys(NamedTuple):
    """Names of the fields of a record; a key with dots that is no field leads into objects."""

    text: str
    date: str = ""  # empty: dates are not read


class Format:
    """A kind of corpus file."""

    border: re.Pattern[bytes] | None = None
    """Where a file that is not compressed may be cut into segments; None: nowhere."""

    def documents(self, data: Input, keys: Keys) -> Iterator[Document | Skipped]:
        """Yield each document of a segment, and the bad input in it."""
        raise NotImplementedError


def field(record: Any, key: str) -> Any:
    """A field of a record; None: it is missing."""
    if not isinstance(record, dict):
        return None
    if key in record or "." not in key:
        return record.get(key)
    name, _, inner_key = key.partition(".")
    return field(record.get(name), inner_key)


def no_text(key: str) -> str:
    """Why a record has no text."""
    return f"no field `{key}` that holds a string (--text-key names another)"
