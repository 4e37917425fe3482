"""Images that arrive over time: the files of each week, month, quarter, year or folder, cut into splits.

A period depends on earlier ones alone: each copy of a file belongs to the first period that has it, a group
to the split that it first has, and classes are numbered as they appear. So later images change no past part.
"""

import contextlib
import csv
import hashlib
import json
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
from alma.files import atomic_write, make_directory, sha256_file
from alma.records import Run
from alma.schema import check_names, parse_json
from alma.stages import check_growth
from alma.stream import VERSION, FileInfo, Part, Stream, is_stream
from vision.presets import Settings

SPLITS = {"megabatch": "train", "valid": "valid", "test": "test"}
"""The split of each part of a period, by the names of parts in stream.json."""
GROWING = ("megabatches", "periods", "megabatch_sha256")
"""Settings of a run that --append changes."""
HELD_OUT = 0.1
"""Share of a period's images that is its test set, and its validation set."""
_NEEDED = "give --data-root with PERIOD/CLASS/*.jpg, or CLASS/*.jpg with EXIF dates, or --manifest FILE"
_ROWS = 10_000  # of a Parquet file that are read at a time
_EXIF, _TAKEN = 0x8769, 0x9003  # DateTimeOriginal in its directory


class ImageSource(NamedTuple):
    """Where the images of a stream are, what makes a period, and the column whose values keep their split."""

    root: str
    by: str
    manifest: str | None = None
    group_by: str | None = None


class ImagePeriod(NamedTuple):
    """The images of a period by split, in the order of their hashes, without `copies` of earlier ones: path,
    label, date, sha256, and the other columns of the manifest."""

    name: str
    splits: dict[str, list[dict[str, Any]]]
    new_classes: list[str]
    copies: int

    @property
    def sha256(self) -> str:
        """Identifies images, labels and splits, whatever the files are called."""
        lines = (f"{name} {x['sha256']} {x['label']}\n" for name, own in self.splits.items() for x in own)
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    def __str__(self) -> str:
        labels = [image["label"] for images in self.splits.values() for image in images]
        counts = ", ".join(f"{len(images):,} {name}" for name, images in self.splits.items())
        new = f" ({len(self.new_classes)} new: {', '.join(self.new_classes)})" if self.new_classes else ""
        classes = f"{len(set(labels))} classes{new}; copies left out: {self.copies:,}"
        return f"{self.name}: {len(labels):,} images ({counts}); {classes}"


@lru_cache(maxsize=4)
def listed(source: ImageSource) -> tuple[tuple[ImagePeriod, ...], str]:
    """The periods of a source in their order, and a line about all files. Reads each file once, for its hash.

    UserError: files, their dates or the manifest are missing or unreadable, or a period lacks a split.
    """
    left_out: Counter[str] = Counter()
    images = list(_of_manifest(source) if source.manifest else _of_folders(source, left_out))
    periods = _dated(source, images)
    check_names(source.manifest or source.root, [*periods, *{image["label"] for image in images}])
    try:
        with ThreadPoolExecutor(4) as pool:
            hashes = pool.map(sha256_file, [image["path"] for image in images])
            for image, sha256 in zip(images, hashes, strict=True):
                image["sha256"] = sha256
    except OSError as error:
        raise UserError(f"cannot read the image {error.filename} ({error.strerror}): restore it") from None
    found: list[ImagePeriod] = []
    seen: set[str] = set()
    classes: dict[str, None] = {}
    split_of: dict[str, str] = {}
    for name, images in periods.items():
        own = {image["sha256"]: image for image in sorted(images, key=lambda x: x["path"], reverse=True)}
        kept = [own[sha256] for sha256 in sorted(own.keys() - seen)]
        seen |= own.keys()
        new = sorted({image["label"] for image in kept} - classes.keys())
        classes |= dict.fromkeys(new)
        found.append(ImagePeriod(name, _split(name, kept, source, split_of), new, len(images) - len(kept)))
    others = ", ".join(f"{number:,} {reason}" for reason, number in left_out.most_common()) or "none"
    counts = f"images: {len(seen):,}; periods: {len(found)}; classes: {len(classes)}"
    return tuple(found), f"{counts}; other files left out: {others}"


def _of_folders(source: ImageSource, left_out: Counter[str]) -> Iterator[dict[str, Any]]:
    """The images below ROOT/PERIOD/CLASS or, if no folder of ROOT has a date as its name, ROOT/CLASS."""
    from vision import folder

    found = list(folder.below(Path(source.root), 1, left_out, _NEEDED))
    names, dates = {inside[0] for inside, _ in found}, Dates(source.by)
    by_name = source.by == "folder" or any(dates.period(name) is not LeftOut.UNREADABLE for name in names)
    for inside, path in found:
        if len(inside) <= by_name:
            left_out["in no class"] += 1
        else:
            yield {"path": path, "label": inside[by_name], "date": inside[0] if by_name else _taken(path)}


def _taken(path: str) -> str:
    """When a picture was taken, by its EXIF data, as a date that `alma.dates` reads; empty: unknown."""
    from PIL import Image

    from vision.folder import NO_IMAGE

    with contextlib.suppress(*NO_IMAGE), Image.open(path) as image:
        day, _, time = str(image.getexif().get_ifd(_EXIF).get(_TAKEN, "")).strip("\0 ").partition(" ")
        return f"{day.replace(':', '-')} {time}".strip()
    return ""


def _of_manifest(source: ImageSource) -> Iterator[dict[str, Any]]:
    """The images of a manifest, .csv, .jsonl or .parquet, whose paths are relative to its folder."""
    manifest = Path(source.manifest or "")
    try:
        for number, row in enumerate(_rows(manifest), start=1):
            given = {name for name, value in row.items() if value not in (None, "")}
            if not {"path", "label"} <= given or (row.get("split") or "train") not in SPLITS.values():
                raise ValueError(f"image {number} has no path or label, or a split but train, valid, test")
            path = os.path.join(manifest.parent, str(row["path"]))
            if not os.path.isfile(path):  # before the next rows are read
                why = "no such file"
                raise UserError(f"cannot read the image {path} ({why}): restore it")
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
        yield from csv.DictReader(lines) if manifest.suffix == ".csv" else map(parse_json, lines)


def _dated(source: ImageSource, images: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The images of each period by its name, in order of time, of `--by folder` in natural order."""
    dates, of_folder = Dates(source.by), source.by == "folder"
    periods: dict[Any, list[dict[str, Any]]] = {}
    for image in images:
        name = str(image["date"] or "")
        natural = [int(x) if x.isdecimal() else x for x in re.split(r"(\d+)", name)]  # week 9 before week 10
        key = (tuple(natural), name) if of_folder and name else dates.period(image["date"])
        periods.setdefault(key, []).append(image)
    unusable = [why for why in periods if isinstance(why, LeftOut)]
    if unusable or not periods:
        what = [f"{len(periods[why])} {why} (first: {periods[why][0]['path']})" for why in unusable]
        what = what or [f"no image in {source.manifest or source.root}"]
        raise UserError(f"--by {source.by}: {'; '.join(what)}: {_NEEDED}, with dates within one period")
    return {key[-1] if of_folder else label(source.by, key): periods[key] for key in sorted(periods)}


def _split(
    period: str, images: Sequence[dict[str, Any]], source: ImageSource, split_of: dict[str, str]
) -> dict[str, list[dict[str, Any]]]:
    """The images of a period by split. `split_of` has the split of each earlier group, and gets those of new
    ones: by the manifest, or in the order of a hash, first to the test set, until it has its share, then to
    the validation set. UserError: a split has no image, a group has two, or an image no group."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for image in images:
        group, given = str(image.get(source.group_by or "sha256") or ""), image.get("split")
        groups.setdefault(group, []).append(image)
        if not group or (given and split_of.setdefault(group, given) != given):
            why = f"{image['path']} has no {source.group_by}, or another split than its group {group}"
            raise UserError(f"{period}: {why}: correct --manifest")
    made: dict[str, list[dict[str, Any]]] = {name: [] for name in SPLITS.values()}
    wanted = max(1, round(HELD_OUT * len(images)))
    order = {group: (group not in split_of, hashlib.sha256(group.encode()).digest()) for group in groups}
    for group in sorted(groups, key=order.__getitem__):
        first = next((name for name in ("test", "valid") if len(made[name]) < wanted), "train")
        made[split_of.setdefault(group, first)] += groups[group]
    if empty := [name for name, own in made.items() if not own]:
        what = f"no image for {', '.join(empty)}, of {len(images)} in {len(groups)} groups"
        raise UserError(f"{period}: {what}: a period needs 3 groups; add images, or choose longer periods")
    return {name: sorted(own, key=lambda image: image["sha256"]) for name, own in made.items()}


def check_classes(periods: Sequence[ImagePeriod], waiting_time: int, settings: Settings) -> None:
    """UserError: classes appear after the first stage, which the learner with these settings cannot add."""
    later = [name for period in periods[waiting_time:] for name in period.new_classes]
    if later and getattr(settings, "gens_average", None) == "logits":
        raise UserError(f"--gens-average logits: earlier members have none of {later[0]}: give probs")


def check_append(out: Path, periods: Sequence[ImagePeriod], append: bool) -> dict[str, Any]:
    """What run.json records of the periods of the run in `out`; its test set is that of its first command.

    UserError: the run was trained on others, or on fewer and `append` is not given or does not help.
    """
    now = {period.name: period.sha256 for period in periods}
    config = {"periods": [*now], "megabatch_sha256": [*now.values()], "test_periods": len(now)}
    if not (out / "run.json").exists() or not (run := Run.read(out)).trained or "periods" not in run.config:
        return config
    known = list(zip(run.config["periods"], run.config["megabatch_sha256"], strict=True))
    if changed := [pair for k, pair in enumerate(known) if [*now.items()][k : k + 1] != [pair]]:
        hint = "restore them, put new ones into later periods, or choose another --out"
        raise UserError(f"{out}: {changed[0][0]} had other images when it was trained: {hint}")
    if new := [*now][len(known) :]:
        if not append:
            raise UserError(f"{out}: new since the last command: {', '.join(new)}: give --append")
        if len(run.rows) >= len(known):  # the last stage has begun
            check_growth(out, len(known), len(now), run.config["waiting_time"])
    return config | {"test_periods": run.config["test_periods"]}


def write_stream(source: ImageSource, out: Path, append: bool) -> None:
    """Write the periods as a stream for `alma train --trainer`: stream.json, and a .jsonl file for each part,
    whose lines have path (relative to `out`), label, date, sha256, and what a manifest has beside.

    UserError: `out` has a stream of other periods, or of fewer and `append` is not given.
    """
    periods, _ = listed(source)
    old = Stream.load(out) if is_stream(out) else None
    mixed = periods[: len(old.megabatches) if old else None]  # in valid and test, which stay
    parts = {f"{x}_{k:02d}": (p.splits[SPLITS[x]], p.name) for x in SPLITS for k, p in enumerate(periods)}
    parts |= {x: ([image for p in mixed for image in p.splits[x]], "") for x in ("valid", "test")}
    made, texts = {}, {}
    for name, (images, period) in parts.items():
        lines = ({**image, "path": os.path.relpath(image["path"], out)} for image in images)
        text = "".join(json.dumps(line, default=str) + "\n" for line in lines).encode()
        texts[file := f"{name}.jsonl"] = text
        files = {file: FileInfo(len(text), hashlib.sha256(text).hexdigest())}
        labels, n = Counter(image["label"] for image in images), len(images)
        made[name] = Part(name, name, n, n, n, n, n, dict(labels), files, period)
    if old and (changed := [part.period or part.name for part in old.parts if made.get(part.name) != part]):
        raise UserError(f"{out}: {changed[0]} had other images: restore them, or choose another --write")
    if old and len(mixed) < len(periods) and not append:
        raise UserError(f"{out}: has {len(mixed)} of {len(periods)} periods: give --append")
    make_directory(out)
    for file, text in texts.items():
        with atomic_write(out / file, "wb", keep_same=True) as stream:
            stream.write(text)
    several = [tuple(made[f"{x}_{k:02d}"] for k in range(len(periods))) for x in SPLITS]
    classes = sum(len(period.new_classes) for period in periods)
    others: Any = {"valid": made["valid"], "test": made["test"], "settings": {"by": source.by}, "files": {}}
    others |= {"held_out": several[2], "held_out_valid": several[1]}
    Stream(out, VERSION, 0, classes, several[0], **others).write()
