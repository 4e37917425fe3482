"""Files that are either whole or absent: a crash or a reader never meets half of one."""

import fcntl
import hashlib
import json
import os
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
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


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold `directory` for this process; a killed holder lets go. UserError: another process holds it."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise UserError(
            f"{directory}: another process is at work here; let it end or choose another --out"
        ) from None
    except OSError:
        print(f"warning: {directory}: no locks here, start one process at a time", file=sys.stderr)
    try:
        yield
    finally:
        os.close(descriptor)


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
