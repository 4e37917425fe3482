"""Columns of Parquet and Arrow files: their names and types, and the documents in their rows."""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from data_prep import compressed
from data_prep.compressed import Document, Input, Skipped
from data_prep.records import Keys, document_of

SUFFIXES = (".parquet", ".arrow")
"""Of the files with columns, which pyarrow reads."""
_SHOWN = 20  # most columns that a message lists


def problem_of(schema: Any, keys: Keys, needs_date: bool = False) -> str:
    """Why a `pyarrow.Schema` has no column with the text, or the date it needs; "": it has."""
    types = {column.name: column.type for column in schema}
    if keys.text and keys.text not in types:
        return f"no column `{keys.text}`; {_choices(types)} (--text-key names another)"
    column_type = types.get(keys.text)
    if keys.text and keys.chat is None and not is_text(column_type):
        problem = f"the column `{keys.text}` holds {column_type}, not string"
        return f"{problem} (--text-key names another)"
    if needs_date and keys.date not in types:
        return f"no column `{keys.date}`; {_choices(types)} (--date-key names another)"
    return ""


def _choices(names: Iterable[str]) -> str:
    """The names of columns, for a message."""
    quoted = [f"`{name}`" for name in names]
    if len(quoted) > _SHOWN:
        quoted[_SHOWN:] = [f"and {len(quoted) - _SHOWN} more"]
    return f"the columns are {', '.join(quoted)}"


def is_text(column_type: Any) -> bool:
    """Whether a column holds strings, plain or dictionary-encoded."""
    import pyarrow

    if pyarrow.types.is_dictionary(column_type):
        column_type = column_type.value_type
    return column_type in (pyarrow.string(), pyarrow.large_string(), pyarrow.string_view())


def names_of(schema: Any, keys: Keys) -> Sequence[str]:
    """The columns to read: of the text and of the date if there is one; all for whole records."""
    if not keys.text:
        return list(schema.names)
    return list(dict.fromkeys(key for key in (keys.text, keys.date) if key in schema.names))


def rows(batch: Any, data: Input, keys: Keys) -> Iterator[Document | Skipped]:
    """Yield the rows of a `pyarrow.RecordBatch`; counts them in `data.position`."""
    dates: Iterable[Any] = itertools.repeat(None)
    if keys.date in batch.schema.names:
        dates = _dates(batch.column(keys.date))
    values = batch.column(keys.text) if keys.text else _records(batch)
    for value, date in zip(values, dates, strict=False):
        yield _row(value, date, keys, data)
        data.position += 1


def _records(batch: Any) -> Any:
    """The rows of a `pyarrow.RecordBatch` as a `pyarrow.StructArray`."""
    import pyarrow

    values = [_in_microseconds(column) for column in batch.columns]
    return pyarrow.StructArray.from_arrays(values, names=batch.schema.names)


def _in_microseconds(column: Any) -> Any:
    """A column whose times, if it has any, are those of datetime, which has no nanoseconds."""
    import pyarrow

    if pyarrow.types.is_timestamp(column.type):
        return column.cast(pyarrow.timestamp("us", column.type.tz), safe=False)
    return column


def _dates(column: Any) -> Iterator[Any]:
    """The dates of a column; those that Python cannot hold are NaN, which is no date."""
    for value in _in_microseconds(column):
        try:
            yield value.as_py()
        except (ValueError, OverflowError):
            yield math.nan


def _row(value: Any, date: Any, keys: Keys, data: Input) -> Document | Skipped:
    try:
        record = value.as_py()
    except UnicodeDecodeError:
        return data.bad(data.position, "not UTF-8")
    except (ValueError, OverflowError) as error:  # a time that Python cannot hold
        return data.bad(data.position, f"a value that Python cannot hold ({error})")
    document = document_of(record, date, data.position, keys, data)
    # A character has at most 4 bytes in UTF-8, so only long strings must be encoded to be measured.
    longest = compressed.MAX_DOCUMENT_BYTES
    if isinstance(document, Document):
        may_be_long = 4 * len(document.text) > longest
        if may_be_long and len(document.text.encode()) > longest:
            return data.too_long(data.position)
    return document
