"""Read input files, compressed or not, in blocks or whole documents; bad input becomes `Skipped`.

Memory is bounded by one document and one block of text: documents that are too long are skipped
without being kept.
"""

import bz2
import importlib.util
import io
import lzma
import os
import re
import zlib
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from alma.errors import require_package

MAX_DOCUMENT_BYTES = 32 << 20
"""Most bytes of a document or line of JSON; longer ones are bad input. 500,000 words take 3 MB."""


def _frame_of_zstd() -> Any:
    """The decompressor of a frame. UserError: zstandard, which the core lacks, is missing."""
    require_package("zstandard", "a .zst file")
    import zstandard

    return zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()


class Packing(NamedTuple):
    """A compression. A file has one or several frames, one after another."""

    magic: re.Pattern[bytes]
    frame: Callable[[], Any]  # makes the decompressor of a frame
    padding: int = 0
    """Zero bytes may follow the last frame (in .xz any frame), in multiples of this number."""


PACKED = {
    ".gz": Packing(re.compile(rb"\x1f\x8b\x08"), lambda: zlib.decompressobj(31), padding=1),
    ".zst": Packing(re.compile(rb"\x28\xb5\x2f\xfd"), _frame_of_zstd),
    ".bz2": Packing(re.compile(rb"BZh[1-9]1AY&SY"), bz2.BZ2Decompressor),
    ".xz": Packing(
        re.compile(rb"\xfd7zXZ\0"), lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ), padding=4
    ),
}
"""Compressions by the suffix of the file."""
BLOCK = 1 << 20
_FRAME_INPUT = 2048  # compressed bytes per call; they decompress to at most 64 MiB
_LINE_BYTES = 1 << 13
BOM = b"\xef\xbb\xbf"


def archive_errors(other_error: type[Exception]) -> tuple[type[Exception], ...]:
    """Errors raised by reading a damaged archive, besides OSError, and `other_error`."""
    errors: tuple[type[Exception], ...] = (other_error, EOFError, zlib.error, lzma.LZMAError)
    if importlib.util.find_spec("zstandard") is None:
        return errors
    import zstandard

    return (*errors, zstandard.ZstdError)


class Skipped(NamedTuple):
    """Bad input of a file.

    Offsets count uncompressed bytes, or the records of a .parquet or .arrow file, from 0; of a .csv
    file its lines, from 1.
    """

    path: str
    offset: int
    reason: str
    remedy: str = "fix or remove it, or leave it out with --on-bad-input skip"

    def __str__(self) -> str:
        unit = "byte"
        if self.path.endswith((".parquet", ".arrow")):
            unit = "record"
        elif Path(self.path.removesuffix(packing(self.path))).suffix == ".csv":
            unit = "line"
        return f"{self.path}: {self.reason} at {unit} {self.offset}"


class Document(NamedTuple):
    """The text of a document, not normalised."""

    text: str
    date: Any = None  # as in the file; None: no date, or dates are not read
    offset: int = 0  # see `Skipped`


class Segment(NamedTuple):
    """Bytes [start, end) of a file of one source; a compressed file is always one segment."""

    source: str
    path: str
    start: int
    end: int


class Damaged(Exception):
    """The file is damaged: its rest cannot be read."""


class WrongKind(Exception):
    """The file is not of the kind that its name says; arguments: what it is, and the remedy."""


class TextSpan(NamedTuple):
    """The bytes between two borders in a file."""

    offset: int
    text: bytes | None
    """The bytes, without a byte order mark; None: too long for a document."""
    closed: bool  # whether a border follows


class Input:
    """The uncompressed bytes of a segment."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self.position = segment.start
        self._end = None if packing(segment.path) else segment.end
        self._error: Exception | None = None
        self._unread = io.BytesIO()

    @cached_property
    def _file(self) -> IO[bytes]:
        file = open_file(self.segment.path)
        if self.position:
            file.seek(self.position)
        return file

    def close(self) -> None:
        """Close the file if it was opened."""
        if "_file" in vars(self):  # cached_property keeps its value there
            self._file.close()

    def bad(self, offset: int, reason: str, *remedy: str) -> Skipped:
        """Bad input at `offset`."""
        return Skipped(self.segment.path, offset, reason, *remedy)

    def read(self, size: int) -> bytes:
        """The next `size` bytes, fewer at the end.

        An error is raised once all bytes before it are read.
        """
        missing = size
        if self._end is not None:
            missing = min(size, self._end - self.position)
        parts = [self._unread.read(missing)]
        missing -= len(parts[0])
        try:
            while missing > 0 and not self._error:
                part = cast(Any, self._file).read1(missing)
                if not part:
                    break
                parts.append(part)
                missing -= len(part)
        except archive_errors(OSError) as error:
            self._error = error
        data = b"".join(parts)
        if self._error and not data:
            raise self._error
        self.position += len(data)
        return data

    def unread(self, data: bytes) -> None:
        """Make `data`, which was read last, the next to be read."""
        self._unread = io.BytesIO(data + self._unread.read())
        self.position -= len(data)

    def readline(self, size: int = _LINE_BYTES) -> bytes:
        """The next line, or its first `size` bytes."""
        line = self._unread.readline(size)
        if not self._error and not line.endswith(b"\n"):
            line += self._file.readline(size - len(line))
        if self._error and not line:
            raise self._error
        self.position += len(line)
        return line

    def decode(self, raw: bytes, offset: int, date: Any = None) -> Document | Skipped:
        """The document of the UTF-8 text at `offset`."""
        try:
            return Document(raw.decode(), date, offset)
        except UnicodeDecodeError as error:
            return self.bad(offset + error.start, "not UTF-8")

    def too_long(self, offset: int, *remedy: str) -> Skipped:
        """Bad input: a document at `offset` that exceeds MAX_DOCUMENT_BYTES."""
        return self.bad(offset, f"a document longer than {MAX_DOCUMENT_BYTES:,} bytes", *remedy)

    def spans(self, border: re.Pattern[bytes]) -> Iterator[TextSpan]:
        """Yield the bytes between borders, which may be none, and those after the last border."""
        buffer = b""
        start = self.position  # offset of the buffer in the file
        skipping = False  # whether the buffer is the rest of a document that is too long
        while True:
            step = BLOCK
            if not skipping:  # double the buffer, so that the search takes linear time in total
                step = min(max(BLOCK, len(buffer)), MAX_DOCUMENT_BYTES + 1 - len(buffer))
            block = self.read(step)
            if not block:
                break
            buffer += block
            at = 0  # offset of the document in the buffer
            for match in border.finditer(buffer):
                if not skipping:
                    at += _bom_bytes(buffer, at)
                    yield TextSpan(start + at, buffer[at : match.start()], True)
                at = match.end()
                skipping = False
            if not skipping:  # white space before a document does not count towards its length
                at += indent(buffer[at:])
                if len(buffer) - at > MAX_DOCUMENT_BYTES:
                    yield TextSpan(start + at, None, False)
                    skipping = True
            remainder = buffer[at:]
            if skipping:
                remainder = _tail(remainder)
            start += len(buffer) - len(remainder)
            buffer = remainder
        if buffer and not skipping:
            at = _bom_bytes(buffer, 0)
            yield TextSpan(start + at, buffer[at:], False)


def _bom_bytes(text: bytes, at: int) -> int:
    """The length of a byte order mark at `at`; 0: there is none."""
    return len(BOM) if text.startswith(BOM, at) else 0


def _tail(text: bytes) -> bytes:
    """A suffix of `text` that may be the start of a border; `text` contains no whole border.

    It is kept so that a border that continues in the next block is found.
    """
    line = text[max(text.rfind(b"\n"), 0) :]
    if len(line) <= _LINE_BYTES:
        return line
    if line.startswith(b"\n") and line.isspace():
        return b"\n "
    return line[-16:]


def indent(text: bytes) -> int:
    """Number of bytes of white space at the beginning of `text`."""
    return len(text) - len(text.lstrip())


def border_after(file: IO[bytes], position: int, border: re.Pattern[bytes]) -> int:
    """The first byte at or after `position` that follows a border; else the size of the file."""
    file.seek(position - 1)
    buffer = b""
    while block := file.read(BLOCK):
        buffer += block
        match = border.search(buffer)
        if match:
            return file.tell() - len(buffer) + match.end()
        buffer = _tail(buffer)
    return file.tell()


def packing(path: str) -> str:
    """The suffix of a compressed file, one of PACKED; else empty."""
    suffix = Path(path).suffix
    return suffix if suffix in PACKED else ""


def open_file(path: str) -> IO[bytes]:
    """Open a file for reading, decompressed by its suffix.

    Damaged: an archive of no bytes. WrongKind: an archive whose name does not say so.
    """
    suffix = packing(path)
    if suffix:
        if not os.path.getsize(path):  # even the archive of an empty file has a header
            raise Damaged("an archive of no bytes")
        return io.BufferedReader(_Frames(path, PACKED[suffix]), BLOCK)
    file = io.BufferedReader(io.FileIO(path), BLOCK)
    for suffix, packed in PACKED.items():
        if packed.magic.match(file.peek()):
            file.close()
            remedy = f"rename it to {Path(path).name}{suffix}"
            raise WrongKind(f"compressed, as {suffix} files are", remedy)
    return file


class _Frames(io.RawIOBase):
    """The bytes of all frames of a compressed file. EOFError: the last one is incomplete.

    The same bytes as from `gzip -dc`, `bzip2 -dc`, `xz -dc`, `zstd -dc`, or an error where these
    fail or warn.
    """

    # Not the libraries' own readers: Python's stop silently at bytes that begin no frame, and
    # zstandard's at a truncated frame.

    def __init__(self, path: str, packing: Packing) -> None:
        self._file = open(path, "rb")  # noqa: SIM115
        self._packing = packing
        self._frame = packing.frame()  # None between two frames
        self._ready = memoryview(b"")  # decompressed
        self._input = b""  # compressed, and not decompressed yet
        self._zeros = 0  # number of zero bytes since the last frame

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        while not self._ready:
            data = self._input or self._file.read(_FRAME_INPUT)
            self._input = b""
            if not data:
                self._check_end()
                return 0
            if self._frame is None:
                data = self._next_frame(data)
            if data:
                self._ready = memoryview(self._frame.decompress(data))
                if self._frame.eof:
                    self._input = self._frame.unused_data
                    self._frame = None
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def _check_end(self) -> None:
        """Raise EOFError if the file ends within a frame or its padding."""
        if self._frame is not None or self._zeros % (self._packing.padding or 1):
            raise EOFError("the last frame is incomplete")

    def _next_frame(self, data: bytes) -> bytes:
        """Start a frame after the padding in `data`; returns the data from there.

        EOFError: padding that this compression cannot have before a frame.
        """
        frame = data
        if self._packing.padding:
            frame = data.lstrip(b"\0")
        self._zeros += len(data) - len(frame)
        if frame:
            if self._zeros % 4 or (self._zeros and self._packing.padding != 4):
                raise EOFError("padding between frames")
            self._frame = self._packing.frame()
            self._zeros = 0
        return frame

    def close(self) -> None:
        self._file.close()
        super().close()
