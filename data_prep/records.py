"""The base class of corpus file formats, and access to fields of records."""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import orjson

from data_prep.chat import BadChat, Chat
from data_prep.compressed import Document, Input, Skipped


class Keys(NamedTuple):
    """Names of the fields with text and date; a key a.b that is no field means b in object a."""

    text: str  # empty: the document of a record is the whole record, as JSON
    date: str = ""  # empty: dates are not read
    chat: Chat | None = None  # writes the text of a document with chat turns; None: it is text


class Format:
    """A kind of corpus file."""

    border: re.Pattern[bytes] | None = None
    """An uncompressed file may be cut into segments after a match; None: it may not be cut."""

    def documents(self, data: Input, keys: Keys) -> Iterator[Document | Skipped]:
        """Yield each document of a segment, and the bad input in it."""
        raise NotImplementedError


def field(record: Any, key: str) -> Any:
    """The value of a field of a record, see `Keys`; None if it is missing."""
    if not key:
        return record
    if not isinstance(record, dict):
        return None
    if key in record or "." not in key:
        return record.get(key)
    name, _, inner_key = key.partition(".")
    return field(record.get(name), inner_key)


def document_of(value: Any, date: Any, offset: int, keys: Keys, data: Input) -> Document | Skipped:
    """The document whose text, chat turns or whole record are `value`."""
    if not keys.text:
        if isinstance(value, dict):
            return Document(orjson.dumps(value, default=str).decode(), date, offset)
        return data.bad(offset, "no JSON object")
    if keys.chat is None:
        if isinstance(value, str):
            return Document(value, date, offset)
        return data.bad(offset, no_text(keys.text))
    try:
        return Document(keys.chat.text(value), date, offset)
    except BadChat as error:
        return data.bad(offset, str(error))


def no_text(key: str) -> str:
    """The message for a record without the text field `key`."""
    return f"no field `{key}` that holds a string (--text-key names another)"
