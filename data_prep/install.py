"""From work directory to stream: finished files are renamed to their place, stream.json last.

    STREAM/.work-SETTINGS/         units of work; everything is written here, under a hash of the settings
    STREAM/.work-SETTINGS/stream/  the finished files, laid out as the stream; its stream.json is written last

Renaming needs no disk space. Once a work directory has stream/stream.json, each file named there is either in
it or in the stream, and at most one work directory has files in the stream. So a kill at any moment loses
nothing, and files of different settings never mix. Hold the lock of the stream for everything here.
"""

import contextlib
import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from alma.files import fsync_directory
from alma.stream import FILE, Stream, is_stream
from data_prep.plan import FINISHED

WORK = ".work-"


def install(work: Path, out: Path) -> Stream:
    """Rename what is in WORK/stream to its place in `out`; after a kill, rename the rest. Then `clean`.

    What another work directory had begun to install goes back to it first.
    """
    for other in works(out):
        if other != work:
            _withdraw(other, out)
    finished = Stream.load(work / FINISHED)
    _move(_files(finished), work / FINISHED, out)
    _move([FILE], work / FINISHED, out)
    clean(out, work)
    return Stream.load(out)


def works(out: Path) -> list[Path]:
    """The work directories in `out`."""
    return sorted(out.glob(WORK + "*"))


def leftovers(out: Path) -> list[Path]:
    """What killed runs left: work directories and temporary files."""
    return sorted([*works(out), *out.rglob(".*.tmp")])


def clean(out: Path, own: Path | None = None) -> None:
    """Remove all leftovers of a finished stream, and say so of work directories other than `own`."""
    for work in works(out):
        _withdraw(work, out)
        # First, for without it nothing here counts as finished, even if this is killed halfway.
        (work / FINISHED / FILE).unlink(missing_ok=True)
        shutil.rmtree(work, ignore_errors=True)  # a job of a killed launch may still be writing there
        if work != own:
            print(f"{work}: left by an interrupted run with other settings; removed", file=sys.stderr)
    for path in leftovers(out):
        if path.is_file():
            path.unlink()


def _withdraw(work: Path, out: Path) -> None:
    """Undo an `install` of `work` that was killed."""
    if not is_stream(work / FINISHED):
        return
    installed = set(_files(Stream.load(work / FINISHED)))
    if is_stream(out):
        installed -= set(_files(Stream.load(out)))
    away = [name for name in sorted(installed) if not (work / FINISHED / name).is_file()]
    _move(away, out, work / FINISHED)
    for folder in {(out / name).parent for name in installed} - {out}:
        with contextlib.suppress(OSError):  # it was not there, or has files of the user
            folder.rmdir()


def _move(names: Iterable[str], source: Path, target: Path) -> None:
    """Rename those of the files that are in `source`, and make that survive a power cut."""
    folders = {target}
    for name in names:
        if (source / name).is_file():
            folders.add((target / name).parent)
            (target / name).parent.mkdir(exist_ok=True)
            os.replace(source / name, target / name)
    for folder in sorted(folders, reverse=True):  # what is in a folder before its name
        fsync_directory(folder)


def _files(stream: Stream) -> Iterator[str]:
    yield from stream.files
    for part in stream.parts:
        yield from part.files
