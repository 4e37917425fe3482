"""Install: move the finished files from the work directory to the stream, stream.json last.

WORK/stream/ is a staging folder; it is complete once it has stream.json. If an installation is
killed, the next command on the stream finishes it first, whatever its own settings are: nothing is
lost, and files of different settings never mix. Files are renamed, which needs no disk space.
Callers must hold the lock of the stream.
"""

import os
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
    """Move the files of WORK/stream to `out`, or those that are left after a kill; remove `work`.

    UserError: a file is damaged.
    """
    staged = work / FINISHED
    finished = Stream.load(staged)
    for folder in (out, staged):  # check all sizes before anything is moved
        damaged = wrong_size(finished.parts, folder)
        if damaged:
            culprit = work if is_stream(out) else out
            raise UserError(f"{damaged}: damaged; remove {culprit} and run again")
    files = [*finished.files]
    for part in finished.parts:
        files += part.files
    _move(files, staged, out)
    _move([FILE], staged, out)
    _discard(work)
    return Stream.load(out)


def _move(names: Iterable[str], staged: Path, out: Path) -> None:
    """Rename the files that are still staged, and flush the folders."""
    folders = {out}
    for name in names:
        if (staged / name).is_file():
            target = out / name
            folders.add(target.parent)
            target.parent.mkdir(exist_ok=True)
            os.replace(staged / name, target)
    for folder in sorted(folders, reverse=True):  # reverse order: a folder before its parent
        fsync_directory(folder)


def recover(out: Path) -> None:
    """Finish an installation that was killed."""
    for work in works(out):
        if is_stream(work / FINISHED):
            install(work, out)


def remove_others(out: Path, current: Path | None = None) -> None:
    """Remove the files of killed runs, except those in the work directory `current`."""
    for work in works(out):
        if work != current:
            print(f"{work}: left by an interrupted run; removed", file=sys.stderr)
            _discard(work)
    for path in leftovers(out):
        if path.is_dir() and path != current:
            shutil.rmtree(path, ignore_errors=True)
        elif path.is_file() and current not in path.parents:
            path.unlink(missing_ok=True)


def _discard(work: Path) -> None:
    """Remove a work directory. It is renamed first, so that no run can resume in a half of it."""
    aside = work.with_name(f".{secrets.token_hex(6)}{work.name}.tmp")
    os.replace(work, aside)
    shutil.rmtree(aside, ignore_errors=True)


def works(out: Path) -> list[Path]:
    """The work directories in `out`.

    UserError: one is a link, through which files would be moved.
    """
    directories = sorted(out.glob(WORK + "[0-9a-f]" * 16))
    for directory in directories:
        if directory.is_symlink():
            raise UserError(f"{directory}: a link in place of a work directory; delete it")
    return directories


def leftovers(out: Path) -> list[Path]:
    """Work directories and temporary files of killed runs."""
    return sorted([*works(out), *out.rglob(".*.tmp")])


def wrong_size(parts: Iterable[Part], folder: Path) -> Path | None:
    """The first file of the parts in `folder` whose size is not the recorded one."""
    for part in parts:
        for name, file in part.files.items():
            path = folder / name
            if path.is_file() and path.stat().st_size != file.size:
                return path
    return None
