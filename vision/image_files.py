"""The files of images that arrive over time, in folders or in a manifest, with their classes and
dates."""

import contextlib
import csv
import hashlib
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from alma.dates import Dates, LeftOut
from alma.errors import UserError
from alma.schema import parse_json

SPLITS = {"megabatch": "train", "valid": "valid", "test": "test"}
"""Names of a period's splits, by the names of its parts in stream.json."""
NEEDED = (
    "give --data-root with PERIOD/CLASS/*.jpg, or CLASS/*.jpg with EXIF dates, or --manifest FILE"
)
_ROWS = 10_000  # rows of a Parquet file that are read at a time
_EXIF = 0x8769  # tag of the EXIF directory
_TAKEN = 0x9003  # tag of DateTimeOriginal in it


class ImageSource(NamedTuple):
    """Where a dated stream's images come from.

    `root` is the folder, `by` the kind of periods (--by), `manifest` a file with a row for each
    image, and `group_by` the manifest's column of groups, such as patients; all images of a group
    are in the same split. `record` has the images that were there before, see `vision.arrived`.
    """

    root: str
    by: str
    manifest: str | None = None
    group_by: str | None = None
    record: str | None = None


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
        has_periods = any(dates.period(name) is not LeftOut.UNREADABLE for name in names)
    for folders, path in files:
        if not has_periods:
            yield {"path": path, "label": folders[0], "date": _taken(path)}
        elif len(folders) > 1:
            yield {"path": path, "label": folders[1], "date": folders[0]}
        else:
            left_out["in no class"] += 1


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
    """The images of a manifest, .csv, .jsonl or .parquet, whose paths are relative to its
    folder."""
    manifest = Path(source.manifest or "")
    try:
        for number, row in enumerate(_rows(manifest), start=1):
            filled = {name for name, value in row.items() if value not in (None, "")}
            split = row.get("split") or "train"
            if not {"path", "label"} <= filled or split not in SPLITS.values():
                fault = "has no path or label, or a split but train, valid, test"
                raise ValueError(f"image {number} {fault}")
            path = os.path.join(manifest.parent, str(row["path"]))
            if not os.path.isfile(path):  # before the next rows are read
                raise UserError(f"cannot read the image {path} (no such file): restore it")
            yield {"date": None, **row, "path": path, "label": str(row["label"])}
    except (OSError, ValueError, AttributeError, ImportError, csv.Error) as error:
        raise UserError(f"cannot read --manifest {manifest} ({error}): correct it") from None


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
