"""Files that are either whole or absent: a crash or a reader never meets half of one."""

import errno
import fcntl
import hashlib
import json
import os
import secrets
import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Literal

from alma.errors import UserError

LOCK = ".lock"


@contextmanager
def atomic_write(path: str | os.PathLike[str], mode: Literal["w", "wb"] = "w") -> Iterator[IO[Any]]:
    """Open a file for writing (text is UTF-8) that appears at `path` only when the block ends well.

    The bytes go to a temporary file beside `path`, are fsynced and renamed over it. If the block
    raises, `path` is left as it was and the temporary file is removed. The folder must exist.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    try:
        with open(temporary, mode.replace("w", "x"), encoding=None if "b" in mode else "utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_directory(path.parent)


def write_json_atomic(path: str | os.PathLike[str], obj: Any) -> None:
    """Write `obj` as indented JSON, whole or not at all; NaN and infinity (not JSON) are a ValueError."""
    text = json.dumps(obj, indent=2, ensure_ascii=False, allow_nan=False)
    with atomic_write(path) as file:
        file.write(text + "\n")


def save_tensors(path: str | os.PathLike[str], state: Any) -> None:
    """`torch.save` to a file that is whole or absent; UserError when it cannot be written."""
    import torch

    try:
        with atomic_write(path, "wb") as file:
            torch.save(state, file)
    except (OSError, RuntimeError) as error:  # torch wraps what the system says of a full disk
        raise UserError(
            f"{path}: cannot be written ({type(error).__name__}: full disk, quota?); make room and "
            "run the same again, it goes on from the last checkpoint"
        ) from error


_held: dict[tuple[int, int, str], object] = {}
"""Locks of this process, by device and inode of the directory and name of the file.

A POSIX lock does not exclude threads of its process, which loses it by closing any descriptor of the file: it
must not open the file of a lock that it holds.
"""
os.register_at_fork(after_in_child=_held.clear)  # a child inherits none
_HELD_ELSEWHERE = (errno.EAGAIN, errno.EACCES)
_FLOCK = "hhqqi4x"  # struct flock of 64-bit Linux: type, whence, start, length, pid


@contextmanager
def locked(directory: Path, name: str = LOCK) -> Iterator[None]:
    """Hold a lock on `directory`, which excludes every other thread, process and node.

    It is a POSIX lock on the file `name` in it, made where missing and never removed: NFS keeps such locks
    across nodes, but neither flock nor locks on directories. The kernel releases it when the process ends.
    UserError when another holds it. A file system without locks is a warning.
    """
    claim, key = object(), _key(directory, name)
    if _held.setdefault(key, claim) is not claim:
        raise _busy(directory, _self())
    try:
        descriptor = os.open(directory / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            _acquire(descriptor, directory)
            try:
                yield
            finally:
                _note(descriptor, "")
        finally:
            os.close(descriptor)  # releases the lock
    finally:
        _held.pop(key, None)


def holder(directory: Path, name: str = LOCK) -> str | None:
    """Which process holds `locked(directory, name)`, such as "pid 123 on node7"; None if none is known to."""
    try:
        if _key(directory, name) in _held:
            return _self()
        descriptor = os.open(directory / name, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, *_ = struct.unpack(_FLOCK, fcntl.fcntl(descriptor, fcntl.F_GETLK, asked))
        return None if kind == fcntl.F_UNLCK else _holder_of(descriptor)
    except OSError:  # no locks here
        return None
    finally:
        os.close(descriptor)


def _acquire(descriptor: int, directory: Path) -> None:
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _HELD_ELSEWHERE:
            raise _busy(directory, _holder_of(descriptor)) from None
        print(f"warning: {directory}: no locks here, start one process at a time", file=sys.stderr)
        return
    _note(descriptor, _self())


def _note(descriptor: int, holder: str) -> None:
    """Write who holds the lock into its file; a full disk is no obstacle, for only people read it."""
    with suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, holder.encode(), 0)
        os.fsync(descriptor)


def _key(directory: Path, name: str) -> tuple[int, int, str]:
    found = os.stat(directory)
    return found.st_dev, found.st_ino, name


def _self() -> str:
    return f"pid {os.getpid()} on {socket.gethostname()}"


def _holder_of(descriptor: int) -> str:
    return os.pread(descriptor, 200, 0).decode(errors="replace") or "not known which"


def _busy(directory: Path, who: str) -> UserError:
    return UserError(
        f"{directory}: another process is at work here ({who}); let it end or choose another --out"
    )


def sha256_file(path: str | os.PathLike[str]) -> str:
    """SHA-256 of a file's bytes, as 64 hex digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def make_directory(path: Path) -> None:
    """Make the directory and its parents if missing. UserError when a file is in the way."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise UserError(f"{path} is not a folder and cannot become one: choose another --out") from None


def fsync_directory(path: str | os.PathLike[str]) -> None:
    """Make new and renamed files in the folder `path` survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
