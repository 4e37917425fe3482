"""The images of each period as they were when it was first used: `arrived.jsonl`.

A run is trained on a period once. Files that are added to it afterwards are late: they are counted
and left out. The record tells them from those that were there, and says which files have changed.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import msgspec

from alma.errors import UserError
from alma.files import atomic_write, make_directory
from alma.json_lines import complete_lines
from alma.records import Run
from alma.schema import TEXT, parse_json
from alma.stream import Stream, is_stream
from vision.image_files import SPLITS, ImagePeriod

ARRIVED = "arrived.jsonl"


class _Line(TypedDict):
    """An image in the record."""

    period: TEXT
    path: TEXT
    label: TEXT
    split: TEXT
    sha256: TEXT


class RecordedImage(NamedTuple):
    """What the record has of an image, beside its hash."""

    path: str
    label: str
    split: str


Arrived = dict[str, dict[str, RecordedImage]]
"""By period and hash."""


def record_of(out: Path) -> str:
    """Where the record of the runs in `out` is: there or, for one run of a sweep, above."""
    above = out.parent / ARRIVED
    if not (out / ARRIVED).exists() and above.exists():
        return str(above)
    return str(out / ARRIVED)


def read(place: str | None) -> Arrived:
    """The record in a file or, of a stream of `--write`, in its parts; of periods on which no run
    has been trained there is none. UserError: it is damaged."""
    if not place:
        return {}
    path = Path(place)
    if is_stream(path):
        return _of_stream(path)
    if not path.is_file():
        return {}
    trained = _trained_periods(path.parent)
    arrived: Arrived = {}
    for number, line in complete_lines(path):
        try:
            image = msgspec.convert(parse_json(line), _Line)
        except ValueError as error:
            problem = f"not an image ({error})"
            raise UserError(f"{path}:{number}: {problem}: restore the file") from None
        if image["period"] in trained:
            of_period = arrived.setdefault(image["period"], {})
            recorded = RecordedImage(image["path"], image["label"], image["split"])
            of_period[image["sha256"]] = recorded
    return arrived


def _trained_periods(out: Path) -> set[str]:
    """The periods of all runs in `out`, or of the one there, that have trained."""
    periods: set[str] = set()
    for file in [out / "run.json", *out.glob("*/run.json")]:
        if file.exists():
            run = Run.read(file.parent)
            if run.trained:
                periods.update(run.config.get("periods", ()))
    return periods


def _of_stream(path: Path) -> Arrived:
    """The images of a stream that `--write` made."""
    arrived: Arrived = {}
    stream = Stream.load(path)
    for k, part in enumerate(stream.megabatches):
        of_period = arrived.setdefault(part.period, {})
        for kind, split in SPLITS.items():
            for _, line in complete_lines(path / f"{kind}_{k:02d}.jsonl"):
                image = parse_json(line)
                place = str(path / image["path"])
                of_period[image["sha256"]] = RecordedImage(place, image["label"], split)
    return arrived


def write(place: str, periods: Iterable[ImagePeriod]) -> None:
    """Add those periods to the record that are not in it, atomically."""
    path = Path(place)
    arrived = read(place)
    lines = []
    for period in periods:
        recorded = arrived.get(period.name) or recorded_images(period)
        for sha256, image in recorded.items():
            line = {"period": period.name, **image._asdict(), "sha256": sha256}
            lines.append(json.dumps(line, ensure_ascii=False) + "\n")
    make_directory(path.parent)
    with atomic_write(path, "wb", keep_same=True) as file:
        file.write("".join(lines).encode())


def recorded_images(period: ImagePeriod) -> dict[str, RecordedImage]:
    """The images of a period by hash."""
    recorded = {}
    for split, images in period.splits.items():
        for image in images:
            recorded[image["sha256"]] = RecordedImage(image["path"], image["label"], split)
    return recorded


class Arrivals(NamedTuple):
    """The images of a period that count, and those that are late."""

    images: list[dict[str, Any]]
    late: list[dict[str, Any]]


def without_late(
    images: Sequence[dict[str, Any]],
    recorded: Mapping[str, RecordedImage] | None,
    seen: set[str],
) -> Arrivals:
    """Part the images of a period that was used before; of one that was not, `recorded` is None.

    `seen` are the hashes of images in earlier periods, of which copies are never late. A copy of a
    recorded image in another class does not count either.
    """
    if recorded is None:
        return Arrivals(list(images), [])
    kept = []
    late = []
    for image in images:
        as_recorded = recorded.get(image["sha256"])
        if as_recorded and as_recorded.label == image["label"]:
            kept.append(image)
        elif not as_recorded and image["sha256"] not in seen:
            late.append(image)
    return Arrivals(kept, late)


def late_line(late: Sequence[tuple[str, dict[str, Any]]]) -> str:
    """A line about late images, each with the name of its period; empty without any."""
    if not late:
        return ""
    counts = Counter(period for period, _ in late)
    periods = ", ".join(f"{number:,} of {period}" for period, number in counts.items())
    first = late[0][1]["path"]
    remedy = "move them to the newest period to use them"
    return f"late, left out: {periods} (first: {first}): {remedy}"


def has_same_splits(period: ImagePeriod, recorded: Mapping[str, RecordedImage]) -> bool:
    """Whether each image of a period is in the split where it was."""
    splits = {sha256: image.split for sha256, image in recorded_images(period).items()}
    return splits == {sha256: image.split for sha256, image in recorded.items()}


def changes(recorded: Mapping[str, RecordedImage], images: Sequence[dict[str, Any]]) -> str:
    """How a period has changed since it was recorded: images that are gone or have another class or
    split.

    `images` are all that the period has now, with their label, split and path.
    """
    now: dict[str, list[dict[str, Any]]] = {}
    for image in images:
        now.setdefault(image["sha256"], []).append(image)
    gone = []
    renamed = []
    for sha256, before in recorded.items():
        labels = sorted({image["label"] for image in now.get(sha256, [])})
        if not labels:
            gone.append(before.path)
        elif before.label not in labels:
            renamed.append(f"{before.path} of class {before.label} is now of {', '.join(labels)}")
    faults = []
    if gone:
        faults.append(f"images that are gone: {len(gone)} (first: {gone[0]})")
    if renamed:
        faults.append(f"images of another class: {len(renamed)} (first: {renamed[0]})")
    return "; ".join(faults) or "its images have other splits or groups"
