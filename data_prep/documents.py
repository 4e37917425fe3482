"""Reads documents out of text, JSON lines and their compressed forms, cut into fixed units of work.

A document is normalised text: lines without leading or trailing space, every run of whitespace one space,
no empty lines, joined by newlines.
"""

import gzip
import io
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import orjson
import zstandard

from alma.errors import UserError

UNIT_BYTES = 64 << 20
"""Input bytes a unit of work aims at; fixed, so that units never depend on the number of workers."""

_TEXT = (".txt", ".txt.gz", ".txt.zst")
_JSON = (".jsonl", ".jsonl.gz", ".jsonl.zst")
_PLAIN = (".txt", ".jsonl")
SUFFIXES = _TEXT + _JSON


class Segment(NamedTuple):
    """Bytes [start, end) of a file of one source; a compressed file is always one whole segment."""

    source: str
    path: str
    start: int
    end: int


Unit = tuple[Segment, ...]


@dataclass(frozen=True)
class Reader:
    """How documents are cut out of text."""

    documents: str = "blank-line"
    """`blank-line`: blank lines (nothing but ASCII whitespace) separate documents; `file`: one a file."""
    max_document_words: int = 0
    """Documents longer than this many words are split between lines; 0: never."""

    def read(self, unit: Unit) -> Iterator[tuple[str, str, int]]:
        """Yield (source, text, words) for each document with at least one word, in the unit's order.

        UserError: bytes that are not UTF-8, malformed JSON, a record without `text`, a damaged archive.
        """
        for segment in unit:
            for raw in self._raw_documents(segment):
                for lines, words in self._split(raw):
                    yield segment.source, "\n".join(lines), words

    def _split(self, raw: str) -> Iterator[tuple[list[str], int]]:
        """Normalise a document; yield its lines and words, in several pieces if it is too long."""
        lines: list[str] = []
        words = 0
        for line in raw.split("\n"):
            tokens = line.split()
            if not tokens:
                continue
            if lines and self.max_document_words and words + len(tokens) > self.max_document_words:
                yield lines, words
                lines, words = [], 0
            lines.append(" ".join(tokens))
            words += len(tokens)
        if lines:
            yield lines, words

    def _raw_documents(self, segment: Segment) -> Iterator[str]:
        try:
            with _open(segment.path) as file:
                if _is_json(segment.path):
                    yield from _json_documents(file, segment)
                elif self.documents == "file":
                    yield _decode(file.read(), segment.path, 0)
                else:
                    yield from _blocks(file, segment)
        except (EOFError, gzip.BadGzipFile, zlib.error, zstandard.ZstdError) as error:
            raise UserError(f"{segment.path}: damaged or truncated ({error}); copy the file again") from error

    def cuttable(self, path: str) -> bool:
        """Whether a file can be read from the middle."""
        return path.endswith(_PLAIN) and (self.documents == "blank-line" or _is_json(path))


def find_files(path: str) -> list[str]:
    """The corpus files at `path`: itself, or all below a directory, sorted; hidden and `_*` files left out.

    UserError: nothing there, no files in the directory, or a file of unknown suffix.
    """
    root = Path(path)
    if root.is_file():
        files = [root]
    elif root.is_dir():
        files = sorted(
            file for file in root.rglob("*") if file.is_file() and not file.name.startswith((".", "_"))
        )
    else:
        raise UserError(f"{path}: no such file or directory")
    for file in files:
        if not file.name.endswith(SUFFIXES):
            raise UserError(f"{file}: unknown suffix; known are {' '.join(SUFFIXES)}")
    if not files:
        raise UserError(f"{path}: an empty directory; expected files with {' '.join(SUFFIXES)}")
    return [str(file.absolute()) for file in files]


def make_units(sources: list[tuple[str, str]], reader: Reader, unit_bytes: int = UNIT_BYTES) -> list[Unit]:
    """Cut the files, given as (source, path), into units of about `unit_bytes`; small files share a unit."""
    units: list[Unit] = []
    unit: list[Segment] = []
    size = 0
    for source, path in sources:
        for segment in _segments(source, path, reader, unit_bytes):
            if unit and size + segment.end - segment.start > unit_bytes:
                units.append(tuple(unit))
                unit, size = [], 0
            unit.append(segment)
            size += segment.end - segment.start
    return [*units, tuple(unit)] if unit else units


def _segments(source: str, path: str, reader: Reader, unit_bytes: int) -> Iterator[Segment]:
    size = os.path.getsize(path)
    if not reader.cuttable(path):
        yield Segment(source, path, 0, size)
        return
    start = 0
    with open(path, "rb") as file:
        while start < size:
            end = _border(file, start + unit_bytes, size, _is_json(path))
            yield Segment(source, path, start, end)
            start = end


def _border(file: IO[bytes], position: int, size: int, lines: bool) -> int:
    """The first byte at or after `position` that follows a whole document."""
    if position >= size:
        return size
    file.seek(position - 1)
    file.readline()  # to the end of the line that holds the byte before `position`
    while not lines and (line := file.readline()) and not line.isspace():
        pass
    return file.tell()


def _is_json(path: str) -> bool:
    return path.endswith(_JSON)


def _decode(raw: bytes, path: str, offset: int) -> str:
    """Decode UTF-8 found at `offset` of the uncompressed file; a byte order mark there at 0 is dropped."""
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}: not UTF-8 at byte {offset + error.start} of the text; convert it (iconv -t UTF-8)"
        ) from error
    return text.removeprefix("\ufeff") if offset == 0 else text


def _blocks(file: IO[bytes], segment: Segment) -> Iterator[str]:
    """The blocks of lines between blank lines."""
    block: list[bytes] = []
    start = position = segment.start
    for line in _lines(file, segment):
        position += len(line)
        if not line.isspace():
            block.append(line)
            continue
        if block:
            yield _decode(b"".join(block), segment.path, start)
            block = []
        start = position
    if block:
        yield _decode(b"".join(block), segment.path, start)


def _json_documents(file: IO[bytes], segment: Segment) -> Iterator[str]:
    position = segment.start
    for line in _lines(file, segment):
        position += len(line)
        if line.isspace():
            continue
        try:
            text = orjson.loads(line)["text"]
            if not isinstance(text, str):
                raise TypeError
        except orjson.JSONDecodeError as error:
            problem = f"malformed JSON ({error})"
        except (KeyError, TypeError):
            problem = "no field `text` that holds a string"
        else:
            yield text
            continue
        where = _line_number(segment.path, position)
        raise UserError(f"{segment.path}:{where}: {problem}; mend or remove this line")


def _lines(file: IO[bytes], segment: Segment) -> Iterator[bytes]:
    """The lines of the segment, which ends at the end of a line."""
    if not segment.path.endswith(_PLAIN):
        yield from file
        return
    file.seek(segment.start)
    left = segment.end - segment.start
    while left > 0 and (line := file.readline()):
        yield line
        left -= len(line)


def _line_number(path: str, end: int) -> int:
    """The number, from 1, of the line that ends at byte `end` of the uncompressed file."""
    number = position = 0
    with _open(path) as file:
        while position < end:
            position += len(file.readline())
            number += 1
    return number


def _open(path: str) -> IO[bytes]:
    if path.endswith(".gz"):
        return cast(IO[bytes], gzip.open(path))
    if path.endswith(".zst"):
        return io.BufferedReader(_Zstd(path), 1 << 20)
    return open(path, "rb", buffering=1 << 20)


class _Zstd(io.RawIOBase):
    """Reads every frame of a file; zstandard's own reader takes a truncated file for a whole one."""

    def __init__(self, path: str) -> None:
        self._file = open(path, "rb")  # noqa: SIM115
        self._frame: Any = None
        self._ready = memoryview(b"")
        self._input = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        while not self._ready:
            self._input = self._input or self._file.read(1 << 16)
            if not self._input:
                if self._frame is not None:
                    raise EOFError("the last zstd frame is incomplete")
                return 0
            if self._frame is None:
                self._frame = zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
            self._ready = memoryview(self._frame.decompress(self._input))
            self._input = b""
            if self._frame.eof:
                self._input, self._frame = self._frame.unused_data, None
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def close(self) -> None:
        self._file.close()
        super().close()
