"""Files of JSON lines that grow: each line is written whole, and a killed write leaves no part.

Readers ignore an incomplete last line, which `drop_partial_line` removes.
"""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

from alma.files import fsync_directory, open_for_writing, read_file


def append_line(path: Path, text: str) -> None:
    """Append a line, written and fsynced on return; `text` has no newline.

    OSError: the disk is full; no part of the line remains. UserError: the file is a link or a pipe.
    """
    line = f"{text}\n".encode()
    descriptor = open_for_writing(path, os.O_APPEND)
    try:
        # A single write, so that a concurrent reader sees at most one incomplete line.
        if os.write(descriptor, line) < len(line):
            drop_partial_line(path)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    fsync_directory(path.parent)


def complete_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Number, from 1 on, and bytes of each complete line. UserError: the file is a pipe."""
    yield from enumerate(read_file(path).split(b"\n")[:-1], start=1)


def drop_partial_line(path: Path) -> None:
    """Truncate a file after its last newline; none is no error."""
    if path.exists():
        with open(open_for_writing(path), "rb+") as file:
            file.truncate(file.read().rfind(b"\n") + 1)
            os.fsync(file.fileno())


def version(path: Path) -> tuple[int, ...]:
    """Differs whenever the content of a file does; () of a file that is not there."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return ()
    return status.st_ino, status.st_size, status.st_mtime_ns
