"""CSV files: line 1 names the columns, and each row below it is a record whose values are text."""

import csv
import io
from collections.abc import Iterator
from typing import Any

from data_prep import compressed
from data_prep.compressed import Document, Input, Skipped
from data_prep.records import Format, Keys, document_of, field

_OTHER_SEPARATORS = ";\t|"


class CommaSeparated(Format):
    """The rows of a file of UTF-8; empty lines are ignored. Offsets are numbers of lines, from 1.

    A row may span several lines, within quotes.
    """

    # csv.reader takes text, not the blocks of `Input.spans`, whose borders may lie within quotes.

    def documents(self, data: Input, keys: Keys) -> Iterator[Document | Skipped]:
        # of the whole process, so it is only raised
        csv.field_size_limit(max(csv.field_size_limit(), 2 * compressed.MAX_DOCUMENT_BYTES))
        text = io.TextIOWrapper(
            io.BufferedReader(_InputBytes(data), compressed.BLOCK),
            encoding="utf-8-sig",
            errors="surrogateescape",  # the row that is not UTF-8 is found below
            newline="",
        )
        reader = csv.reader(text, strict=True)
        columns: list[str] = []
        while True:
            line = reader.line_num + 1
            try:
                row = next(reader, None)
            except csv.Error as error:
                yield data.bad(line, f"malformed CSV ({error})")
                continue
            if row is None:
                return
            if not row:
                continue
            problem = _problem_of_row(row, columns) if columns else _problem_of_header(row)
            if problem:
                yield data.bad(line, problem)
                if not columns:
                    return
            elif not columns:
                columns = row
            else:
                yield _document(dict(zip(columns, row, strict=True)), line, keys, data)


class _InputBytes(io.RawIOBase):
    """The bytes of a segment, as a stream that Python's own readers take."""

    def __init__(self, data: Input) -> None:
        self._data = data

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        block = self._data.read(len(buffer))
        buffer[: len(block)] = block
        return len(block)


def _document(record: dict[str, str], line: int, keys: Keys, data: Input) -> Document | Skipped:
    """The document of a row; an empty date is none."""
    date = field(record, keys.date) if keys.date else None
    text = field(record, keys.text)
    if isinstance(text, str) and len(text.encode()) > compressed.MAX_DOCUMENT_BYTES:
        return data.too_long(line)
    return document_of(text, date or None, line, keys, data)


def _problem_of_header(names: list[str]) -> str:
    """Why line 1 does not name the columns; "" if it does."""
    if not _is_utf8(names):
        return "not UTF-8"
    repeated = [name for name in names if names.count(name) > 1]
    if repeated:
        return f"two columns `{repeated[0]}`"
    for separator in _OTHER_SEPARATORS:
        if len(names) == 1 and separator in names[0]:
            return f"a single column, {names[0][:60]!r}: are commas between the columns?"
    return ""


def _problem_of_row(row: list[str], columns: list[str]) -> str:
    """Why a row is no record; "" if it is one."""
    if not _is_utf8(row):
        return "not UTF-8"
    if len(row) != len(columns):
        return f"{len(row)} values, where line 1 names {len(columns)} columns"
    return ""


def _is_utf8(values: list[str]) -> bool:
    """Whether no byte of the values had to be escaped."""
    try:
        "".join(values).encode()
    except UnicodeEncodeError:
        return False
    return True
