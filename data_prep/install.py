"""Install: move the finished files from the work directory to the stream, stream.json last.

Files are renamed, which needs no disk space. Once a work directory has stream/stream.json, each file named
there is either in it or in the stream, and at most one work directory has files in the stream. So a kill at
any moment loses nothing, and files of different settings never mix. Callers hold the lock of the stream.
"""

import contextlib
import os
import re
import secrets
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

from alma.errors import UserError
from alma.files import fsync_directory
from alma.stream import FILE, Part, Stream, is_stream
from data_prep.work import FINISHED

WORK = ".work-"


def install(work: Path, out: Path) -> Stream:
    """Move the files of WORK/stream to `out`, or those that are left after a kill; then `clean`.

    An unfinished installation from another work directory is undone first. UserError: a file is damaged.
    """
    for other in works(out):
        if other != work:
            _withdraw(other, out)
    finished = Stream.load(work / FINISHED)
    for folder in (out, work / FINISHED):  # before anything is moved
        if path := wrong_size(finished.parts, folder):
            raise UserError(f"{path}: damaged; remove {work if is_stream(out) else out} and run again")
    _move(_files(finished), work / FINISHED, out)
    _move([FILE], work / FINISHED, out)
    clean(out, work)
    return Stream.load(out)


def works(out: Path) -> list[Path]:
    """The work directories in `out`."""
    return sorted(
        path for path in out.glob(WORK + "*") if re.fullmatch("[0-9a-f]{16}", path.name[len(WORK) :])
    )


def leftovers(out: Path) -> list[Path]:
    """Work directories and temporary files of killed runs."""
    return sorted([*works(out), *out.rglob(".*.tmp")])


def clean(out: Path, own: Path | None = None) -> None:
    """Remove all leftovers of a finished stream; report work directories other than `own`."""
    for work in works(out):
        _withdraw(work, out)
        _set_aside(work, own)
    fsync_directory(out)
    for path in leftovers(out):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def remove_unfinished(out: Path, own: Path) -> None:
    """Remove the work directories of killed runs with other settings, before the disk is needed.

    One that is complete stays until `install`: its files may be in the stream.
    """
    for work in works(out):
        if work != own and not is_stream(work / FINISHED):
            _set_aside(work, own)
    for path in out.glob(f".*{WORK}*.tmp"):
        shutil.rmtree(path, ignore_errors=True)


def _set_aside(work: Path, own: Path | None) -> None:
    """Rename a work directory, so that no run resumes in its remains, and no job writes to it."""
    if work != own:
        print(f"{work}: left by an interrupted run with other settings; removed", file=sys.stderr)
    os.replace(work, work.with_name(f".{secrets.token_hex(6)}{work.name}.tmp"))


def _withdraw(work: Path, out: Path) -> None:
    """Undo an `install` from `work` that was killed."""
    if not is_stream(work / FINISHED):
        return
    installed = set(_files(Stream.load(work / FINISHED)))
    if is_stream(out):
        installed -= set(_files(Stream.load(out)))
    away = [name for name in sorted(installed) if not (work / FINISHED / name).is_file()]
    _move(away, out, work / FINISHED)
    for folder in {(out / name).parent for name in installed} - {out}:
        with contextlib.suppress(OSError):  # missing, or it has files of the user
            folder.rmdir()


def _move(names: Iterable[str], source: Path, target: Path) -> None:
    """Move those of the files that are in `source`, durably: they survive a power cut."""
    folders = {target}
    for name in names:
        if (source / name).is_file():
            folders.add((target / name).parent)
            (target / name).parent.mkdir(exist_ok=True)
            os.replace(source / name, target / name)
    for folder in sorted(folders, reverse=True):  # a folder before its parent
        fsync_directory(folder)


def wrong_size(parts: Iterable[Part], folder: Path) -> Path | None:
    """The first file of the parts, among those that `folder` has, whose size is not the recorded one."""
    for part in parts:
        for name, file in part.files.items():
            path = folder / name
            if path.is_file() and path.stat().st_size != file.size:
                return path
    return None


def _files(stream: Stream) -> list[str]:
    return [*stream.files, *(name for part in stream.parts for name in part.files)]
