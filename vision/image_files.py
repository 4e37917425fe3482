"""The files of images that arrive over time, in folders or in a manifest, with their classes and
dates."""

import contextlib
import csv
import hashlib
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from alma.dates import Dates, LeftOut
from alma.errors import UserError
from alma.schema import parse_json
from vision.alpha import BACKGROUND

SPLITS = {"megabatch": "train", "valid": "valid", "test": "test"}
"""Names of a period's splits, by the names of its parts in stream.json."""
NEEDED = (
    "give --data-root with PERIOD/CLASS/*.jpg, or CLASS/*.jpg with EXIF dates, or --manifest FILE"
)
_SHOWN = 10
"""Missing files that an error names, at most."""
_ONE_DIGIT = re.compile(r"(\d{4}-?W|\d{4}-)(\d)")
"""Names of weeks and months that lack a zero."""
_ROWS = 10_000  # rows of a Parquet file that are read at a time
_EXIF = 0x8769  # tag of the EXIF directory
_TAKEN = 0x9003  # tag of DateTimeOriginal in it


class ImageSource(NamedTuple):
    """Where a dated stream's images come from.

    `root` is the folder, `by` the kind of periods (--by), `manifest` a file with a row for each
    image, and `group_by` the manifest's column of groups, such as patients; all images of a group
    are in the same split. `record` has the images that were there before, see `vision.arrived`.
    Images with alpha are composed on `background`. With `skip_unreadable`, images that cannot be
    decoded are left out.
    """

    root: str
    by: str
    manifest: str | None = None
    group_by: str | None = None
    record: str | None = None
    background: str = BACKGROUND
    skip_unreadable: bool = False


class ImagePeriod(NamedTuple):
    """The images of a period by split, in the order of their hashes.

    Each image is a dict with path, label, date, sha256, and the other columns of the manifest.
    `new_classes` appear first in this period. `copies` is the number of images left out because
    they equal others.
    """

    name: str
    splits: dict[str, list[dict[str, Any]]]
    new_classes: list[str]
    copies: int

    @property
    def sha256(self) -> str:
        """A hash of images, labels and splits, independent of the names of files."""
        digest = hashlib.sha256()
        for split, images in self.splits.items():
            for image in images:
                digest.update(f"{split} {image['sha256']} {image['label']}\n".encode())
        return digest.hexdigest()

    def __str__(self) -> str:
        labels = [image["label"] for images in self.splits.values() for image in images]
        counts = ", ".join(f"{len(images):,} {name}" for name, images in self.splits.items())
        new = ""
        if self.new_classes:
            new = f" ({len(self.new_classes)} new: {', '.join(self.new_classes)})"
        classes = f"{len(set(labels))} classes{new}; copies left out: {self.copies:,}"
        return f"{self.name}: {len(labels):,} images ({counts}); {classes}"


def paths_of(periods: Sequence[ImagePeriod]) -> list[str]:
    """The files of all images."""
    paths = []
    for period in periods:
        for images in period.splits.values():
            paths += [image["path"] for image in images]
    return paths


def listed(source: ImageSource, left_out: Counter[str]) -> Iterator[dict[str, Any]]:
    """The images of a source, each with path, label, date and the other columns of the manifest.

    Other files are counted in `left_out`, by reason. UserError: they are missing or unreadable.
    """
    if source.manifest:
        return _of_manifest(source)
    return _of_folders(source, left_out)


def _of_folders(source: ImageSource, left_out: Counter[str]) -> Iterator[dict[str, Any]]:
    """The images below ROOT/PERIOD/CLASS or, if no folder of ROOT has a date as its name,
    ROOT/CLASS."""
    from vision import folder

    files = list(folder.below(Path(source.root), 1, left_out, NEEDED))
    dates = Dates(source.by)
    names = {folders[0] for folders, _ in files}
    has_periods = source.by == "folder"
    if not has_periods:
        _check_spelling(source, names)
        has_periods = any(dates.period(name) is not LeftOut.UNREADABLE for name in names)
    for folders, path in files:
        if not has_periods:
            yield {"path": path, "label": folders[0], "date": _taken(path)}
        elif len(folders) > 1:
            yield {"path": path, "label": folders[1], "date": folders[0]}
        else:
            left_out["in no class"] += 1


def _check_spelling(source: ImageSource, names: Iterable[str]) -> None:
    """UserError: a folder is named like a period, but with one digit for two, as in 2026-W3."""
    dates = Dates(source.by)
    for name in sorted(names):
        match = _ONE_DIGIT.fullmatch(name)
        if match and dates.period(name) is LeftOut.UNREADABLE:
            right = f"{match[1]}0{match[2]}"
            if dates.period(right) is not LeftOut.UNREADABLE:
                folder = Path(source.root, name)
                raise UserError(f"{folder} is no {source.by}: rename it to {right}")


def _taken(path: str) -> str:
    """When a picture was taken, by its EXIF data, as a date that `alma.dates` reads; empty:
    unknown."""
    from PIL import Image

    from vision.folder import NO_IMAGE

    with contextlib.suppress(*NO_IMAGE), Image.open(path) as image:
        day, _, time = (
            str(image.getexif().get_ifd(_EXIF).get(_TAKEN, "")).strip("\0 ").partition(" ")
        )
        return f"{day.replace(':', '-')} {time}".strip()
    return ""


def _of_manifest(source: ImageSource) -> Iterator[dict[str, Any]]:
    """The images of a manifest, .csv, .jsonl or .parquet, whose paths are relative to its folder.

    UserError: it is malformed, or files are missing, of which all are counted.
    """
    manifest = Path(source.manifest or "")
    missing: Counter[str] = Counter()  # rows by path
    try:
        for number, row in enumerate(_rows(manifest), start=1):
            _check_row(number, row)
            path = os.path.join(manifest.parent, str(row["path"]))
            if not source.skip_unreadable and not os.path.isfile(path):
                missing[path] += 1
            if not missing:  # no further rows are kept in memory
                yield {"date": None, **row, "path": path, "label": str(row["label"])}
    except (OSError, ValueError, AttributeError, ImportError, csv.Error) as error:
        raise UserError(f"cannot read --manifest {manifest} ({error}): correct it") from None
    if missing:
        raise _missing_files([*missing])


def _missing_files(missing: Sequence[str]) -> UserError:
    """The error of files that are in a manifest only."""
    if len(missing) == 1:
        return UserError(
            f"cannot read the image {missing[0]} (no such file): restore it, or give "
            "--skip-unreadable"
        )
    named = ", ".join(missing[:_SHOWN])
    if len(missing) > _SHOWN:
        named += f", and {len(missing) - _SHOWN:,} more"
    problem = f"cannot read {len(missing):,} images (no such file): {named}"
    return UserError(f"{problem}: restore them, or give --skip-unreadable")


def is_missing(value: Any) -> bool:
    """Whether a manifest's row lacks a value; 0 is one."""
    if isinstance(value, float):
        return math.isnan(value)
    return value is None or value == ""


def _check_row(number: int, row: dict[str, Any]) -> None:
    """ValueError: a row of a manifest lacks path or label, or has an unknown split."""
    for name in ("path", "label"):
        if is_missing(row.get(name)):
            spelt = [column for column in row if str(column).strip().lower() == name]
            if name not in row and spelt:
                raise ValueError(f"the column {spelt[0]!r} is not {name}: rename it")
            raise ValueError(f"image {number} has no {name}")
    if not is_missing(row.get("split")) and row["split"] not in SPLITS.values():
        raise ValueError(f"image {number} has a split that is none of train, valid, test")


def _rows(manifest: Path) -> Iterator[dict[str, Any]]:
    """The rows of a manifest, a few at a time."""
    if manifest.suffix == ".parquet":
        from pyarrow import parquet

        with parquet.ParquetFile(manifest) as file:
            for batch in file.iter_batches(_ROWS):
                yield from batch.to_pylist()
        return
    with manifest.open(encoding="utf-8-sig", newline="") as lines:
        if manifest.suffix == ".csv":
            yield from csv.DictReader(lines)
        else:
            yield from map(parse_json, lines)
