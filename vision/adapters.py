"""Streams to and from the continual-learning libraries Continuum and Avalanche.

Each task or experience becomes one mega-batch, shuffled by `seed`: its last tenth is for validation, and the
libraries may sort by class. With as many test sets as tasks, each mega-batch has its own held-out images.
Images become bytes; floats must be in 0..1 and are rounded to 1/255.
"""

import importlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from alma.errors import UserError
from vision import presets
from vision.data import Images, MegaBatchStream, make_dataset

PARTS = ("train", "valid", "all", "test")
_OURS = ("ToTensor", "PILToTensor", "Normalize")


def from_continuum(train: Iterable[Any], test: Any, name: str = "folder", seed: int = 0) -> MegaBatchStream:
    """A stream of TaskSets: `train` is a scenario or a sequence of TaskSets, `test` one TaskSet or several.

    TaskSets hold images (n, height, width[, channels]), or (n, channels, height, width) if of type TENSOR.
    Raw samples are read, without ToTensor and Normalize. `name`, one of `presets.DATASETS`, selects the
    settings of a run. UserError for other transformations, and for anything but images of one size with 1 or
    3 channels and labels from 0.
    """
    tests = [test] if hasattr(test, "get_raw_samples") else test
    return _stream([_raw(task) for task in train], [_raw(task) for task in tests], name, seed)


def to_continuum(stream: MegaBatchStream, part: str = "train") -> list[Any]:
    """One Continuum TaskSet per mega-batch t, with task label t - 1 and normalised images. `part` selects the
    "train", "valid" or "all" images of each, or the "test" set as the only TaskSet. UserError for another
    part, or if Continuum cannot be imported."""
    from torchvision.transforms import Compose, Normalize, ToTensor

    if part not in PARTS:
        raise UserError(f"part {part!r}: choose from {', '.join(PARTS)}")
    tasks = _library("continuum.tasks", "continuum")
    data = stream.dataset
    if part == "test":
        chosen = [data.test]
    elif part == "all":
        chosen = [stream.images(indices) for indices in stream.parts]
    else:
        chosen = [getattr(megabatch, part) for megabatch in stream]
    transform = Compose([ToTensor(), Normalize(data.mean, data.std)])
    found = []
    for task, (images, labels) in enumerate(chosen):
        x = images.permute(0, 2, 3, 1).contiguous().numpy()
        x = x[..., 0] if x.shape[3] == 1 else x  # Pillow takes gray images without a channel
        found.append(tasks.TaskSet(x, labels.numpy().copy(), np.full(len(labels), task), transform))
    return found


def from_avalanche(benchmark: Any, name: str = "folder", seed: int = 0) -> MegaBatchStream:
    """A stream of the experiences of `benchmark.train_stream`; its test set joins those of `test_stream`.

    Images are PIL images, or arrays or tensors (channels, height, width). The transformations of the current
    group ("train" or "eval") are left out; frozen ones and those of the wrapped data set are applied once.
    `name` and UserError as in `from_continuum`.
    """
    train, test = benchmark.train_stream, benchmark.test_stream
    return _stream([_items(one) for one in train], [_items(one) for one in test], name, seed)


def to_avalanche(stream: MegaBatchStream) -> Any:
    """An Avalanche benchmark with normalised images and task label 0. `train_stream` and `valid_stream` have
    one experience per mega-batch, `test_stream` has one. UserError if Avalanche cannot be imported."""
    from torchvision.transforms import Compose, ConvertImageDtype, Normalize

    scenarios = _library("avalanche.benchmarks.scenarios", "avalanche-lib")
    utils = _library("avalanche.benchmarks.utils", "avalanche-lib")
    data = stream.dataset
    transform = Compose([ConvertImageDtype(torch.float), Normalize(data.mean, data.std)])

    def dataset(images: Images) -> Any:
        labels = images.labels.tolist()
        attributes = [
            utils.DataAttribute(labels, "targets"),
            utils.DataAttribute(
                utils.ConstantSequence(0, len(labels)), "targets_task_labels", use_in_getitem=True
            ),
        ]
        return utils.TaskAwareSupervisedClassificationDataset(
            [_Pairs(images.images, labels)],
            data_attributes=attributes,
            transform_groups=utils.DefaultTransformGroups((transform, None)),
        )

    return scenarios.benchmark_from_datasets(
        train=[dataset(megabatch.train) for megabatch in stream],
        valid=[dataset(megabatch.valid) for megabatch in stream],
        test=[dataset(data.test)],
    )


class _Pairs(torch.utils.data.Dataset):
    """Byte images with labels as plain numbers, which Avalanche requires."""

    def __init__(self, images: torch.Tensor, targets: list[int]):
        self.images, self.targets = images, targets

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.images[index], self.targets[index]


def _library(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"cannot import {module} ({reason}): pip install {package}") from None


def _raw(taskset: Any) -> Images:
    """The samples of a Continuum TaskSet, before transformations."""
    transforms = [
        t for composed in _listed(taskset.trsf) for t in getattr(composed, "transforms", [composed])
    ]
    lost = [type(t).__name__ for t in transforms if type(t).__name__ not in _OURS]
    lost += [what for what in ("target_trsf", "bounding_boxes") if getattr(taskset, what, None) is not None]
    if lost:
        raise UserError(f"a TaskSet's {', '.join(lost)} would be lost: apply it to images and labels first")
    kind = getattr(taskset.data_type, "name", str(taskset.data_type))
    if kind not in ("IMAGE_ARRAY", "TENSOR"):
        raise UserError(f"a TaskSet of type {kind}: only IMAGE_ARRAY and TENSOR are supported")
    x, y, _ = taskset.get_raw_samples()
    x = np.asarray(x)
    return _images(x.transpose(0, 3, 1, 2) if x.ndim == 4 and kind == "IMAGE_ARRAY" else x, y)


def _listed(value: Any) -> list[Any]:
    """A list of Continuum's transformations: None, one, or one per task."""
    return value if isinstance(value, list) else [] if value is None else [value]


def _items(experience: Any) -> Images:
    """The samples of an Avalanche experience, without its current transformations."""
    samples = list(map(_item, experience.dataset.remove_current_transform_group()))
    sizes = {x.shape for x, _ in samples}
    if len(sizes) != 1:
        raise UserError(f"an experience has images of {len(sizes)} sizes: scale them to one")
    return _images(np.stack([x for x, _ in samples]), [int(y) for _, y in samples])


def _item(sample: Sequence[Any]) -> tuple[np.ndarray, Any]:
    x = sample[0]
    if hasattr(x, "getbands"):  # a PIL image: channels last, or gray
        x = np.asarray(x)
        return (x if x.ndim == 2 else x.transpose(2, 0, 1)), sample[1]
    return np.asarray(x), sample[1]


def _images(x: np.ndarray, y: Any) -> Images:
    """Check images (n[, channels], height, width) and labels (n,), and convert the images to bytes."""
    x = x[:, None] if x.ndim == 3 else x
    if x.ndim != 4 or x.shape[1] not in (1, 3) or x.dtype.kind not in "uif":
        raise UserError(f"images of shape {x.shape}, type {x.dtype}: need height, width, 1 or 3 channels")
    labels = np.asarray(y)
    if labels.shape != x.shape[:1] or labels.dtype.kind not in "ui" or labels.min(initial=0) < 0:
        raise UserError(
            f"labels of shape {labels.shape}, type {labels.dtype}: need one number from 0 per image"
        )
    if x.dtype != np.uint8:
        top = 1 if x.dtype.kind == "f" else 255
        low, high = x.min(initial=0), x.max(initial=0)
        if not (low >= 0 and high <= top):
            raise UserError(
                f"pixels from {low:g} to {high:g}: give bytes, or floats in 0 to 1, not normalised"
            )
        x = np.rint(x * (255 / top)).astype(np.uint8)
    return Images(torch.from_numpy(np.ascontiguousarray(x)), torch.from_numpy(labels.astype(np.int64)))


def _stream(train: list[Images], test: list[Images], name: str, seed: int) -> MegaBatchStream:
    if name not in presets.DATASETS:
        raise UserError(f"name {name!r}: choose from {', '.join(presets.DATASETS)}")
    if not train or not sum(len(part.labels) for part in test):
        raise UserError("no training images, or no test images")
    shapes = {tuple(part.images.shape[1:]) for part in train + test}
    if len(shapes) > 1:
        raise UserError(f"images of shapes such as {min(shapes)} and {max(shapes)}: scale them to one")
    joined = (Images(*map(torch.cat, zip(*parts, strict=True))) for parts in (train, test))
    sizes = [len(part.labels) for part in train]
    parts = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    random = np.random.RandomState(seed)
    own = np.cumsum([len(part.labels) for part in test])
    held_out = np.split(np.arange(own[-1]), own[:-1]) if len(test) == len(train) > 1 else ()
    return MegaBatchStream(
        make_dataset(name, *joined),
        seed=seed,
        parts=[random.permutation(p) for p in parts],
        held_out=held_out,
    )
