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
                if not _has_text(file, keys.text):
                    yield data.bad(0, no_text(keys.text))
                    return
                for number in range(file.num_row_groups):
                    group = file.metadata.row_group(number)
                    if data.segment.start <= _first_byte(group) < data.segment.end:
                        yield from _rows(file, number, data, keys)
                    else:
                        data.position += group.num_rows
        except pyarrow.ArrowException as error:
            raise Damaged(str(error)) from error


def _has_text(file: Any, key: str) -> bool:
    """Whether a Parquet file has a column of strings with this name."""
    import pyarrow

    types = {column.name: column.type for column in file.schema_arrow}
    column_type = types.get(key)
    value_type = getattr(column_type, "value_type", column_type)  # dictionary-encoded columns
    return value_type in (pyarrow.string(), pyarrow.large_string(), pyarrow.string_view())


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
