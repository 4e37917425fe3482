"""Arrow files: the stream that `datasets.save_to_disk` writes, and the file of Feather."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from data_prep import columns
from data_prep.compressed import Damaged, Document, Input, Skipped
from data_prep.records import Format, Keys

_FILE = b"ARROW1"  # the first bytes of Feather's files; streams begin with the schema
_ROWS = 1024  # of a batch that are read at once


class OpenArrow(NamedTuple):
    """An open Arrow file, memory-mapped."""

    schema: Any  # pyarrow.Schema
    batches: Iterator[tuple[int, Any]]  # (first byte, pyarrow.RecordBatch)


class Arrow(Format):
    """The rows of the record batches that begin in the segment; offsets count rows."""

    def documents(self, data: Input, keys: Keys) -> Iterator[Document | Skipped]:
        import pyarrow

        try:
            with open_arrow(data.segment.path) as file:
                data.position = 0
                problem = columns.problem_of(file.schema, keys)
                if problem:
                    yield data.bad(0, problem)
                    return
                names = columns.names_of(file.schema, keys)
                for first_byte, batch in file.batches:
                    if first_byte >= data.segment.end:
                        return
                    if first_byte < data.segment.start:
                        data.position += batch.num_rows
                        continue
                    batch = batch.select(names)
                    _validate(batch)
                    for start in range(0, batch.num_rows, _ROWS):
                        yield from columns.rows(batch.slice(start, _ROWS), data, keys)
        except pyarrow.ArrowException as error:
            raise Damaged(str(error)) from error


@contextmanager
def open_arrow(path: str) -> Iterator[OpenArrow]:
    """Open a file of either format. OSError, pyarrow.ArrowException: unreadable or damaged."""
    import pyarrow

    with pyarrow.memory_map(path) as source:
        if source.read(len(_FILE)) == _FILE:
            file = pyarrow.ipc.open_file(source)
            yield OpenArrow(file.schema, _of_file(file, source.size()))
        else:
            source.seek(0)
            stream = pyarrow.ipc.open_stream(source)
            yield OpenArrow(stream.schema, _of_stream(stream, source))


def _of_stream(stream: Any, source: Any) -> Iterator[tuple[int, Any]]:
    """Yield each batch of a stream and its first byte."""
    while True:
        first_byte = source.tell()
        try:
            batch = stream.read_next_batch()
        except StopIteration:
            return
        yield first_byte, batch


def _of_file(file: Any, size: int) -> Iterator[tuple[int, Any]]:
    """Yield each batch of a file of `size` bytes, and about its first byte, which is not known."""
    for number in range(file.num_record_batches):
        yield number * size // file.num_record_batches, file.get_batch(number)


def _validate(batch: Any) -> None:
    """Raise an ArrowException if a batch names bytes outside its buffers; else they would be read.

    Strings are checked as bytes: one that is not UTF-8 is a bad record, not a bad batch.
    """
    import pyarrow

    as_bytes = {pyarrow.string(): pyarrow.binary(), pyarrow.large_string(): pyarrow.large_binary()}
    for column in batch.columns:
        if column.type in as_bytes:
            column = column.cast(as_bytes[column.type])
        column.validate(full=True)
