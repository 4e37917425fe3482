"""Images that arrive over time: the files of each week, month, quarter, year or folder, cut into splits.

A period depends on earlier ones alone: each copy of a file belongs to the first period that has it, a group
to the split that it first has, and classes are numbered as they appear. So later images change no past part.
"""

import csv
import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from alma.dates import UNITS, Dates, LeftOut, label
from alma.errors import UserError
from alma.files import atomic_write, make_directory, sha256_file
from alma.records import Run
from alma.schema import parse_json
from alma.stages import check_growth
from alma.stream import FileInfo, Part, Stream, is_stream
from vision import folder
from vision.presets import Settings

BY = ("folder", *UNITS)
SPLITS = ("train", "valid", "test")
HELD_OUT = 0.1
"""Share of a period's images that is its test set, and its validation set."""
_NEEDED = "--by needs PERIOD/CLASS/*.jpg, CLASS/*.jpg with EXIF dates, or --manifest FILE"
_TAKEN = 0x9003, 0x8769
"""EXIF's DateTimeOriginal, and the directory that has it."""


class ImageSource(NamedTuple):
    """Where the images of a stream are, and what makes a period of them."""

    root: str
    by: str
    manifest: str | None = None
    group_by: str | None = None
    """The column of the manifest whose equal values are in one split; None: each image is on its own."""
    undated: str = "error"


@dataclass(frozen=True)
class ImageFile:
    """An image, as a folder or a line of a manifest describes it."""

    path: str
    label: str
    date: Any
    group: str = ""
    split: str = ""
    others: Mapping[str, Any] = field(default_factory=dict)
    """Further columns of the manifest."""
    sha256: str = ""


@dataclass(frozen=True)
class ImagePeriod:
    """The images of a period by split, each in the order of their hashes."""

    name: str
    splits: dict[str, list[ImageFile]]
    new_classes: list[str]
    copies: int
    """Files that are left out, because they repeat an earlier one."""

    @property
    def sha256(self) -> str:
        """Identifies images, labels and splits, whatever the files are called."""
        lines = (f"{name} {file.sha256} {file.label}\n" for name in SPLITS for file in self.splits[name])
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    def __str__(self) -> str:
        files = [file for split in self.splits.values() for file in split]
        counts = ", ".join(f"{len(self.splits[name]):,} {name}" for name in SPLITS)
        new = f" ({len(self.new_classes)} new: {', '.join(self.new_classes)})" if self.new_classes else ""
        classes = f"{len({file.label for file in files})} classes{new}"
        return f"{self.name}: {len(files):,} images ({counts}); {classes}; copies left out: {self.copies:,}"


@lru_cache(maxsize=4)
def listed(source: ImageSource) -> tuple[tuple[ImagePeriod, ...], str]:
    """The periods of a source in their order, and a line about all files. Reads each file once, for its hash.

    UserError: files or a manifest are missing or unreadable, dates are (unless left out), or a period lacks
    images for one of its splits.
    """
    left_out: Counter[str] = Counter()
    found = list(_of_manifest(source) if source.manifest else _of_folders(source, left_out))
    periods = _dated(source, found, left_out)
    try:
        with ThreadPoolExecutor(4) as pool:
            hashes = dict(
                zip(paths := [file.path for file in found], pool.map(sha256_file, paths), strict=True)
            )
    except OSError as error:
        raise UserError(f"cannot read the image {error.filename} ({error.strerror}): restore it") from None
    made: list[ImagePeriod] = []
    split_of: dict[str, str] = {}
    seen: set[str] = set()
    classes: dict[str, None] = {}
    for name, files in periods.items():
        own = {}
        for file in sorted(files, key=lambda file: file.path):
            if (digest := hashes[file.path]) not in seen:
                seen.add(digest)
                own[digest] = replace(file, sha256=digest, group=file.group or digest)
        new = sorted({file.label for file in own.values()} - classes.keys())
        classes |= dict.fromkeys(new)
        made.append(
            ImagePeriod(name, _splits(name, list(own.values()), split_of), new, len(files) - len(own))
        )
    others = ", ".join(f"{number:,} {reason}" for reason, number in left_out.most_common())
    line = f"images: {len(seen):,}; periods: {len(made)}; classes: {len(classes)}; "
    return tuple(made), f"{line}other files left out: {others or 'none'}"


def _of_folders(source: ImageSource, left_out: Counter[str]) -> Iterator[ImageFile]:
    """The images below ROOT/PERIOD/CLASS, or, if no folder of ROOT is a date, below ROOT/CLASS."""
    root = Path(source.root)
    if source.group_by:
        raise UserError(f"--group-by {source.group_by}: a column of --manifest, which is not given")
    if source.by == "folder":
        for (period, kind, *_), path in folder.below(root, 2, left_out, _NEEDED):
            yield ImageFile(path, kind, period)
        return
    dates = Dates(source.by)
    names = [p.name for p in root.iterdir() if p.is_dir() and p.name[0] != "."] if root.is_dir() else []
    unreadable = [name for name in sorted(names) if dates.period(name) is LeftOut.UNREADABLE]
    if len(unreadable) < len(names):
        if unreadable:
            raise UserError(
                f"{root / unreadable[0]}: no date, as other folders there are: rename it, or --by folder"
            )
        for (period, kind, *_), path in folder.below(root, 2, left_out, _NEEDED):
            yield ImageFile(path, kind, period)
        return
    for (kind, *_), path in folder.below(root, 1, left_out, _NEEDED):
        yield ImageFile(path, kind, _taken(path))


def _taken(path: str) -> str:
    """When a picture was taken, by its EXIF data, as a date that `alma.dates` reads; empty: unknown."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            tag, directory = _TAKEN
            day, _, time = str(image.getexif().get_ifd(directory).get(tag, "")).strip("\0 ").partition(" ")
    except folder.NO_IMAGE as error:
        raise UserError(f"cannot read the image {path} ({error}): replace or delete it") from None
    return f"{day.replace(':', '-')} {time}".strip()


def _of_manifest(source: ImageSource) -> Iterator[ImageFile]:
    """The images of a manifest, whose paths are relative to its folder."""
    manifest = Path(str(source.manifest))
    needed = ["path", "label", "date", *([source.group_by] if source.group_by else [])]
    for number, row in enumerate(_rows(manifest), start=1):
        where = f"{manifest}: image {number}"
        if not isinstance(row, dict) or None in row:
            raise UserError(f"{where}: give a value for each column, and no more")
        if lacking := [name for name in needed if row.get(name) in (None, "") and name != "date"]:
            raise UserError(f"{where} has no {', '.join(lacking)}: complete the manifest")
        split = {"validation": "valid", "val": "valid"}.get(text := str(row.get("split") or ""), text)
        if split not in ("", *SPLITS):
            raise UserError(f"{where} has the split {split!r}: give {', '.join(SPLITS)}, or none")
        others = {
            name: value for name, value in row.items() if name not in ("path", "label", "date", "split")
        }
        group = str(row[source.group_by]) if source.group_by else ""
        path = os.path.join(manifest.parent, str(row["path"]))
        yield ImageFile(path, str(row["label"]), row.get("date"), group, split, others)


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a .csv, .jsonl or .parquet file. UserError: it is none."""
    try:
        if path.suffix == ".parquet":
            from pyarrow import parquet

            yield from parquet.read_table(path).to_pylist()
        elif path.suffix in (".csv", ".jsonl"):
            with path.open(encoding="utf-8-sig", newline="") as file:
                lines = filter(str.strip, file)
                yield from (
                    csv.DictReader(file, strict=True) if path.suffix == ".csv" else map(parse_json, lines)
                )
        else:
            raise UserError(f"--manifest {path}: give a file .csv, .jsonl or .parquet")
    except (OSError, ValueError, csv.Error, ImportError) as error:
        raise UserError(
            f"cannot read --manifest {path} ({error}): give path, label, date of each image"
        ) from None


def _dated(
    source: ImageSource, files: Sequence[ImageFile], left_out: Counter[str]
) -> dict[str, list[ImageFile]]:
    """The files of each period by its name, in order of time, or of `--by folder` in natural order."""
    dates, periods = Dates(source.by), {}
    first: dict[LeftOut, ImageFile] = {}
    for file in files:
        key: Any = _natural(str(file.date)) if source.by == "folder" else dates.period(file.date)
        if isinstance(key, LeftOut):
            left_out[key] += 1
            first.setdefault(key, file)
        else:
            periods.setdefault(key, []).append(file)
    if first and source.undated == "error":
        texts = [
            f"{left_out[why]:,} {why} (first: {file.path}, {file.date!r})" for why, file in first.items()
        ]
        hint = "name folders by date, repair the dates, choose longer periods, or give --undated skip"
        raise UserError(
            f"--by {source.by}: images whose date is not within one period: {'; '.join(texts)}: {hint}"
        )
    if not periods:
        raise UserError(f"{source.manifest or source.root}: no image of a period: {_NEEDED}")
    named = {
        key: str(own[0].date) if source.by == "folder" else label(source.by, key)
        for key, own in periods.items()
    }
    return {named[key]: periods[key] for key in sorted(periods)}


def _natural(name: str) -> list[Any]:
    """A key that sorts "week 9" before "week 10"."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]


def _splits(period: str, files: Sequence[ImageFile], split_of: dict[str, str]) -> dict[str, list[ImageFile]]:
    """The files of a period by split. `split_of` has the split of each earlier group, and gets those of new
    ones: by the manifest, or in the order of a hash, first to the test set, until it has its share, then to
    the validation set. UserError: a split has no image, or a group two splits."""
    groups: dict[str, list[ImageFile]] = {}
    for file in files:
        groups.setdefault(file.group, []).append(file)
        if file.split and split_of.setdefault(file.group, file.split) != file.split:
            what = f"is in {split_of[file.group]}, {file.path} in {file.split}"
            raise UserError(f"{period}: the group {file.group} {what}: give it one split")
    made: dict[str, list[ImageFile]] = {name: [] for name in SPLITS}
    wanted = max(1, round(HELD_OUT * len(files)))
    for group in sorted(
        groups, key=lambda group: (group not in split_of, hashlib.sha256(group.encode()).digest())
    ):
        first = next((name for name in ("test", "valid") if len(made[name]) < wanted), "train")
        made[split_of.setdefault(group, first)] += groups[group]
    if empty := [name for name in SPLITS if not made[name]]:
        raise UserError(
            f"{period}: no image for {', '.join(empty)}, of {len(files)} in {len(groups)} groups: a period "
            "needs 3 groups; give it more images, or choose longer periods with --by"
        )
    return {name: sorted(own, key=lambda file: file.sha256) for name, own in made.items()}


def check_classes(periods: Sequence[ImagePeriod], waiting_time: int, settings: Settings) -> None:
    """UserError: classes appear after the first stage, and the learner with these settings cannot add any."""
    later = [name for period in periods[waiting_time:] for name in period.new_classes]
    if later and getattr(settings, "gens_average", "probs") == "logits":
        raise UserError(
            f"--gens-average logits: a member has no logit of a later class ({', '.join(later)}): give probs"
        )


def check_append(out: Path, periods: Sequence[ImagePeriod], append: bool) -> int:
    """Number of periods that the test set of the run in `out` is of: those of its first command.

    UserError: the run was trained on other periods, or has fewer, and `append` is not given or does not help.
    """
    if not (out / "run.json").exists() or not (run := Run.read(out)).trained or "periods" not in run.config:
        return len(periods)
    known = run.config["periods"]
    now = {period.name: period.sha256 for period in periods}
    if lost := [name for name in known if name not in now]:
        raise UserError(f"{out}: the run has {', '.join(lost)}, and {lost[0]} is gone: restore its images")
    if list(now)[: len(known)] != known:
        early = next(name for name in now if name not in known)
        raise UserError(
            f"{out}: {early} is new, but the run goes on to {known[-1]}: an addition is later; remove it"
        )
    for name, digest in zip(known, run.config["megabatch_sha256"], strict=True):
        if now[name] != digest:
            raise UserError(
                f"{out}: {name} had other images when it was trained: restore them, or choose another --out"
            )
    if new := list(now)[len(known) :]:
        if not append:
            raise UserError(f"{out}: {len(new)} new periods ({', '.join(new)}): give --append")
        if any(row["t"] == len(known) and row["stage"] is not None for row in run.rows):
            check_growth(out, len(known), len(now), run.config["waiting_time"])
    return run.config["test_periods"]


def write_stream(source: ImageSource, out: Path, append: bool) -> None:
    """Write the periods as a stream for `alma train --trainer`: stream.json, and a .jsonl file for each part.

    A line is an image: path, relative to `out`, label, date, sha256, and the other columns of the manifest.
    UserError: `out` has a stream of other periods, or of fewer, and `append` is not given.
    """
    periods, _ = listed(source)
    old = Stream.load(out) if is_stream(out) else None
    count = len(old.megabatches) if old else len(periods)
    made: dict[str, Part] = {}
    texts: dict[str, str] = {}

    def add(name: str, files: Sequence[ImageFile], period: str = "") -> None:
        lines = []
        for file in files:
            facts = {"path": os.path.relpath(file.path, out), "label": file.label, "date": file.date}
            lines.append(json.dumps({**file.others, **facts, "sha256": file.sha256}, default=str) + "\n")
        texts[f"{name}.jsonl"] = text = "".join(lines)
        info = FileInfo(len(text.encode()), hashlib.sha256(text.encode()).hexdigest())
        sources = dict(Counter(file.label for file in files))
        made[name] = Part(name, name, *[len(files)] * 5, sources, {f"{name}.jsonl": info}, period)

    for k, period in enumerate(periods):
        for part, split in (("megabatch", "train"), ("valid", "valid"), ("test", "test")):
            add(f"{part}_{k:02d}", period.splits[split], period.name)
    for split in ("valid", "test"):
        add(split, [file for period in periods[:count] for file in period.splits[split]])
    if old and (changed := [part.period or part.name for part in old.parts if made.get(part.name) != part]):
        raise UserError(f"{out}: {changed[0]} had other images: restore them, or choose another --write")
    if old and count < len(periods) and not append:
        new = [period.name for period in periods[count:]]
        raise UserError(f"{out}: {len(new)} new periods ({', '.join(new)}): give --append")
    make_directory(out)
    for name, text in texts.items():
        with atomic_write(out / name, keep_same=True) as file:
            file.write(text)
    series = [
        tuple(made[f"{part}_{k:02d}"] for k in range(len(periods))) for part in ("megabatch", "test", "valid")
    ]
    classes = len({file.label for period in periods for files in period.splits.values() for file in files})
    settings = {"by": source.by, "unit": "images"}
    shared = out, 2, 0, classes, series[0], made["valid"], made["test"], settings, {}
    Stream(*shared, held_out=series[1], held_out_valid=series[2]).write()
