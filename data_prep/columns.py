"""Columns of Parquet and Arrow files: their names and types, and the documents in their rows."""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from alma.errors import UserError
from data_prep import compressed
from data_prep.compressed import Document, Input, Skipped
from data_prep.records import Keys, document_of

SUFFIXES = (".parquet", ".arrow")
"""Of the files with columns, which pyarrow reads."""
_SHOWN = 20  # most columns that a message lists


def problem_of(schema: Any, keys: Keys) -> str:
    """Why the text cannot be in a column of a `pyarrow.Schema`; "": it can."""
    types = {column.name: column.type for column in schema}
    if keys.text not in types:
        return f"no column `{keys.text}`; {_choices(types)} (--text-key names another)"
    column_type = types[keys.text]
    if keys.chat is None and not is_text(column_type):
        problem = f"the column `{keys.text}` holds {column_type}, not string"
        return f"{problem} (--text-key names another)"
    return ""


def check(path: str, keys: Keys, is_undated_an_error: bool) -> None:
    """Raise a UserError if a file lacks the columns of text and date. Damage is reported later."""
    schema = _schema_of(path)
    if schema is None:
        return
    problem = problem_of(schema, keys)
    if not problem and is_undated_an_error and keys.date and keys.date not in schema.names:
        names = _choices(schema.names)
        problem = f"no column `{keys.date}`; {names} (--date-key names another)"
    if problem:
        raise UserError(f"{path}: {problem}")


def _schema_of(path: str) -> Any:
    """The schema of a file; None: it cannot be read."""
    import pyarrow
    import pyarrow.parquet

    from data_prep.arrow import open_arrow

    try:
        if path.endswith(".parquet"):
            return pyarrow.parquet.read_schema(path)
        with open_arrow(path) as file:
            return file.schema
    except (OSError, pyarrow.ArrowException):
        return None


def _choices(names: Iterable[str]) -> str:
    """The names of columns, for a message."""
    quoted = [f"`{name}`" for name in names]
    more = ""
    if len(quoted) > _SHOWN:
        more = f" and {len(quoted) - _SHOWN} more"
    return f"the columns are {', '.join(quoted[:_SHOWN])}{more}"


def is_text(column_type: Any) -> bool:
    """Whether a column holds strings, plain or dictionary-encoded."""
    import pyarrow

    if pyarrow.types.is_dictionary(column_type):
        column_type = column_type.value_type
    return column_type in (pyarrow.string(), pyarrow.large_string(), pyarrow.string_view())


def names_of(schema: Any, keys: Keys) -> Sequence[str]:
    """The columns to read: of the text, and of the date if there is one."""
    return list(dict.fromkeys(key for key in (keys.text, keys.date) if key in schema.names))


def rows(batch: Any, data: Input, keys: Keys) -> Iterator[Document | Skipped]:
    """Yield the rows of a `pyarrow.RecordBatch`; counts them in `data.position`."""
    dates: Iterable[Any] = itertools.repeat(None)
    if keys.date in batch.schema.names:
        dates = _dates(batch.column(keys.date))
    for value, date in zip(batch.column(keys.text), dates, strict=False):
        yield _row(value, date, keys, data)
        data.position += 1


def _dates(column: Any) -> Iterator[Any]:
    """The dates of a column; those that Python cannot hold are NaN, which is no date."""
    import pyarrow

    if pyarrow.types.is_timestamp(column.type):  # datetime has no nanoseconds
        column = column.cast(pyarrow.timestamp("us", column.type.tz), safe=False)
    for value in column:
        try:
            yield value.as_py()
        except (ValueError, OverflowError):
            yield math.nan


def _row(value: Any, date: Any, keys: Keys, data: Input) -> Document | Skipped:
    try:
        record = value.as_py()
    except UnicodeDecodeError:
        return data.bad(data.position, "not UTF-8")
    document = document_of(record, date, data.position, keys, data)
    # A character has at most 4 bytes in UTF-8, so only long strings must be encoded to be measured.
    longest = compressed.MAX_DOCUMENT_BYTES
    if isinstance(document, Document) and 4 * len(document.text) > longest:
        if len(document.text.encode()) > longest:
            return data.too_long(data.position)
    return document
