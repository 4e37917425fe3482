"""Parquet files."""

import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any

from data_prep import compressed
from data_prep.compressed import Damaged, Document, Input, Skipped
from data_prep.records import Format, Keys, no_text


class Parquet(Format):
    """The rows of the row groups that begin in the segment; offsets count rows."""

    def documents(self, data: Input, keys: Keys) -> Iterator[Document | Skipped]:
        import pyarrow
        import pyarrow.parquet

        path = data.segment.path
        try:
            with pyarrow.parquet.ParquetFile(
                path, buffer_size=compressed.BLOCK, pre_buffer=False
            ) as file:
                data.position = 0
                column_type = _type_of(file, keys.text)
                if not _is_text(column_type):
                    yield data.bad(0, _no_strings(column_type, keys.text))
                    return
                for number in range(file.num_row_groups):
                    group = file.metadata.row_group(number)
                    if data.segment.start <= _first_byte(group) < data.segment.end:
                        yield from _rows(file, number, data, keys)
                    else:
                        data.position += group.num_rows
        except pyarrow.ArrowException as error:
            raise Damaged(str(error)) from error


def _type_of(file: Any, key: str) -> Any:
    """The type of the column with this name; None: the file has no such column."""
    types = {column.name: column.type for column in file.schema_arrow}
    return types.get(key)


def _is_text(column_type: Any) -> bool:
    """Whether a column holds strings, plain or dictionary-encoded."""
    import pyarrow

    if column_type is not None and pyarrow.types.is_dictionary(column_type):
        column_type = column_type.value_type
    return column_type in (pyarrow.string(), pyarrow.large_string(), pyarrow.string_view())


def _no_strings(column_type: Any, key: str) -> str:
    """The message for a file whose column `key` is missing or holds no strings."""
    if column_type is None:
        return no_text(key)
    return f"the column `{key}` holds {column_type}, not string (--text-key names another)"


def _first_byte(group: Any) -> int:
    """Where a row group begins in its Parquet file."""
    column = group.column(0)
    first = column.data_page_offset
    return min(first, column.dictionary_page_offset or first)


def _rows(file: Any, number: int, data: Input, keys: Keys) -> Iterator[Document | Skipped]:
    """Yield the rows of a row group of a Parquet file, about a BLOCK of text at a time."""
    group = file.metadata.row_group(number)
    columns = [group.column(i) for i in range(group.num_columns)]
    size = next(
        column.total_uncompressed_size for column in columns if column.path_in_schema == keys.text
    )
    rows = min(max(compressed.BLOCK * group.num_rows // max(size, 1), 1), 4096)
    names = [keys.text]
    is_dated = keys.date in file.schema_arrow.names
    if is_dated and keys.date != keys.text:
        names.append(keys.date)
    for batch in file.iter_batches(rows, [number], names, use_threads=False):
        dates: Iterable[Any] = itertools.repeat(None)
        if is_dated:
            dates = _dates(batch.column(keys.date))
        for value, date in zip(batch.column(keys.text), dates, strict=False):
            yield _row(value, date, keys.text, data)
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


def _row(value: Any, date: Any, key: str, data: Input) -> Document | Skipped:
    try:
        text = value.as_py()
    except UnicodeDecodeError:
        return data.bad(data.position, "not UTF-8")
    if not isinstance(text, str):
        return data.bad(data.position, no_text(key))
    # A character has at most 4 bytes in UTF-8, so only long strings must be encoded to be measured.
    longest = compressed.MAX_DOCUMENT_BYTES
    if 4 * len(text) > longest and len(text.encode()) > longest:
        return data.too_long(data.position)
    return Document(text, date, data.position)
