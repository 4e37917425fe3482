"""Bytes of input files, compressed or not, in blocks and in runs of whole documents; bad input as `Skipped`.

Memory is bounded by one document and one block of text: what is longer than MAX_DOCUMENT_BYTES is read past
without being kept.
"""

import bz2
import gzip
import io
import lzma
import os
import re
import zlib
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import zstandard

MAX_DOCUMENT_BYTES = 32 << 20
"""Longer documents (or lines of JSON) are bad input; a book of 500,000 words has 3 MB."""

PACKED = {
    ".gz": re.compile(rb"\x1f\x8b\x08"),
    ".zst": re.compile(rb"\x28\xb5\x2f\xfd"),
    ".bz2": re.compile(rb"BZh[1-9]1AY&SY"),
    ".xz": re.compile(rb"\xfd7zXZ\0"),
}
"""The suffixes of compressed files, and how their contents begin."""
ARCHIVE_ERRORS = (EOFError, zlib.error, zstandard.ZstdError, lzma.LZMAError)
"""What reading a damaged archive raises, besides OSError."""
BLOCK = 1 << 20
_ZSTD_INPUT = 2048  # compressed bytes per call; they decompress to at most 64 MiB
_LINE_BYTES = 1 << 13
BOM = b"\xef\xbb\xbf"


class Skipped(NamedTuple):
    """Bad input of a file. Offsets count uncompressed bytes, or the records of a .parquet file, from 0."""

    path: str
    offset: int
    reason: str
    remedy: str = "fix or remove it, or leave it out with --on-bad-input skip"

    def __str__(self) -> str:
        what = "record" if self.path.endswith(".parquet") else "byte"
        return f"{self.path}: {self.reason} at {what} {self.offset}"


class Segment(NamedTuple):
    """Bytes [start, end) of a file of one source; a compressed file is always one segment."""

    source: str
    path: str
    start: int
    end: int


class Border(NamedTuple):
    """What ends a document within lines of text."""

    usual: tuple[bytes, ...]
    """Its usual forms, found fast by `bytes.rfind`."""
    pattern: re.Pattern[bytes]
    """All its forms."""

    def last(self, text: bytes) -> int:
        """The end of the last usual border in `text`; without one, of the last border; 0 if there is none."""
        end = max((at + len(usual) for usual in self.usual if (at := text.rfind(usual)) >= 0), default=0)
        if end:
            return end
        for match in self.pattern.finditer(text):
            end = match.end()
        return end


class Damaged(Exception):
    """The rest of the file cannot be read."""


class WrongKind(Exception):
    """The file is not of the kind that its name says; arguments: what it is, and the remedy."""


def border_after(file: IO[bytes], position: int, border: Border) -> int:
    """The first byte at or after `position` that follows a border; the size of the file if none does."""
    file.seek(position - 1)
    held = b""
    while block := file.read(BLOCK):
        held += block
        if match := border.pattern.search(held):
            return file.tell() - len(held) + match.end()
        held = _tail(held)
    return file.tell()


class Input:
    """The uncompressed bytes of a segment."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self.position = segment.start
        self._end = None if packing(segment.path) else segment.end
        self._error: Exception | None = None

    @cached_property
    def _file(self) -> IO[bytes]:
        file = open_file(self.segment.path)
        if self.position:
            file.seek(self.position)
        return file

    def close(self) -> None:
        """Close the file if it was opened."""
        if "_file" in self.__dict__:  # cached_property keeps its value there
            self._file.close()

    def bad(self, offset: int, reason: str, *remedy: str) -> Skipped:
        """Bad input at `offset`."""
        return Skipped(self.segment.path, offset, reason, *remedy)

    def read(self, size: int) -> bytes:
        """The next `size` bytes, fewer at the end. An error is raised once all bytes before it are read."""
        if self._error:
            raise self._error
        left = size if self._end is None else min(size, self._end - self.position)
        parts = []
        try:
            while left > 0 and (part := cast(Any, self._file).read1(left)):
                parts.append(part)
                left -= len(part)
                self.position += len(part)
        except (OSError, *ARCHIVE_ERRORS) as error:
            if not parts:
                raise
            self._error = error
        return b"".join(parts)

    def readline(self, size: int = _LINE_BYTES) -> bytes:
        """The next line, or its first `size` bytes."""
        if self._error:
            raise self._error
        line = self._file.readline(size)
        self.position += len(line)
        return line

    def decode(self, raw: bytes, offset: int) -> str | Skipped:
        """Decode the UTF-8 text at `offset`."""
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            return self.bad(offset + error.start, "not UTF-8")

    def too_long(self, offset: int) -> Skipped:
        """A document at `offset` that exceeds MAX_DOCUMENT_BYTES."""
        return self.bad(offset, f"a document longer than {MAX_DOCUMENT_BYTES:,} bytes")

    def runs(self, border: Border) -> Iterator[tuple[int, bytes] | Skipped]:
        """(offset, text) of runs of whole documents; documents that are too long are skipped.

        A byte order mark at the beginning of the file is dropped.
        """
        held, start, skipping = b"", self.position, False
        while block := self.read(BLOCK if skipping else self._step(len(held))):
            held += block
            if start == 0 and held.startswith(BOM):
                held, start = held[len(BOM) :], len(BOM)
            if skipping:
                match = border.pattern.search(held)
                held = held[match.end() :] if match else _tail(held)
                start, skipping = self.position - len(held), not match
                continue
            if end := border.last(held):
                run, held = held[:end], held[end:]
                yield start, run
                start += end
            if held[:1].isspace():  # white space before a document does not count towards its length
                start += indent(held)
                held = held.lstrip()
            if len(held) > MAX_DOCUMENT_BYTES:
                yield self.too_long(start)
                held, skipping = _tail(held), True
        if held and not skipping:
            yield start, held

    def _step(self, held: int) -> int:
        """Bytes to read next: as many as are held, so that a long document takes linear time."""
        return min(max(BLOCK, held), MAX_DOCUMENT_BYTES + 1 - held)


def _tail(text: bytes) -> bytes:
    """A short suffix of `text` that keeps any beginning of a border; `text` itself contains none."""
    line = text[max(text.rfind(b"\n"), 0) :]
    if len(line) <= _LINE_BYTES:
        return line
    return b"\n " if line.startswith(b"\n") and line.isspace() else line[-16:]


def indent(text: bytes) -> int:
    """Bytes of white space at the beginning."""
    return len(text) - len(text.lstrip())


def packing(path: str) -> str:
    """The suffix of a compressed file, one of PACKED; else empty."""
    suffix = Path(path).suffix
    return suffix if suffix in PACKED else ""


def open_file(path: str) -> IO[bytes]:
    """Open a file for reading, decompressed by its suffix.

    Damaged: an archive of no bytes. WrongKind: an archive whose name does not say so.
    """
    suffix = packing(path)
    if suffix and not os.path.getsize(path):  # the archive of an empty file has a header
        raise Damaged("an archive of no bytes")
    if suffix == ".zst":
        return io.BufferedReader(_Zstd(path), BLOCK)
    if suffix:
        module: Any = {".gz": gzip, ".bz2": bz2, ".xz": lzma}[suffix]
        return module.open(path)
    file = io.BufferedReader(io.FileIO(path), BLOCK)
    for suffix, beginning in PACKED.items():
        if beginning.match(file.peek()):
            file.close()
            raise WrongKind(f"compressed, as {suffix} files are", f"rename it to {Path(path).name}{suffix}")
    return file


class _Zstd(io.RawIOBase):
    """All frames of a .zst file; EOFError if it is truncated, which zstandard's own reader ignores."""

    def __init__(self, path: str) -> None:
        self._file = open(path, "rb")  # noqa: SIM115
        self._frame: Any = None
        self._ready = memoryview(b"")
        self._input = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        while not self._ready:
            self._input = self._input or self._file.read(_ZSTD_INPUT)
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
