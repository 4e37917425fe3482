"""Data sets in memory, and the stream of mega-batches of their images."""

import hashlib
import math
import pickle
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from alma.errors import UserError
from vision import folder, presets
from vision.alpha import BACKGROUND
from vision.examples import AnyExamples, Examples, StoredExamples
from vision.image_files import ImagePeriod
from vision.unpacking import unpack_missing

VALIDATION = 0.1
"""Share of each mega-batch used for validation (appendix B.1)."""

_KNOWN: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "mnist": ((0.1307,), (0.3081,)),
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
}
_DAMAGED = (
    *(RuntimeError, OSError, EOFError, ValueError, TypeError, KeyError, AssertionError),
    *(pickle.UnpicklingError, zipfile.BadZipFile, zlib.error),
)
_SMALL = 1 << 14
"""Largest image, in values, for which a stage's or test set's images are all normalised at once."""
NORMALISED = 1 << 28
"""Most bytes that the normalised images of a stage or test set may take. Beyond either limit, each
batch is normalised when it is used, which takes little time compared with the network."""


class Images(NamedTuple):
    """Bytes (n, channels, height, width), a tensor or `Pixels`, and labels (n,) as int64."""

    images: Any
    labels: Tensor


@dataclass(frozen=True)
class Dataset:
    """A data set in memory; `mean` and `std` of each channel are for pixel values in 0..1."""

    name: str
    train: Images
    test: Images
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    names: Sequence[str] = ()  # of the classes; (): their numbers
    resize_size: int | None = None  # see `load`
    background: str = BACKGROUND  # on which images with alpha are composed
    source_fingerprint: str | None = None
    """The fingerprint, if a stream derived these images from other data; None: hash the images."""

    @property
    def preparation(self) -> dict[str, Any]:
        """Shape, statistics and names of classes for run.json; `prepared_like` reads them."""
        record = {
            "shape": list(self.shape),
            "mean": list(self.mean),
            "std": list(self.std),
            "classes": list(self.names) or [str(number) for number in range(self.classes)],
        }
        if self.resize_size:
            record["resize_size"] = self.resize_size
        if self.background != BACKGROUND:
            record["background"] = self.background
        return record

    @property
    def shape(self) -> tuple[int, ...]:
        """Channels, height, width."""
        return tuple(self.train.images.shape[1:])

    def examples(self, images: Images, device: torch.device | str = "cpu") -> Examples:
        """Normalised float images, channels last in memory, on `device`."""
        return Examples(self.normalised(images.images, device), images.labels.to(device))

    def normalised(self, images: Tensor, device: torch.device | str = "cpu") -> Tensor:
        """Bytes (n, channels, height, width) as normalised floats, channels last in memory, on
        `device`."""
        x = images.to(device, non_blocking=True)
        x = x.contiguous(memory_format=torch.channels_last).float()
        mean = torch.tensor(self.mean, device=device).view(-1, 1, 1) * 255
        std = torch.tensor(self.std, device=device).view(-1, 1, 1) * 255
        return x.sub_(mean).div_(std)

    def select(
        self,
        images: Images,
        chosen: Tensor,
        device: torch.device | str = "cpu",
        stored: bool = False,
    ) -> AnyExamples:
        """Examples of the indices `chosen` (n,) of `images`, with labels on `device`.

        Images stay bytes if `stored`, or if they are large or many.
        """
        labels = images.labels[chosen]
        values = math.prod(self.shape)
        if stored or values > _SMALL or 4 * len(chosen) * values > NORMALISED:
            normalise = partial(self.normalised, device=device)
            return StoredExamples(images.images, chosen, labels.to(device), normalise)
        return self.examples(Images(images.images.index_select(0, chosen), labels), device)

    def normalised_as(self, name: str) -> "Dataset":
        """These images with the statistics of `_KNOWN[name]`, averaged over its three channels
        unless these images have three."""
        mean, std = _KNOWN[name]
        if self.shape[0] != 3:
            mean = (sum(mean) / 3,)
            std = (sum(std) / 3,)
        return replace(self, mean=mean, std=std)

    @property
    def black(self) -> Tensor:
        """A black pixel (channels,), normalised."""
        return self.normalised(torch.zeros(1, self.shape[0], 1, 1, dtype=torch.uint8)).flatten()

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits that identify the data: a hash of all images and labels, unless given."""
        if self.source_fingerprint:
            return self.source_fingerprint
        digest = hashlib.blake2b(digest_size=8)
        for part in (*self.train, *self.test):
            digest.update(part.contiguous().numpy().data)
        return digest.hexdigest()


@lru_cache(maxsize=2)
def load(
    name: str,
    root: str = "data",
    download: bool = False,
    image_size: int | None = None,
    cache_images: str | None = None,
    resize_size: int | None = None,
    background: str = BACKGROUND,
    skip_unreadable: bool = False,
) -> Dataset:
    """Read a data set of `presets.DATASETS` from `root`.

    With `image_size`, images are scaled to `image_size` x `image_size` pixels; with `resize_size`
    as well, the shorter side is scaled to that and the centre cut out. `folder` reads
    root/train/CLASS/*.png and root/test/CLASS/*.png, composes images with alpha on `background`
    and may leave out unreadable ones; with `cache_images`, its images are memory-mapped from files
    in that folder. The other data sets read the files of torchvision.datasets.

    UserError: files are missing (without `download`) or unreadable, or images differ in size.
    """
    presets.check_dataset(name, image_size, resize_size, cache_images, background, skip_unreadable)
    size = folder.size_of(image_size, resize_size)
    cache = Path(cache_images) if cache_images else None
    read_folder = partial(folder.read, Path(root), size, cache, background, skip_unreadable)
    raw = Path(root, name.upper(), "raw")
    where = raw if raw.is_dir() else root  # raw: MNIST's and EMNIST's
    try:
        dataset = _read(name, root, download, size, read_folder)
        return replace(dataset, background=background)
    except MemoryError:
        lower = ": give --cache-images DIR, or lower --image-size" if name == "folder" else ""
        raise UserError(f"{name} in {where} needs more memory than there is{lower}") from None
    except _DAMAGED as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        within = f"{raw}: " if where == raw else ""
        hint = "give its folder with --data-root, or use --download"
        raise UserError(f"cannot read {name} from {root} ({within}{reason}): {hint}") from None


def _read(
    name: str,
    root: str,
    download: bool,
    size: folder.Size | None,
    read_folder: Callable[[], list[tuple[np.ndarray, np.ndarray]]],
) -> Dataset:
    """As `load`; `read_folder` reads a folder's images."""
    names: list[str] = []
    if name == "folder":
        train, test = read_folder()
        names = sorted(place.name for place in Path(root, "train").glob("[!.]*/"))
    elif name == "digits":
        train, test = _digits()
    else:
        train, test = _of_torchvision(name, root, download)
    dataset = make_dataset(name, train, test, _KNOWN.get(name))
    dataset = replace(dataset, names=names, resize_size=size and size.shorter)
    if size and name != "folder":
        scaled_train = _scaled(dataset.train, size)
        scaled_test = _scaled(dataset.test, size)
        return replace(dataset, train=scaled_train, test=scaled_test)
    return dataset


def _digits() -> list[tuple[np.ndarray, np.ndarray]]:
    """Training and test images of scikit-learn's 1,797 handwritten digits of 8 x 8 pixels, each
    with its labels; a fixed random fifth is the test set."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    order = np.random.RandomState(0).permutation(len(digits.target))
    pixels = (digits.images[order] * (255 / 16)).round().astype(np.uint8)
    labels = digits.target[order]
    test = np.arange(len(order)) % 5 == 0
    return [(pixels[part], labels[part]) for part in (~test, test)]


def _of_torchvision(name: str, root: str, download: bool) -> list[tuple[np.ndarray, Any]]:
    """Training and test images of a data set of torchvision, each with its labels."""
    from torchvision import datasets

    options: dict[str, Any] = {"split": "balanced"} if name == "emnist" else {}
    parts = []
    with tempfile.TemporaryDirectory() as place:
        if unpack_missing(Path(root, name.upper(), "raw"), Path(place, name.upper(), "raw")):
            root = place
        for training in (True, False):
            dataset_class = getattr(datasets, name.upper())
            part = dataset_class(root, train=training, download=download, **options)
            pixels = np.asarray(part.data)
            if pixels.ndim == 4:  # CIFAR has channels last
                pixels = pixels.transpose(0, 3, 1, 2)
            parts.append((pixels, part.targets))
    return parts


def _scaled(images: Images, size: folder.Size) -> Images:
    return Images(torch.from_numpy(folder.scaled(images.images.numpy(), size)), images.labels)


def make_dataset(
    name: str, train: Sequence[Any], test: Sequence[Any], statistics: Any = None
) -> Dataset:
    """A data set of `train` and `test`, each a pair of images and labels, as arrays or tensors.

    Images are bytes (n, height, width) or (n, channels, height, width); labels (n,) are whole
    numbers from 0 to one less than the number of classes. `statistics` are mean and std of each
    channel; None computes them from the training images. A `name` of your own has the defaults of
    `folder`.

    UserError: arrays of other types or shapes.
    """
    train_images = _images(f"training images of {name}", *train)
    test_images = _images(f"test images of {name}", *test)
    train_size = tuple(train_images.images.shape[1:])
    test_size = tuple(test_images.images.shape[1:])
    if train_size != test_size:
        sizes = f"training images are {train_size}, test images {test_size}"
        raise UserError(f"{name}: {sizes}: give one size")
    classes = int(max(train_images.labels.max(), test_images.labels.max())) + 1
    mean, std = statistics or _statistics(train_images.images)
    return Dataset(name, train_images, test_images, classes, mean, std)


def _statistics(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel of images (n, channels, height, width), in 0..1.

    They are computed from counts of the 256 byte values; pixels as doubles would take 8 times the
    memory.
    """
    counts = torch.zeros(())
    for chunk in images.split(256):
        per_channel = [
            torch.bincount(channel.flatten(), minlength=256) for channel in chunk.unbind(1)
        ]
        counts = counts + torch.stack(per_channel)
    counts = counts.double()
    values = torch.arange(256).double() / 255
    total = counts.sum(1)
    mean = counts @ values / total
    squares = (values - mean[:, None]).square()
    variance = (counts * squares).sum(1) / (total - 1).clamp_min(1)
    std = variance.sqrt().clamp_min(1e-6)
    return tuple(mean.tolist()), tuple(std.tolist())


def prepared_like(record: Mapping[str, Any], name: str) -> Dataset:
    """A data set without images that prepares others as `record`, a `Dataset.preparation`, says."""
    no_pixels = torch.empty(0, *record["shape"], dtype=torch.uint8)
    no_images = Images(no_pixels, torch.empty(0, dtype=torch.int64))
    return Dataset(
        name,
        train=no_images,
        test=no_images,
        classes=len(record["classes"]),
        mean=tuple(record["mean"]),
        std=tuple(record["std"]),
        names=record["classes"],
        resize_size=record.get("resize_size"),
        background=record.get("background", BACKGROUND),
    )


def array_of(values: Any) -> np.ndarray:
    """A tensor, wherever it is, or what NumPy takes, as an array."""
    return np.asarray(values.detach().cpu() if isinstance(values, Tensor) else values)


def _images(title: str, images: Any, labels: Any) -> Images:
    """Images and labels of `make_dataset` as tensors; `title` names them in errors.

    UserError: they have other types or shapes.
    """
    x = array_of(images)
    y = array_of(labels)
    channels_last = x.ndim == 4 and x.shape[1] > 4 >= x.shape[3]
    if x.dtype != np.uint8 or x.ndim not in (3, 4) or not x.size or channels_last:
        needed = "uint8 (n, height, width) or (n, channels, height, width)"
        raise UserError(f"{title} are {x.dtype} {x.shape}: give {needed}")
    if y.shape != (len(x),) or y.dtype.kind not in "iu" or y.min() < 0:
        least = f" from {y.min()}" if y.size and y.dtype.kind in "iuf" else ""
        labels_are = f"labels of {title} are {y.dtype} {y.shape}{least}"
        raise UserError(f"{labels_are}: give {len(x)} whole numbers >= 0")
    x = np.ascontiguousarray(x if x.ndim == 4 else x[:, None])
    return Images(torch.from_numpy(x), torch.from_numpy(y.astype(np.int64)))


class MegaBatchStream:
    """B mega-batches of a data set: an i.i.d. partition of its training images, and its test set.

    The partition equals that of the authors' code (`numpy.random.seed(seed)`, `permutation`,
    `array_split`), but leaves the global random state unchanged. The last tenth of each shuffled
    mega-batch is its validation set. `parts` gives the indices of each mega-batch in place of the
    partition. A stream that drifts has `held_out`, indices of the test images of each mega-batch,
    and `scenario`, the name of the drift; a stream by date has its `periods`.

    UserError: a mega-batch has fewer than 2 images.
    """

    def __init__(
        self,
        dataset: str | Dataset = "digits",
        megabatches: int | None = None,
        seed: int = 0,
        parts: Sequence[np.ndarray] | None = None,
        held_out: Sequence[np.ndarray] = (),
        scenario: str | None = None,
        periods: Sequence[ImagePeriod] = (),
    ):
        self.dataset = load(dataset) if isinstance(dataset, str) else dataset
        self.seed = seed
        self._parts_given = parts is not None
        total = len(self.dataset.train.labels)
        if parts is None:
            if megabatches is None:
                megabatches = presets.megabatches(self.dataset.name)
            presets.check_megabatches(megabatches, total)
            presets.check_seed(seed)
            order = np.random.RandomState(seed).permutation(total)
            parts = np.array_split(order, megabatches)
        self.parts = [np.asarray(part) for part in parts]
        if min(map(len, self.parts), default=0) < 2:
            needed = "one for training, one for validation"
            raise UserError(f"a mega-batch needs at least 2 images: {needed}")
        for part in self.parts:
            if part.dtype.kind not in "iu" or part.min() < 0 or part.max() >= total:
                numbers = f"whole numbers from 0 to {total - 1}"
                raise UserError(f"parts: give indices of training images, {numbers}")
        self.held_out = [np.asarray(part, dtype=np.int64) for part in held_out]
        self.scenario = scenario
        self.periods = periods

    @property
    def partition(self) -> int | str:
        """An identifier of the partition: the seed, or a hash (16 hex digits) of `parts`."""
        if not self._parts_given or self.scenario:
            return self.seed
        digest = hashlib.blake2b(digest_size=8)
        for part in self.parts:
            digest.update(part.tobytes() + b"|")
        return digest.hexdigest()

    def __len__(self) -> int:
        """Number of mega-batches, B."""
        return len(self.parts)

    def split(self, t: int) -> tuple[np.ndarray, np.ndarray]:
        """Indices of the training and validation images of mega-batch t = 1..B."""
        part = self.parts[t - 1]
        if self.periods:
            cut = len(self.periods[t - 1].splits["train"])
        else:
            cut = len(part) - max(1, int(len(part) * VALIDATION))
        return part[:cut], part[cut:]
