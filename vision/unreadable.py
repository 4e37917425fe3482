"""Images that cannot be read: all are named at once, or left out by --skip-unreadable."""

import csv
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

from alma.errors import UserError
from alma.escape import csv_cell
from alma.files import atomic_write, make_directory

FILE = "unreadable.csv"
"""The list of the images that were left out, in --out."""
_SHOWN = 10
"""Images that an error names, at most."""


@lru_cache(maxsize=4)
def faults_of(paths: tuple[str, ...]) -> Mapping[str, str]:
    """Why images cannot be read, by path, in the order of `paths`. Decodes each of them."""
    from vision import folder  # with NumPy

    folder.set_warnings()
    with ThreadPoolExecutor(4) as pool:
        reasons = list(pool.map(_fault, paths))
    faults = {}
    for path, reason in zip(paths, reasons, strict=True):
        if reason:
            faults[path] = reason
    return faults


def _fault(path: str) -> str:
    """Why an image cannot be read; empty if it can."""
    from vision import folder

    try:
        folder.read_image(path, None)
    except folder.UnreadableImage as error:
        return error.reason
    return ""


def error_of(paths: Sequence[str]) -> UserError:
    """The error that names all unreadable images of `paths`."""
    faults = faults_of(tuple(paths))
    named = [f"{path} ({reason})" for path, reason in list(faults.items())[:_SHOWN]]
    if len(faults) > _SHOWN:
        named.append(f"and {len(faults) - _SHOWN:,} more")
    subject = "the image"
    remedy = "replace or delete it"
    if len(faults) > 1:
        subject = f"{len(faults):,} images:"
        remedy = "replace or delete them"
    problem = f"cannot read {subject} {', '.join(named)}"
    return UserError(f"{problem}: {remedy}, or leave out what is unreadable: --skip-unreadable")


def line(faults: Mapping[str, str]) -> str:
    """A line about images that are left out; empty without any."""
    if not faults:
        return ""
    path, reason = next(iter(faults.items()))
    return f"unreadable, left out: {len(faults):,} (first: {path}: {reason})"


def write(faults: Mapping[str, str], out: Path) -> Path:
    """Write the list of the images that are left out into the folder `out`; returns its path."""
    make_directory(out)
    with atomic_write(out / FILE) as file:
        write_row = csv.writer(file, lineterminator="\n").writerow
        write_row(["path", "reason"])
        for path, reason in faults.items():
            name = os.fsencode(path).decode(errors="backslashreplace")
            write_row(map(csv_cell, [name, reason]))
    return out / FILE
