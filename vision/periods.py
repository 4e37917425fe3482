"""Images that arrive over time: the files of each week, month, quarter, year or folder, cut into
splits.

A period depends on earlier periods only, so appending images never changes a past period: a file
with copies belongs to the first period that has one, a group stays in the split of its first
period, and classes are numbered in the order of their appearance.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

from alma.dates import Dates, LeftOut, label
from alma.errors import UserError
from alma.files import sha256_file
from alma.records import TRAINED_MEGABATCHES, Run
from alma.schema import check_names
from alma.stages import check_growth
from vision import arrived, copies, image_files, unreadable
from vision.copies import ClassConflicts
from vision.image_files import SPLITS, ImagePeriod, ImageSource
from vision.presets import Settings

GROWING = ("megabatches", "periods", "megabatch_sha256")
"""Settings in run.json that --append may change."""
_CORRECT = "correct --manifest"
HELD_OUT = 0.1
"""Fraction of a period's images in its test set; its validation set has the same fraction."""


@lru_cache(maxsize=4)
def listed(source: ImageSource) -> tuple[tuple[ImagePeriod, ...], str]:
    """The periods of a source in their order, and lines about all files. Reads each file once, for
    its hash.

    Images that were added to a period after it was recorded are late and left out.

    UserError: files, their dates or the manifest are missing or unreadable, a period lacks a split,
    or one has changed since it was recorded.
    """
    left_out: Counter[str] = Counter()
    images = list(image_files.listed(source, left_out))
    faults = _faults(source, images)
    images = [image for image in images if image["path"] not in faults]
    images_of = _dated(source, images)
    labels = {image["label"] for image in images}
    check_names(source.manifest or source.root, [*images_of, *labels])
    _add_hashes(images)
    record = arrived.read(source.record)
    _check_all_there(record, images_of)
    past = _past(record, images_of)
    periods: list[ImagePeriod] = []
    late: list[tuple[str, dict[str, Any]]] = []
    seen: set[str] = set()  # sha256 of the images of earlier periods
    classes: set[str] = set()
    split_of: dict[str, str] = {}
    conflicts = ClassConflicts()
    for name, images in images_of.items():
        recorded = record.get(name, {}) if name in past else None
        arrivals = arrived.without_late(images, recorded, seen)
        late += [(name, image) for image in arrivals.late]
        if recorded is not None and not recorded:
            continue
        by_path = sorted(arrivals.images, key=lambda image: image["path"])
        conflicts.add(by_path)
        by_hash: dict[str, dict[str, Any]] = {}
        for image in reversed(by_path):
            by_hash[image["sha256"]] = image  # paths descend, so the first path of copies stays
        kept = [by_hash[sha256] for sha256 in sorted(by_hash.keys() - seen)]
        if recorded is not None and {image["sha256"] for image in kept} != recorded.keys():
            raise _changed(name, arrived.changes(recorded, images))
        seen |= by_hash.keys()
        new_classes = sorted({image["label"] for image in kept} - classes)
        classes.update(new_classes)
        splits = _split(name, kept, source, split_of)
        copies = len(images) - len(kept) - len(arrivals.late)
        period = ImagePeriod(name, splits, new_classes, copies)
        if recorded is not None and not arrived.has_same_splits(period, recorded):
            raise _changed(name, "its images have other splits or groups")
        periods.append(period)
    reasons = ", ".join(f"{number:,} {reason}" for reason, number in left_out.most_common())
    counts = f"images: {len(seen):,}; periods: {len(periods)}; classes: {len(classes)}"
    about = [f"{counts}; other files left out: {reasons or 'none'}", arrived.late_line(late)]
    about += [unreadable.line(faults), conflicts.line()]
    return tuple(periods), "\n".join(filter(None, about))


def unreadable_of(source: ImageSource) -> Mapping[str, str]:
    """The images that are left out because they cannot be read, with reasons."""
    return _faults(source, list(image_files.listed(source, Counter())))


def _faults(source: ImageSource, images: Sequence[dict[str, Any]]) -> Mapping[str, str]:
    """As `unreadable_of`, of the images of a source."""
    if not source.skip_unreadable:
        return {}
    return unreadable.faults_of(tuple(image["path"] for image in images))


def _check_all_there(record: arrived.Arrived, images_of: Mapping[str, Any]) -> None:
    """UserError: a recorded period has no image now."""
    for name in record:
        if name not in images_of:
            raise _changed(name, "all its images are gone")


def _past(record: arrived.Arrived, images_of: Mapping[str, Any]) -> set[str]:
    """The names of all periods up to the last recorded one."""
    names = list(images_of)
    last = max((names.index(name) for name in record), default=-1)
    return set(names[: last + 1])


def _changed(name: str, fault: str) -> UserError:
    """The error of a period that has changed."""
    remedy = "restore them, put new ones into later periods, or choose another --out"
    return UserError(f"{name} had other images before: {fault}: {remedy}")


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


def _dated(
    source: ImageSource, images: Sequence[dict[str, Any]]
) -> dict[str, list[dict[str, Any]]]:
    """The images of each period by its name, in the order of time; with `--by folder`, in natural
    order."""
    dates = Dates(source.by)
    of_folder = source.by == "folder"
    periods: dict[Any, list[dict[str, Any]]] = {}
    for image in images:
        is_dated = not image_files.is_missing(image["date"])
        name = str(image["date"])
        if of_folder and is_dated:
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
        needed = f"{image_files.NEEDED}, with dates within one period"
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
    named = {str(image.get(source.group_by or "sha256")) for image in images}
    new_groups = len(named - split_of.keys())
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
        raise _too_few(period, source, empty, len(images), len(groups), new_groups)
    for members in splits.values():
        members.sort(key=lambda image: image["sha256"])
    return splits


def _too_few(
    period: str, source: ImageSource, empty: Sequence[str], images: int, groups: int, new: int
) -> UserError:
    """The error of a period that lacks images for the splits `empty`; `new` of its groups are in no
    earlier period."""
    fault = f"{period}: no image for {', '.join(empty)}, of {images:,} in {groups:,} groups"
    if new == groups:
        remedy = "a period needs 3 groups; add images, or choose longer periods"
        return UserError(f"{fault}: {remedy}")
    fault += f", of which {groups - new:,} keep the split of an earlier period"
    missing = len(empty)
    plural = "group" if missing == 1 else "groups"
    needed = f"add images of {missing} {plural} that {source.group_by} has not had before"
    wait = "or date its images into a later period that has some"
    return UserError(f"{fault}: {needed}, {wait}")


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
        value = image.get(source.group_by or "sha256")
        if image_files.is_missing(value):
            raise UserError(f"{period}: {image['path']} has no {source.group_by}: {_CORRECT}")
        group = str(value)
        groups.setdefault(group, []).append(image)
        split = image.get("split")
        if image_files.is_missing(split):
            continue
        before = split_of.setdefault(group, str(split))
        if before != split:
            name = source.group_by or "a copy"
            fault = f"{image['path']} is in {split}, its group ({name} {group}) in {before}"
            raise UserError(f"{period}: {fault}: {_CORRECT}")
    return groups


def check_some_classes(source: ImageSource, periods: Sequence[ImagePeriod]) -> None:
    """UserError: all periods together have a single class."""
    classes = [name for period in periods for name in period.new_classes]
    images = []
    for period in periods:
        for members in period.splits.values():
            images += [(image["label"], image["path"]) for image in members]
    copies.check_classes(source.manifest or source.root, classes, images)


def check_classes(periods: Sequence[ImagePeriod], waiting_time: int, settings: Settings) -> None:
    """Raise a UserError if classes appear after the first stage and the learner cannot add them."""
    later = [name for period in periods[waiting_time:] for name in period.new_classes]
    if later and getattr(settings, "gens_average", None) == "logits":
        raise UserError(
            f"--gens-average logits: earlier members have none of {later[0]}: give probs"
        )


def check_append(
    out: Path, periods: Sequence[ImagePeriod], append: bool, only_test: bool = False
) -> dict[str, Any]:
    """Check `periods` against the run in `out`, and return what its run.json records of them.

    The run's test set stays the one of its first command. Raises UserError if the run was trained
    on other periods, or on fewer of them and `append` is not given or cannot add them; with
    `only_test` it may have been trained on fewer.
    """
    names = [period.name for period in periods]
    hashes = [period.sha256 for period in periods]
    config = {"periods": names, "megabatch_sha256": hashes, "test_periods": len(names)}
    if not (out / "run.json").exists():
        return config
    run = Run.read(out)
    if not run.trained or "periods" not in run.config:
        return config
    _check_past(out, run, names, hashes)
    if not only_test:
        _check_new(out, run, names, append)
    return config | {"test_periods": run.config["test_periods"]}


def _check_past(out: Path, run: Run, names: Sequence[str], hashes: Sequence[str]) -> None:
    """UserError: the periods begin with others than those of the run."""
    hash_of = dict(zip(names, hashes, strict=True))
    recorded = dict(zip(run.config["periods"], run.config["megabatch_sha256"], strict=True))
    remedy = "restore them, put new ones into later periods, or choose another --out"
    for name in recorded:
        if name not in hash_of:
            raise UserError(f"{out}: the images of {name} are gone: {remedy}")
    before = [name for name in names[: len(recorded)] if name not in recorded]
    if before:
        new = f"{', '.join(before)} came after {list(recorded)[-1]} was used"
        late = "take its images out, or put them into a later period"
        raise UserError(f"{out}: {new}: {late}")
    for name, sha256 in recorded.items():
        if hash_of[name] != sha256:
            fault = f"{name} had other images when it was trained"
            raise UserError(f"{out}: {fault}: {remedy}")


def note_trained(out: Path) -> None:
    """Record in run.json, if it is not there, how many mega-batches the run in `out` was trained
    for: `megabatches` of its config also grows when it is only tested on later ones."""
    if not (out / "run.json").exists():
        return
    run = Run.read(out)
    if "periods" in run.config and TRAINED_MEGABATCHES not in run.info:
        run.note(**{TRAINED_MEGABATCHES: run.config["megabatches"]})


def _check_new(out: Path, run: Run, names: Sequence[str], append: bool) -> None:
    """UserError: periods are new since the last training, and `append` is not given or does not
    help."""
    trained = run.info.get(TRAINED_MEGABATCHES, run.config["megabatches"])
    new = names[trained:]
    if new and not append:
        raise UserError(f"{out}: new since the last command: {', '.join(new)}: give --append")
    if new and len(run.rows_as_written) >= trained:  # the last stage has already begun
        check_growth(out, trained, len(names), run.config["waiting_time"])
