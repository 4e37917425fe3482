"""Images from which nothing can be learned or tested: copies across classes and parts, and folders
that give a single class."""

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from alma.errors import UserError
from alma.files import sha256_file

if TYPE_CHECKING:
    from torch import Tensor

    from vision.data import MegaBatchStream
    from vision.examples import Pixels
    from vision.folder import Listing

_CHUNK = 64
"""Images that are compared at a time."""
_SHOWN = 5
"""Folders that an error names, at most."""


class _Image(NamedTuple):
    """An image of a folder."""

    part: str  # train or test
    label: str
    path: str


def check_classes(place: str, classes: Sequence[str], paths: Iterable[tuple[str, str]]) -> None:
    """UserError: there is a single class, so that every error is 0. `paths` are (class, path)."""
    if len(classes) > 1:
        return
    problem = f"{place}: one class, {classes[0]}: no learner can be wrong"
    folders: dict[str, None] = {}  # below the class
    for label, path in paths:
        inside = path.split(f"{os.sep}{label}{os.sep}", 1)[-1].split(os.sep)
        if len(inside) > 1:
            folders[inside[0]] = None
    if len(folders) > 1:
        names = ", ".join(sorted(folders)[:_SHOWN])
        problem += f"; the folders in it ({names}) are no classes"
        raise UserError(f"{problem}: move them up, out of {classes[0]}")
    raise UserError(f"{problem}: give two classes or more")


def deeper_line(images: Sequence[tuple[str, str]], root: Path) -> str:
    """A line about the (class, path) in folders below ROOT/CLASS; empty without any."""
    deeper = []
    for label, path in images:
        if len(Path(path).relative_to(root).parts) > 2:
            deeper.append((label, path))
    if not deeper:
        return ""
    label, path = deeper[0]
    return f"images in folders below their class: {len(deeper):,} (first: {path}, of class {label})"


def lines(listing: "Listing") -> list[str]:
    """Lines about equal files in two classes, and in train/ and test/.

    UserError: all images for training are equal, or all are in two classes.
    """
    images = [_Image("train", label, path) for label, path in listing.train]
    images += [_Image("test", label, path) for label, path in listing.test]
    in_two_classes: list[tuple[_Image, _Image]] = []
    in_both_parts: list[tuple[_Image, _Image]] = []
    contradicted = 0  # images for training
    for equal in _equal_files(images):
        other_class = [image for image in equal if image.label != equal[0].label]
        if other_class:
            in_two_classes.append((equal[0], other_class[0]))
            contradicted += sum(image.part == "train" for image in equal)
        of_training = [image for image in equal if image.part == "train"]
        for image in equal:
            if image.part == "test" and of_training:
                in_both_parts.append((image, of_training[0]))
        if len(of_training) == len(listing.train) > 1:
            fault = f"all {len(of_training):,} images for training are equal"
            raise UserError(f"{of_training[0].path}: {fault}: give images that differ")
    if contradicted == len(listing.train):
        first, second = in_two_classes[0]
        fault = "every image for training is in two classes"
        raise UserError(f"{fault} (first: {first.path}, {second.path}): leave it in one")
    about = []
    if in_two_classes:
        first, second = in_two_classes[0]
        pair = f"{first.path}, {second.path}"
        about.append(f"images in two classes: {len(in_two_classes):,} (first: {pair}): keep one")
    if in_both_parts:
        first, second = in_both_parts[0]
        fault = f"test images that are in train/, too: {len(in_both_parts):,}"
        about.append(f"{fault} (first: {first.path} = {second.path}): delete them in train/")
    return about


def _equal_files(images: Sequence[_Image]) -> list[list[_Image]]:
    """Groups of equal files; only files of one size are read."""
    by_size: dict[int, list[_Image]] = {}
    for image in images:
        by_size.setdefault(os.path.getsize(image.path), []).append(image)
    candidates = [image for group in by_size.values() if len(group) > 1 for image in group]
    by_hash: dict[str, list[_Image]] = {}
    try:
        with ThreadPoolExecutor(4) as pool:
            hashes = pool.map(sha256_file, [image.path for image in candidates])
            for image, sha256 in zip(candidates, hashes, strict=True):
                by_hash.setdefault(sha256, []).append(image)
    except OSError as error:
        reason = f"cannot read the image {error.filename} ({error.strerror})"
        raise UserError(f"{reason}: restore it") from None
    return [group for group in by_hash.values() if len(group) > 1]


def check_stream(stream: "MegaBatchStream") -> None:
    """UserError: a stream has a single class, or equal images for training: errors tell nothing."""
    dataset = stream.dataset
    if dataset.classes < 2:
        raise UserError(f"{dataset.name}: one class, no learner can be wrong: give two or more")
    count = len(dataset.train.labels)
    if _all_equal(dataset.train.images, count):
        fault = f"all {count:,} images for training are equal"
        raise UserError(f"{dataset.name}: {fault}: give images that differ")


def _all_equal(images: "Tensor | Pixels", count: int) -> bool:
    """Whether `count` images (n, channels, height, width) are equal, and several."""
    import torch

    first = images.index_select(0, torch.tensor([0]))
    for start in range(0, count, _CHUNK):
        indices = torch.arange(start, min(count, start + _CHUNK))
        if not torch.equal(images.index_select(0, indices), first.expand(len(indices), -1, -1, -1)):
            return False
    return count > 1


class ClassConflicts:
    """Equal images of a stream by date that are in two classes."""

    def __init__(self) -> None:
        self._first: dict[str, _Image] = {}  # by hash
        self._conflicts: dict[str, tuple[_Image, _Image]] = {}

    def add(self, images: Iterable[dict[str, str]]) -> None:
        """Add the images of the next period, in the order in which their classes count."""
        for image in images:
            sha256 = image["sha256"]
            labelled = _Image("", image["label"], image["path"])
            first = self._first.setdefault(sha256, labelled)
            if first.label != labelled.label:
                self._conflicts.setdefault(sha256, (first, labelled))

    def line(self) -> str:
        """A line about them; empty without any."""
        if not self._conflicts:
            return ""
        first, second = next(iter(self._conflicts.values()))
        pair = f"{first.path} is {first.label}, {second.path} {second.label}"
        return f"images in two classes: {len(self._conflicts):,}, the first counts (first: {pair})"
