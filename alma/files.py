"""Atomic files, and locks on directories that work across nodes."""

import errno
import fcntl
import filecmp
import functools
import hashlib
import json
import os
import secrets
import shutil
import socket
import stat
import struct
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Literal

from alma.errors import UserError

LOCK = ".lock"
_WAIT_SECONDS = 120
_ZIP = b"PK\x03\x04"
_BAD_ZIP = (zipfile.BadZipFile, ValueError, NotImplementedError)
# Follow no link, and do not block on a pipe that has no other end.
_NO_LINK = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CANNOT_GROW = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def atomic_write(
    path: str | os.PathLike[str],
    mode: Literal["w", "wb"] = "w",
    keep_same: bool = False,
    private: bool = False,
) -> Iterator[IO[Any]]:
    """Open a file for writing (text is UTF-8) that appears at `path` only if the block succeeds.

    The bytes go to a temporary file beside `path`, which is fsynced and then renamed to `path`; if
    the block raises, it is removed. A temporary file left by a killed process is reused by the next
    write. The OSError of a full disk names `path`. `keep_same`: if the file already has the same
    bytes, leave it and its modification time alone. `private`: only the owner may read the file.
    Raises UserError if the temporary file is a link, pipe or device (`open_for_writing`).
    """
    path = Path(path)
    descriptor, temporary = _open_temporary(path, 0o600 if private else 0o666)
    try:
        with open(descriptor, mode, encoding=None if "b" in mode else "utf-8") as file:
            try:
                yield file
                file.flush()
                os.fsync(descriptor)
                if keep_same and path.is_file() and filecmp.cmp(temporary, path, shallow=False):
                    temporary.unlink()
                else:
                    os.replace(temporary, path)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
    except OSError as error:
        is_full_for_numpy = error.errno is None and "requested and" in str(error)
        is_full = is_full_for_numpy or error.errno in _CANNOT_GROW
        if error.filename is None and is_full:
            number = error.errno or errno.ENOSPC
            raise OSError(number, os.strerror(number), str(path)) from error
        raise
    fsync_directory(path.parent)


@contextmanager
def filled(out: Path, last: str, errors: tuple[type[Exception], ...]) -> Iterator[Path]:
    """A temporary folder, whose files move into the directory `out` once the block succeeds.

    The file `last` marks a complete directory. UserError: writing raised one of the `errors`.
    """
    make_directory(out)
    try:
        for leftover in out.glob(".filled-*"):  # left by a killed process
            shutil.rmtree(leftover)
        with tempfile.TemporaryDirectory(prefix=".filled-", dir=out) as folder:
            yield Path(folder)
            (out / last).unlink(missing_ok=True)
            mode = stat.S_IMODE(os.stat(Path(folder, last)).st_mode)
            for file in sorted(Path(folder).iterdir(), key=lambda file: file.name == last):
                file.chmod(mode)  # safetensors writes files with mode 600
                os.replace(file, out / file.name)
    except errors as error:
        problem = f"cannot be written ({error}: full disk, quota?)"
        raise UserError(f"{out}: {problem}; free some space and rerun the command") from error


def temporary_of(path: Path) -> Path:
    """The temporary file of an interrupted `atomic_write` of `path`."""
    return path.with_name(f".{path.name}.tmp")


def open_for_writing(path: Path, flags: int = 0, mode: int = 0o666) -> int:
    """Open `path` for reading and writing, and create it if missing; returns a descriptor.

    `flags` are further flags of os.open. The folder may be untrusted: raises UserError if the file
    is a symbolic link, a pipe or a device.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | _NO_LINK | flags, mode)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO):
            raise
        raise UserError(
            f"{path}: a link or a pipe, and a file is to be written here; delete it"
        ) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise UserError(f"{path}: a pipe or a device, and a file is to be written here; delete it")
    return descriptor


def read_file(path: Path) -> bytes:
    """The content of a file.

    OSError: it cannot be read. UserError: it is a pipe or a device, which has no end.
    """
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise UserError(f"{path}: a folder, a pipe or a device in place of a file; delete it")
        return file.read()


def _open_temporary(path: Path, mode: int) -> tuple[int, Path]:
    """Open an empty temporary file beside `path`; returns its descriptor and path.

    It is `temporary_of(path)`, or one with a random name if another process has locked that. It is
    open for reading too, so that it can be memory-mapped.
    """
    temporary = temporary_of(path)
    while True:
        descriptor = open_for_writing(temporary, mode=mode)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with suppress(FileNotFoundError):
                about = os.fstat(descriptor)
                if about.st_nlink > 1:  # a hard link to a file that may be elsewhere
                    raise FileExistsError
                if os.path.samestat(about, os.lstat(temporary)):  # it was not renamed meanwhile
                    os.ftruncate(descriptor, 0)
                    if mode == 0o600:  # an earlier, killed write may have left a readable file
                        os.fchmod(descriptor, mode)
                    return descriptor, temporary
            os.close(descriptor)
        except OSError:  # locked by another process, a hard link, or no locks on this file system
            os.close(descriptor)
            unique = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
            return open_for_writing(unique, os.O_EXCL, mode), unique


def write_json_atomic(path: str | os.PathLike[str], obj: Any, private: bool = False) -> None:
    """Write `obj` as indented JSON, by `atomic_write`. ValueError: it holds NaN or infinity."""
    text = json.dumps(obj, indent=2, ensure_ascii=False, allow_nan=False)
    with atomic_write(path, private=private) as file:
        file.write(text + "\n")


@contextmanager
def writing_checkpoint(
    path: str | os.PathLike[str],
    errors: tuple[type[Exception], ...] = (OSError, RuntimeError),
) -> Iterator[None]:
    """UserError: the block raised one of the `errors`, as the checkpoint `path` cannot be written.

    torch reports a full disk as a RuntimeError.
    """
    try:
        yield
    except errors as error:
        remedy = "free some space and rerun the command, which resumes from the last checkpoint"
        problem = f"cannot be written ({type(error).__name__}: full disk, quota?)"
        raise UserError(f"{path}: {problem}; {remedy}") from error


@contextmanager
def checkpoint_file(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """`atomic_write` of bytes, for `torch.save`. UserError: the file cannot be written."""
    with writing_checkpoint(path), atomic_write(path, "wb") as file:
        yield file


@contextmanager
def locked(directory: Path, name: str = LOCK, patience: float = 0.0) -> Iterator[None]:
    """Hold a lock on `directory` that excludes every other thread, process and node.

    It is a POSIX lock of the open file `name`, which is never removed (docs/design.md). Raises
    UserError if another process still holds it after `patience` seconds, or the file is a link. On
    a file system without locks it only warns.

    Whoever can open the file can hold the lock. So only the owner may open it, and the group if the
    folder is writable for the group (`chmod g+w`).
    """
    shared = os.stat(directory).st_mode & stat.S_IWGRP
    mode = 0o660 if shared else 0o600
    descriptor = open_for_writing(directory / name, mode=mode)
    with suppress(PermissionError):  # the file belongs to another user
        os.fchmod(descriptor, mode)
    deadline = time.monotonic() + patience
    try:
        while True:
            try:
                fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _whole_file(fcntl.F_WRLCK))
                break
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    print(
                        f"warning: {directory}: no locks here, run one process at a time",
                        file=sys.stderr,
                    )
                    break
            if time.monotonic() >= deadline:
                who = f"another process is at work here ({_holder_of(descriptor)})"
                raise UserError(f"{directory}: {who}; wait for it or choose another --out")
            time.sleep(0.2)
        _note(descriptor, f"pid {os.getpid()} on {socket.gethostname()}")
        try:
            yield
        finally:
            _note(descriptor, "")
            # Unlock explicitly: closing is not enough if a child was forked meanwhile.
            with suppress(OSError):
                fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _whole_file(fcntl.F_UNLCK))
    finally:
        os.close(descriptor)


def patiently_locked(directory: Path, name: str = LOCK) -> AbstractContextManager[None]:
    """`locked`, waiting up to two minutes for another holder."""
    return locked(directory, name, _WAIT_SECONDS)


def holder(directory: Path, name: str = LOCK) -> str | None:
    """The process that holds the lock, such as "pid 123 on node7"; None if it is free."""
    try:
        with open(os.open(directory / name, os.O_RDONLY | _NO_LINK), "rb") as file:
            lock = fcntl.fcntl(file, fcntl.F_OFD_GETLK, _whole_file(fcntl.F_WRLCK))
            is_free = lock[:2] == _whole_file(fcntl.F_UNLCK)[:2]
            return None if is_free else _holder_of(file.fileno())
    except OSError:  # no such file, or the file system has no locks
        return None


def _whole_file(kind: int) -> bytes:
    """A struct flock of 64-bit Linux: type, whence, start, length (0: to the end), pid."""
    return struct.pack("hhqqi4x", kind, os.SEEK_SET, 0, 0, 0)


def _note(descriptor: int, holder: str) -> None:
    """Write the holder into the file of the lock."""
    if os.fstat(descriptor).st_nlink > 1:  # a hard link to a file that may be elsewhere
        return
    with suppress(OSError):  # a full disk is harmless: the note only serves messages
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, holder.encode(), 0)
        os.fsync(descriptor)


def _holder_of(descriptor: int) -> str:
    return os.pread(descriptor, 200, 0).decode(errors="replace") or "unknown"


def sha256_file(path: str | os.PathLike[str]) -> str:
    """SHA-256 of a file as 64 hex digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def damage(path: str | os.PathLike[str]) -> str | None:
    """Describe the damage of a checkpoint; None if it is intact, or no zip file.

    Verifies the checksums of torch's zip file, which torch itself never does. Reads the whole file,
    about 1 GB/s; the result is cached per process.
    """
    status = os.stat(path)
    return _damage(os.fspath(path), status.st_ino, status.st_size, status.st_mtime_ns)


@functools.lru_cache(maxsize=64)
def _damage(path: str, *_version: int) -> str | None:
    with open(path, "rb") as file:
        if file.read(len(_ZIP)) != _ZIP:
            return None
    try:
        archive = zipfile.ZipFile(path)
    except _BAD_ZIP:
        return "truncated"
    with archive:
        for member in archive.infolist():
            if member.compress_type != zipfile.ZIP_STORED:
                return f"damaged, {member.filename} in it is compressed, which torch never does"
        try:
            name = archive.testzip()
        except (*_BAD_ZIP, RuntimeError, EOFError) as error:
            return f"damaged ({error})"
        return f"damaged, {name} in it has a wrong checksum" if name else None


def make_directory(path: Path) -> None:
    """Create `path` and its parents if missing. UserError: one of them is a file."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise UserError(
            f"{path} is not a folder and cannot become one: choose another --out"
        ) from None


def walk(
    root: str | os.PathLike[str], needed: str = ""
) -> Iterator[tuple[str, list[str], list[str]]]:
    """As `os.walk`, but in order, along links, and not into a folder that leads to itself.

    The caller may remove names from the second list to skip these folders. Raises a UserError that
    ends with `needed` if a folder is unreadable.
    """

    def fail(error: OSError) -> None:
        hint = f": {needed}" if needed else ""
        raise UserError(f"{error.filename}: unreadable ({error.strerror}){hint}")

    real: dict[Path, str] = {}
    for folder, below, names in os.walk(root, onerror=fail, followlinks=True):
        path = Path(folder)
        real[path] = os.path.realpath(folder)
        if any(real.get(above) == real[path] for above in path.parents):
            below.clear()
        else:
            below.sort()
            yield folder, below, sorted(names)


def fsync_directory(path: str | os.PathLike[str]) -> None:
    """Flush the entries of a directory, so that new and renamed files survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
