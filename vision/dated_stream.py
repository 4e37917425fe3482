"""Write images by date as a stream for `alma train --trainer`."""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from alma.errors import UserError
from alma.files import atomic_write, make_directory
from alma.stream import VERSION, FileInfo, Part, Stream, is_stream
from vision.periods import SPLITS, ImageSource, listed


def write_stream(source: ImageSource, out: Path, append: bool) -> None:
    """Write stream.json, and a .jsonl file for each part, with the periods as mega-batches.

    Lines of the files have path (relative to `out`), label, date, sha256, and the other columns of
    the manifest.

    UserError: `out` has a stream of other periods, or of fewer and `append` is not given.
    """
    periods, _ = listed(source)
    old = Stream.load(out) if is_stream(out) else None
    # An append must not change the files valid and test, so they hold the first periods only.
    mixed = periods[: len(old.megabatches)] if old else periods

    texts: dict[str, bytes] = {}
    parts_of: dict[str, list[Part]] = {kind: [] for kind in SPLITS}
    mixed_parts: dict[str, Part] = {}
    for kind, split in SPLITS.items():
        for k, period in enumerate(periods):
            name = f"{kind}_{k:02d}"
            text = _text(period.splits[split], out)
            texts[f"{name}.jsonl"] = text
            parts_of[kind].append(_part(name, period.splits[split], text, period.name))
    for kind in ("valid", "test"):
        images = [image for period in mixed for image in period.splits[SPLITS[kind]]]
        text = _text(images, out)
        texts[f"{kind}.jsonl"] = text
        mixed_parts[kind] = _part(kind, images, text)

    if old:
        new_parts = [part for parts in parts_of.values() for part in parts]
        _check_old(out, old, [*new_parts, *mixed_parts.values()])
        if len(mixed) < len(periods) and not append:
            counts = f"{len(mixed)} of {len(periods)} periods"
            raise UserError(f"{out}: has {counts}: give --append")
    make_directory(out)
    for file, text in texts.items():
        with atomic_write(out / file, "wb", keep_same=True) as stream:
            stream.write(text)
    classes = sum(len(period.new_classes) for period in periods)
    Stream(
        out,
        VERSION,
        0,
        classes,
        tuple(parts_of["megabatch"]),
        valid=mixed_parts["valid"],
        test=mixed_parts["test"],
        settings={"by": source.by},
        files={},
        held_out=tuple(parts_of["test"]),
        held_out_valid=tuple(parts_of["valid"]),
    ).write()


def _text(images: Sequence[dict[str, Any]], out: Path) -> bytes:
    """A line of JSON for each image, whose path is relative to `out`."""
    lines = []
    for image in images:
        path = os.path.relpath(image["path"], out)
        lines.append(json.dumps({**image, "path": path}, default=str) + "\n")
    return "".join(lines).encode()


def _part(name: str, images: Sequence[dict[str, Any]], text: bytes, period: str = "") -> Part:
    """The part in the file `name`.jsonl with the content `text`."""
    count = len(images)
    labels = Counter(image["label"] for image in images)
    file = f"{name}.jsonl"
    digest = hashlib.sha256(text).hexdigest()
    return Part(
        name=name,
        prefix=name,
        words=count,  # an image counts as one word, one token and one document
        tokens=count,
        documents=count,
        items=count,
        bytes=count,
        sources=dict(labels),
        files={file: FileInfo(len(text), digest)},
        period=period,
    )


def _check_old(out: Path, old: Stream, parts: Sequence[Part]) -> None:
    """Raise a UserError if a part of the old stream in `out` differs from the new `parts`."""
    new_parts = {part.name: part for part in parts}
    for part in old.parts:
        if new_parts.get(part.name) != part:
            fault = f"{part.period or part.name} had other images"
            raise UserError(f"{out}: {fault}: restore them, or choose another --write")
