"""Parquet files."""

from collections.abc import Iterator
from typing import Any

from data_prep import columns, compressed
from data_prep.compressed import Damaged, Document, Input, Skipped
from data_prep.records import Format, Keys


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
                problem = columns.problem_of(file.schema_arrow, keys)
                if problem:
                    yield data.bad(0, problem)
                    return
                for number in range(file.num_row_groups):
                    group = file.metadata.row_group(number)
                    if data.segment.start <= _first_byte(group) < data.segment.end:
                        yield from _rows(file, number, data, keys)
                    else:
                        data.position += group.num_rows
        except pyarrow.ArrowException as error:
            raise Damaged(str(error)) from error


def _first_byte(group: Any) -> int:
    """Where a row group begins in its Parquet file."""
    column = group.column(0)
    first = column.data_page_offset
    return min(first, column.dictionary_page_offset or first)


def _rows(file: Any, number: int, data: Input, keys: Keys) -> Iterator[Document | Skipped]:
    """Yield the rows of a row group of a Parquet file, about a BLOCK of text at a time."""
    group = file.metadata.row_group(number)
    size = 0
    for column in map(group.column, range(group.num_columns)):
        if not keys.text or column.path_in_schema.split(".")[0] == keys.text:
            size += column.total_uncompressed_size
    count = min(max(compressed.BLOCK * group.num_rows // max(size, 1), 1), 4096)
    names = columns.names_of(file.schema_arrow, keys)
    for batch in file.iter_batches(count, [number], names, use_threads=False):
        yield from columns.rows(batch, data, keys)
