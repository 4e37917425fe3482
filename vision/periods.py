"""Images that arrive over time: the files of each week, month, quarter, year or folder, cut into
splits.

A period depends on earlier periods only, so appending images never changes a past period: a file
with copies belongs to the first period that has one, a group stays in the split of its first
period, and classes are numbered in the order of their appearance.
"""

import contextlib
import csv
import hashlib
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from alma.dates import Dates, LeftOut, label
from alma.errors import UserError
from alma.files import sha256_file
from alma.records import Run
from alma.schema import check_names, parse_json
from alma.stages import check_growth
from vision.presets import Settings

SPLITS = {"megabatch": "train", "valid": "valid", "test": "test"}
"""Names of a period's splits, by the names of its parts in stream.json."""
GROWING = ("megabatches", "periods", "megabatch_sha256")
"""Settings in run.json that --append may change."""
HELD_OUT = 0.1
"""Fraction of a period's images in its test set; its validation set has the same fraction."""
_NEEDED = (
    "give --data-root with PERIOD/CLASS/*.jpg, or CLASS/*.jpg with EXIF dates, or --manifest FILE"
)
_ROWS = 10_000  # rows of a Parquet file that are read at a time
_EXIF = 0x8769  # tag of the EXIF directory
_TAKEN = 0x9003  # tag of DateTimeOriginal in it


class ImageSource(NamedTuple):
    """Where a dated stream's images come from.

    `root` is the folder, `by` the kind of periods (--by), `manifest` a file with a row for each
    image, and `group_by` the manifest's column of groups, such as patients; all images of a group
    are in the same split.
    """

    root: str
    by: str
    manifest: str | None = None
    group_by: str | None = None


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


@lru_cache(maxsize=4)
def listed(source: ImageSource) -> tuple[tuple[ImagePeriod, ...], str]:
    """The periods of a source in their order, and a line about all files. Reads each file once, for
    its hash.

    UserError: files, their dates or the manifest are missing or unreadable, or a period lacks a
    split.
    """
    left_out: Counter[str] = Counter()
    reader = _of_manifest(source) if source.manifest else _of_folders(source, left_out)
    images = list(reader)
    images_of = _dated(source, images)
    labels = {image["label"] for image in images}
    check_names(source.manifest or source.root, [*images_of, *labels])
    _add_hashes(images)
    periods: list[ImagePeriod] = []
    seen: set[str] = set()  # sha256 of the images of earlier periods
    classes: set[str] = set()
    split_of: dict[str, str] = {}
    for name, images in images_of.items():
        by_hash: dict[str, dict[str, Any]] = {}
        for image in sorted(images, key=lambda image: image["path"], reverse=True):
            by_hash[image["sha256"]] = image  # paths descend, so the first path of copies stays
        kept = [by_hash[sha256] for sha256 in sorted(by_hash.keys() - seen)]
        seen |= by_hash.keys()
        new_classes = sorted({image["label"] for image in kept} - classes)
        classes.update(new_classes)
        splits = _split(name, kept, source, split_of)
        periods.append(ImagePeriod(name, splits, new_classes, len(images) - len(kept)))
    reasons = ", ".join(f"{number:,} {reason}" for reason, number in left_out.most_common())
    counts = f"images: {len(seen):,}; periods: {len(periods)}; classes: {len(classes)}"
    return tuple(periods), f"{counts}; other files left out: {reasons or 'none'}"


def _add_hashes(images: Sequence[dict[str, Any]]) -> None:
    """Add the sha256 of its file to each image. UserError: one is unreadable."""
    try:
        with ThreadPoolExecutor(4) as pool:
            hashes = pool.map(sha256_file, [image["path"] for image in images])
            for image, sha256 in zip(images, hashes, strict=True):
                image["sha256"] = sha256
    except OSError as error:
        reason = f"cannot read the image {error.filename} ({error.strerror})"
        raise UserError(f"{reason}: restore it") from None


def _of_folders(source: ImageSource, left_out: Counter[str]) -> Iterator[dict[str, Any]]:
    """The images below ROOT/PERIOD/CLASS or, if no folder of ROOT has a date as its name,
    ROOT/CLASS."""
    from vision import folder

    files = list(folder.below(Path(source.root), 1, left_out, _NEEDED))
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


def _dated(
    source: ImageSource, images: Sequence[dict[str, Any]]
) -> dict[str, list[dict[str, Any]]]:
    """The images of each period by its name, in the order of time; with `--by folder`, in natural
    order."""
    dates = Dates(source.by)
    of_folder = source.by == "folder"
    periods: dict[Any, list[dict[str, Any]]] = {}
    for image in images:
        name = str(image["date"] or "")
        if of_folder and name:
            key: Any = (_natural(name), name)
        else:
            key = dates.period(image["date"])
        periods.setdefault(key, []).append(image)
    faults = []
    for reason, members in periods.items():
        if isinstance(reason, LeftOut):
            faults.append(f"{len(members)} {reason} (first: {members[0]['path']})")
    if not periods:
        faults.append(f"no image in {source.manifest or source.root}")
    if faults:
        needed = f"{_NEEDED}, with dates within one period"
        raise UserError(f"--by {source.by}: {'; '.join(faults)}: {needed}")
    named = {}
    for key in sorted(periods):
        name = key[-1] if of_folder else label(source.by, key)
        named[name] = periods[key]
    return named


def _natural(name: str) -> tuple[int | str, ...]:
    """A key that sorts week 9 before week 10."""
    pieces = re.split(r"(\d+)", name)
    return tuple(int(piece) if piece.isdecimal() else piece for piece in pieces)


def _split(
    period: str,
    images: Sequence[dict[str, Any]],
    source: ImageSource,
    split_of: dict[str, str],
) -> dict[str, list[dict[str, Any]]]:
    """The images of a period by split, in the order of their hashes.

    `split_of` maps the groups of earlier periods to their splits; the function adds new groups. A
    new group takes the split of the manifest, if given. Other groups are taken in the order of a
    hash: first for the test set until it has its share, then for the validation set, then for
    training. Without --group-by, each image is a group.

    UserError: a split has no image, a group has two, or an image no group.
    """
    groups = _grouped(period, images, source, split_of)
    splits: dict[str, list[dict[str, Any]]] = {name: [] for name in SPLITS.values()}
    share = max(1, round(HELD_OUT * len(images)))

    def order(group: str) -> tuple[bool, bytes]:
        return (group not in split_of, hashlib.sha256(group.encode()).digest())

    for group in sorted(groups, key=order):
        if len(splits["test"]) < share:
            default = "test"
        elif len(splits["valid"]) < share:
            default = "valid"
        else:
            default = "train"
        split = split_of.setdefault(group, default)
        splits[split] += groups[group]
    empty = [name for name, members in splits.items() if not members]
    if empty:
        fault = f"no image for {', '.join(empty)}, of {len(images)} in {len(groups)} groups"
        remedy = "a period needs 3 groups; add images, or choose longer periods"
        raise UserError(f"{period}: {fault}: {remedy}")
    for members in splits.values():
        members.sort(key=lambda image: image["sha256"])
    return splits


def _grouped(
    period: str,
    images: Sequence[dict[str, Any]],
    source: ImageSource,
    split_of: dict[str, str],
) -> dict[str, list[dict[str, Any]]]:
    """The images of each group; splits of the manifest are added to `split_of`.

    UserError: an image has no group, or another split than its group.
    """
    groups: dict[str, list[dict[str, Any]]] = {}
    for image in images:
        group = str(image.get(source.group_by or "sha256") or "")
        split = image.get("split")
        groups.setdefault(group, []).append(image)
        if not group or (split and split_of.setdefault(group, split) != split):
            fault = f"has no {source.group_by}, or another split than its group {group}"
            raise UserError(f"{period}: {image['path']} {fault}: correct --manifest")
    return groups


def check_classes(periods: Sequence[ImagePeriod], waiting_time: int, settings: Settings) -> None:
    """Raise a UserError if classes appear after the first stage and the learner cannot add them."""
    later = [name for period in periods[waiting_time:] for name in period.new_classes]
    if later and getattr(settings, "gens_average", None) == "logits":
        raise UserError(
            f"--gens-average logits: earlier members have none of {later[0]}: give probs"
        )


def check_append(out: Path, periods: Sequence[ImagePeriod], append: bool) -> dict[str, Any]:
    """Check `periods` against the run in `out`, and return what its run.json records of them.

    The run's test set stays the one of its first command. Raises UserError if the run was trained
    on other periods, or on fewer of them and `append` is not given or cannot add them.
    """
    names = [period.name for period in periods]
    hashes = [period.sha256 for period in periods]
    config = {"periods": names, "megabatch_sha256": hashes, "test_periods": len(names)}
    if not (out / "run.json").exists():
        return config
    run = Run.read(out)
    if not run.trained or "periods" not in run.config:
        return config
    pairs = list(zip(names, hashes, strict=True))
    trained = list(zip(run.config["periods"], run.config["megabatch_sha256"], strict=True))
    for k, pair in enumerate(trained):
        if pairs[k : k + 1] != [pair]:
            fault = f"{pair[0]} had other images when it was trained"
            remedy = "restore them, put new ones into later periods, or choose another --out"
            raise UserError(f"{out}: {fault}: {remedy}")
    new = names[len(trained) :]
    if new and not append:
        raise UserError(f"{out}: new since the last command: {', '.join(new)}: give --append")
    if new and len(run.rows) >= len(trained):  # the last stage has already begun
        check_growth(out, len(trained), len(names), run.config["waiting_time"])
    return config | {"test_periods": run.config["test_periods"]}
