"""One copy of a data set for all processes of `alma images --jobs`.

The first process that needs a data set reads it and writes its arrays to a temporary folder; all
processes map them from there, so the machine holds each image once.
"""

import contextlib
import hashlib
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alma.errors import interrupt
from alma.files import atomic_write, holder, locked, write_json_atomic

if TYPE_CHECKING:
    from vision.data import Dataset

PREFIX = "alma-images-"
_LOCK = ".owner"
_ARRAYS = ("train", "test")


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """A temporary folder for the data of this process and its children.

    It is removed at the end, also after SIGTERM; one that a killed process left, by the next.
    """
    remove_left()
    with (
        _ended_by_sigterm(),
        tempfile.TemporaryDirectory(prefix=f"{PREFIX}{os.getpid()}-") as place,
        locked(Path(place), _LOCK),
    ):
        yield Path(place)


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """SIGTERM ends the block as Ctrl-C does; where the process ignores it, it stays ignored."""
    before = signal.getsignal(signal.SIGTERM)
    if before is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def remove_left() -> None:
    """Remove the folders of this user's processes that are no more."""
    for place in Path(tempfile.gettempdir()).glob(f"{PREFIX}*-*"):
        number = place.name.removeprefix(PREFIX).partition("-")[0]
        with contextlib.suppress(OSError):
            is_own = not place.is_symlink() and place.stat().st_uid == os.getuid()
            if is_own and number.isdecimal() and not _is_in_use(place, int(number)):
                shutil.rmtree(place)


def _is_in_use(place: Path, process: int) -> bool:
    """Whether `process` holds a folder. This process holds none yet: then the number is reused.

    In another container the process may be alive though its number is unknown here; it has the lock
    of its folder.
    """
    is_alive = process != os.getpid() and Path("/proc", str(process)).exists()
    return is_alive or holder(place, _LOCK) is not None


def load(place: Path, arguments: Mapping[str, Any]) -> "Dataset":
    """As `vision.data.load(**arguments)`, with the images mapped from files in `place`.

    A disk that is full costs memory only: then each process has its own copy.
    """
    from filelock import FileLock

    from vision import data

    key = hashlib.sha256(json.dumps(sorted(arguments.items())).encode()).hexdigest()[:16]
    record = place / f"{key}.json"
    with FileLock(place / ".lock", mode=0o600):
        if not record.exists():
            dataset = data.load(**arguments)
            try:
                _write(place, key, dataset)
            except OSError:
                return dataset
            data.load.cache_clear()  # the arrays in memory
    return _mapped(place, key)


def _write(place: Path, key: str, dataset: "Dataset") -> None:
    """Write a data set to `place`, its record last."""
    import numpy as np

    for name in _ARRAYS:
        images = getattr(dataset, name)
        for part, tensor in (("images", images.images), ("labels", images.labels)):
            with atomic_write(place / f"{key}_{name}_{part}.npy", "wb") as file:
                np.save(file, np.ascontiguousarray(tensor.numpy()))
    facts = {
        "name": dataset.name,
        "classes": dataset.classes,
        "mean": dataset.mean,
        "std": dataset.std,
        "names": list(dataset.names),
        "resize_size": dataset.resize_size,
        "background": dataset.background,
        "source_fingerprint": dataset.fingerprint,
    }
    write_json_atomic(place / f"{key}.json", facts)


def _mapped(place: Path, key: str) -> "Dataset":
    """The data set that `_write` has written."""
    import numpy as np
    import torch

    from vision.data import Dataset, Images

    facts = json.loads((place / f"{key}.json").read_bytes())
    parts: list[Images] = []
    for name in _ARRAYS:
        # "c": torch warns about "r", though nothing writes to it
        pixels = np.load(place / f"{key}_{name}_images.npy", mmap_mode="c")
        labels = np.load(place / f"{key}_{name}_labels.npy")
        parts.append(Images(torch.from_numpy(pixels), torch.from_numpy(labels)))
    facts |= {"mean": tuple(facts["mean"]), "std": tuple(facts["std"])}
    train, test = parts
    return Dataset(train=train, test=test, **facts)
