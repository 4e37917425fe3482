"""Bytes of input files, compressed or not, in blocks and in runs of whole documents; bad input as `Skipped`.

Memory is bounded by one document and one block of text: longer documents are read past, not kept.
"""

import bz2
import io
import lzma
import os
import re
import zlib
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import zstandard

MAX_DOCUMENT_BYTES = 32 << 20
"""Longer documents (or lines of JSON) are bad input; a book of 500,000 words has 3 MB."""


class Packing(NamedTuple):
    """A compression, of one or several frames that follow each other."""

    magic: re.Pattern[bytes]
    frame: Callable[[], Any]  # makes the decompressor of a frame
    padding: int = 0  # a multiple of so many zeros may follow the last frame, and in .xz any frame


PACKED = {
    ".gz": Packing(re.compile(rb"\x1f\x8b\x08"), lambda: zlib.decompressobj(31), padding=1),
    ".zst": Packing(
        re.compile(rb"\x28\xb5\x2f\xfd"),
        lambda: zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj(),
    ),
    ".bz2": Packing(re.compile(rb"BZh[1-9]1AY&SY"), bz2.BZ2Decompressor),
    ".xz": Packing(re.compile(rb"\xfd7zXZ\0"), lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ), padding=4),
}
"""Compressions by the suffix of the file."""
ARCHIVE_ERRORS = (EOFError, zlib.error, zstandard.ZstdError, lzma.LZMAError)
"""What reading a damaged archive raises, besides OSError."""
BLOCK = 1 << 20
_FRAME_INPUT = 2048  # compressed bytes per call; they decompress to at most 64 MiB
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


class Document(NamedTuple):
    """The text of a document, not normalised."""

    text: str
    date: Any = None  # as it is in the file; None: it has none, or dates are not read
    offset: int = 0  # see `Skipped`


class Segment(NamedTuple):
    """Bytes [start, end) of a file of one source; a compressed file is always one segment."""

    source: str
    path: str
    start: int
    end: int


class Damaged(Exception):
    """The rest of the file cannot be read."""


class WrongKind(Exception):
    """The file is not of the kind that its name says; arguments: what it is, and the remedy."""


class Input:
    """The uncompressed bytes of a segment."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self.position = segment.start
        self._end = None if packing(segment.path) else segment.end
        self._error: Exception | None = None
        self._again = io.BytesIO()

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
        """The next `size` bytes, fewer at the end. An error is raised once all bytes before it are read."""
        left = size if self._end is None else min(size, self._end - self.position)
        parts = [self._again.read(left)]
        left -= len(parts[0])
        try:
            while left > 0 and not self._error and (part := cast(Any, self._file).read1(left)):
                parts.append(part)
                left -= len(part)
        except (OSError, *ARCHIVE_ERRORS) as error:
            self._error = error
        data = b"".join(parts)
        if self._error and not data:
            raise self._error
        self.position += len(data)
        return data

    def unread(self, data: bytes) -> None:
        """Make `data`, which was read last, the next to be read."""
        self._again = io.BytesIO(data + self._again.read())
        self.position -= len(data)

    def readline(self, size: int = _LINE_BYTES) -> bytes:
        """The next line, or its first `size` bytes."""
        line = self._again.readline(size)
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
        """A document at `offset` that exceeds MAX_DOCUMENT_BYTES."""
        return self.bad(offset, f"a document longer than {MAX_DOCUMENT_BYTES:,} bytes", *remedy)

    def spans(self, border: re.Pattern[bytes]) -> Iterator[tuple[int, bytes | None, bool]]:
        """Offset and bytes between borders, maybe none, and whether a border follows.

        None stands for the bytes of a document that is too long; byte order marks that begin one are dropped.
        """
        held, start, skipping = b"", self.position, False
        while True:
            step = min(max(BLOCK, len(held)), MAX_DOCUMENT_BYTES + 1 - len(held))  # doubles: linear time
            block = self.read(BLOCK if skipping else step)
            if not block:
                break
            held += block
            at = 0
            for match in border.finditer(held):
                if not skipping:
                    at += len(BOM) * held.startswith(BOM, at)
                    yield start + at, held[at : match.start()], True
                at, skipping = match.end(), False
            if not skipping:  # white space before a document does not count towards its length
                at += indent(held[at:])
                if len(held) - at > MAX_DOCUMENT_BYTES:
                    yield start + at, None, False
                    skipping = True
            rest = _tail(held[at:]) if skipping else held[at:]
            held, start = rest, start + len(held) - len(rest)
        if held and not skipping:
            at = len(BOM) * held.startswith(BOM)
            yield start + at, held[at:], False


def _tail(text: bytes) -> bytes:
    """A short suffix of `text` that keeps any beginning of a border; `text` itself contains none."""
    line = text[max(text.rfind(b"\n"), 0) :]
    if len(line) <= _LINE_BYTES:
        return line
    return b"\n " if line.startswith(b"\n") and line.isspace() else line[-16:]


def indent(text: bytes) -> int:
    """Bytes of white space at the beginning."""
    return len(text) - len(text.lstrip())


def border_after(file: IO[bytes], position: int, border: re.Pattern[bytes]) -> int:
    """The first byte at or after `position` that follows a border; the size of the file if none does."""
    file.seek(position - 1)
    held = b""
    while block := file.read(BLOCK):
        held += block
        if match := border.search(held):
            return file.tell() - len(held) + match.end()
        held = _tail(held)
    return file.tell()


def packing(path: str) -> str:
    """The suffix of a compressed file, one of PACKED; else empty."""
    suffix = Path(path).suffix
    return suffix if suffix in PACKED else ""


def open_file(path: str) -> IO[bytes]:
    """Open a file for reading, decompressed by its suffix.

    Damaged: an archive of no bytes. WrongKind: an archive whose name does not say so.
    """
    if suffix := packing(path):
        if not os.path.getsize(path):  # the archive of an empty file has a header
            raise Damaged("an archive of no bytes")
        return io.BufferedReader(_Frames(path, PACKED[suffix]), BLOCK)
    file = io.BufferedReader(io.FileIO(path), BLOCK)
    for suffix, packed in PACKED.items():
        if packed.magic.match(file.peek()):
            file.close()
            raise WrongKind(f"compressed, as {suffix} files are", f"rename it to {Path(path).name}{suffix}")
    return file


class _Frames(io.RawIOBase):
    """All frames of a compressed file. EOFError: the last one is incomplete.

    Gives the bytes of `gzip -dc`, `bzip2 -dc`, `xz -dc`, `zstd -dc`, or an error where these fail or warn.
    """

    # Python's own readers stop in silence at bytes that begin no frame, and zstandard's at a truncated one.

    def __init__(self, path: str, packing: Packing) -> None:
        self._file = open(path, "rb")  # noqa: SIM115
        self._packing = packing
        self._frame = packing.frame()
        self._ready = memoryview(b"")
        self._input = b""
        self._zeros = 0  # after the last frame

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        while not self._ready:
            data, self._input = self._input or self._file.read(_FRAME_INPUT), b""
            if not data:
                if self._frame is not None or self._zeros % (self._packing.padding or 1):
                    raise EOFError("the last frame is incomplete")
                return 0
            if self._frame is None:
                frame = data.lstrip(b"\0") if self._packing.padding else data
                self._zeros += len(data) - len(frame)
                if not frame:
                    continue
                if self._zeros % 4 or (self._zeros and self._packing.padding != 4):
                    raise EOFError("padding between frames")
                data, self._frame, self._zeros = frame, self._packing.frame(), 0
            self._ready = memoryview(self._frame.decompress(data))
            if self._frame.eof:
                self._input, self._frame = self._frame.unused_data, None
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def close(self) -> None:
        self._file.close()
        super().close()
