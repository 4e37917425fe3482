"""Data sets in memory, and the stream of mega-batches of their images."""

import hashlib
import math
import pickle
import tempfile
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from alma.errors import UserError
from alma.stages import Stage
from vision import folder, presets
from vision.examples import AnyExamples, Examples, StoredExamples
from vision.periods import ImagePeriod
from vision.train import Replay
from vision.unpacking import unpack

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
_SMALL, NORMALISED = 1 << 14, 1 << 28
"""Values of an image, and bytes of the images of a stage or test set, up to which they are normalised once.
Beyond, each batch is normalised anew, which takes little time beside a network for such images."""


class Images(NamedTuple):
    """Images (n, channels, height, width) as bytes, a tensor or `Pixels`, and labels (n,) as int64."""

    images: Any
    labels: Tensor


@dataclass(frozen=True)
class Dataset:
    """A data set in memory; `mean` and `std` are those of each channel, for pixel values in 0..1."""

    name: str
    train: Images
    test: Images
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    names: Sequence[str] = ()  # of the classes; (): their numbers
    resize_size: int | None = None  # see `load`

    @property
    def preparation(self) -> dict[str, Any]:
        """What prepares other images like these, as run.json records it; `prepared_like` reads it."""
        names = list(self.names) or [str(number) for number in range(self.classes)]
        record = {"shape": list(self.shape), "mean": list(self.mean), "std": list(self.std), "classes": names}
        return record | ({"resize_size": self.resize_size} if self.resize_size else {})

    @property
    def shape(self) -> tuple[int, ...]:
        """Channels, height, width."""
        return tuple(self.train.images.shape[1:])

    def examples(self, images: Images, device: torch.device | str = "cpu") -> Examples:
        """Normalised float images, channels last in memory, on `device`."""
        return Examples(self.normalised(images.images, device), images.labels.to(device))

    def normalised(self, images: Tensor, device: torch.device | str = "cpu") -> Tensor:
        """Bytes (n, channels, height, width) as normalised floats, channels last in memory, on `device`."""
        x = images.to(device, non_blocking=True).contiguous(memory_format=torch.channels_last).float()
        mean, std = (torch.tensor(v, device=device).view(-1, 1, 1) * 255 for v in (self.mean, self.std))
        return x.sub_(mean).div_(std)

    def select(
        self, images: Images, chosen: Tensor, device: torch.device | str = "cpu", stored: bool = False
    ) -> AnyExamples:
        """Examples of the indices `chosen` (n,) of `images` on `device`; they stay bytes if `stored`, or if
        they are large or many."""
        labels, values = images.labels[chosen], math.prod(self.shape)
        if stored or values > _SMALL or 4 * len(chosen) * values > NORMALISED:
            normalise = partial(self.normalised, device=device)
            return StoredExamples(images.images, chosen, labels.to(device), normalise)
        return self.examples(Images(images.images.index_select(0, chosen), labels), device)

    def normalised_as(self, name: str) -> "Dataset":
        """These images, normalised as those of a known data set; unless they have three channels, with the
        means over its channels."""
        mean, std = _KNOWN[name] if self.shape[0] == 3 else (((sum(v) / 3),) for v in _KNOWN[name])
        return replace(self, mean=mean, std=std)

    @property
    def black(self) -> Tensor:
        """A black pixel (channels,), normalised."""
        return self.normalised(torch.zeros(1, self.shape[0], 1, 1, dtype=torch.uint8)).flatten()

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits that identify the data: a hash of all images and labels."""
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
) -> Dataset:
    """Read a data set of `presets.DATASETS` from `root`; its images are scaled to `image_size` x `image_size`
    pixels if given; with `resize_size`, the shorter side to that, and the centre is cut out.

    `folder` reads root/train/CLASS/*.png and root/test/CLASS/*.png; with `cache_images` its images lie in
    files in that folder, mapped into memory. The others read the files of torchvision.datasets. UserError if
    files are missing (without `download`) or unreadable, or if images differ in size.
    """
    presets.check_dataset(name, image_size, resize_size, cache_images)
    size, raw = folder.size_of(image_size, resize_size), Path(root, name.upper(), "raw")
    where = raw if raw.is_dir() else root  # raw: MNIST's and EMNIST's
    try:
        return _read(name, root, download, size, Path(cache_images) if cache_images else None)
    except MemoryError:
        lower = ": give --cache-images DIR, or lower --image-size" if name == "folder" else ""
        raise UserError(f"{name} in {where} needs more memory than there is{lower}") from None
    except _DAMAGED as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        within = f"{raw}: " if where == raw else ""
        hint = "give its folder with --data-root, or use --download"
        raise UserError(f"cannot read {name} from {root} ({within}{reason}): {hint}") from None


def _read(name: str, root: str, download: bool, size: folder.Size | None, cache: Path | None) -> Dataset:
    """As `load`; a folder's images are mapped from files in `cache` if given."""
    parts: Any  # images and labels, for training and for tests
    names: list[str] = []
    if name == "folder":
        parts = folder.read(Path(root), size, cache)
        names = sorted(place.name for place in Path(root, "train").glob("[!.]*/"))
    elif name == "digits":
        # scikit-learn's 1,797 handwritten digits of 8 x 8 pixels; a fixed random fifth is the test set.
        from sklearn.datasets import load_digits

        digits = load_digits()
        order = np.random.RandomState(0).permutation(len(digits.target))
        pixels, labels = (digits.images[order] * (255 / 16)).round().astype(np.uint8), digits.target[order]
        test = np.arange(len(order)) % 5 == 0
        parts = [(pixels[part], labels[part]) for part in (~test, test)]
    else:
        from torchvision import datasets

        split = {"split": "balanced"} if name == "emnist" else {}
        parts = []
        raw = Path(root, name.upper(), "raw")
        packed = [path for path in raw.glob("*-ubyte.gz") if not path.with_suffix("").exists()]
        with tempfile.TemporaryDirectory() as place:
            if packed:  # torchvision reads what is unpacked, and the folder may be read-only
                root, files = place, Path(place, name.upper(), "raw")
                files.mkdir(parents=True)
                for path in raw.iterdir():
                    (files / path.name).symlink_to(path.resolve())
                for path in packed:
                    unpack(path, files / path.stem)
            for training in (True, False):
                part = getattr(datasets, name.upper())(root, train=training, download=download, **split)
                pixels = np.asarray(part.data)  # of CIFAR with channels behind
                parts.append((pixels if pixels.ndim == 3 else pixels.transpose(0, 3, 1, 2), part.targets))
    dataset = make_dataset(name, parts[0], parts[1], _KNOWN.get(name))
    dataset = replace(dataset, names=names, resize_size=size and size.shorter)
    if not size or name == "folder":
        return dataset
    train, test = (
        Images(torch.from_numpy(folder.scaled(images.numpy(), size)), labels)
        for images, labels in (dataset.train, dataset.test)
    )
    return replace(dataset, train=train, test=test)


def make_dataset(name: str, train: Sequence[Any], test: Sequence[Any], statistics: Any = None) -> Dataset:
    """A data set of `train` and `test`: images, bytes (n, height, width) or (n, channels, height, width), and
    labels (n,), whole numbers from 0 to one less than the number of classes; arrays or tensors.

    `statistics` are mean and std of each channel; None computes them from the training images. A `name` of
    your own has the defaults of `folder`. UserError: other arrays.
    """
    train, test = _images(f"training images of {name}", *train), _images(f"test images of {name}", *test)
    sizes = [tuple(part.images.shape[1:]) for part in (train, test)]
    if sizes[0] != sizes[1]:
        raise UserError(f"{name}: training images are {sizes[0]}, test images {sizes[1]}: give one size")
    classes = int(max(train.labels.max(), test.labels.max())) + 1
    if statistics is None:  # from counts of the 256 values: doubles take 8 times the memory
        count = partial(torch.bincount, minlength=256)
        chunks = ([count(x.flatten()) for x in part.unbind(1)] for part in train.images.split(256))
        counts = sum(map(torch.stack, chunks), torch.zeros(())).double()
        values, total = torch.arange(256).double() / 255, counts.sum(1)
        mean = counts @ values / total
        variance = (counts * (values - mean[:, None]).square()).sum(1) / (total - 1).clamp_min(1)
        statistics = tuple(mean.tolist()), tuple(variance.sqrt().clamp_min(1e-6).tolist())
    return Dataset(name, train, test, classes, *statistics)


def prepared_like(record: Mapping[str, Any], name: str) -> Dataset:
    """A data set without images, with the preparation that run.json records."""
    none = Images(torch.empty(0, *record["shape"], dtype=torch.uint8), torch.empty(0, dtype=torch.int64))
    names, statistics = record["classes"], (tuple(record["mean"]), tuple(record["std"]))
    return Dataset(name, none, none, len(names), *statistics, names, record.get("resize_size"))


def _images(what: str, images: Any, labels: Any) -> Images:
    """Images and labels of `make_dataset` as tensors. UserError: they have other types or shapes."""
    x, y = (np.asarray(values.cpu() if isinstance(values, Tensor) else values) for values in (images, labels))
    channels_last = x.ndim == 4 and x.shape[1] > 4 >= x.shape[3]
    if x.dtype != np.uint8 or x.ndim not in (3, 4) or not x.size or channels_last:
        needed = "uint8 (n, height, width) or (n, channels, height, width)"
        raise UserError(f"{what} are {x.dtype} {x.shape}: give {needed}")
    if y.shape != (len(x),) or y.dtype.kind not in "iu" or y.min() < 0:
        least = f" from {y.min()}" if y.size and y.dtype.kind in "iuf" else ""
        raise UserError(f"labels of {what} are {y.dtype} {y.shape}{least}: give {len(x)} whole numbers >= 0")
    x = np.ascontiguousarray(x if x.ndim == 4 else x[:, None])
    return Images(torch.from_numpy(x), torch.from_numpy(y.astype(np.int64)))


class MegaBatchStream:
    """B mega-batches of a data set: an i.i.d. partition of its training images, and its test set.

    The partition equals that of the authors' code (`numpy.random.seed(seed)`, `permutation`, `array_split`),
    but leaves the global random state unchanged. The last tenth of each shuffled mega-batch is its validation
    set. `parts` replaces the partition by given indices of each mega-batch. For a stream that drifts,
    `held_out` has the indices of each mega-batch's own test images, and `scenario` names the drift; `periods`
    are those of a stream by date. UserError if a mega-batch has fewer than 2 images.
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
            wanted = presets.megabatches(self.dataset.name) if megabatches is None else megabatches
            presets.check_megabatches(wanted, total)
            presets.check_seed(seed)
            order = np.random.RandomState(seed).permutation(total)
            parts = np.array_split(order, wanted)
        self.parts = [np.asarray(part) for part in parts]
        if min(map(len, self.parts), default=0) < 2:
            raise UserError("a mega-batch needs at least 2 images: one for training, one for validation")
        if any(part.dtype.kind not in "iu" or part.min() < 0 or part.max() >= total for part in self.parts):
            raise UserError(f"parts: give indices of training images, whole numbers from 0 to {total - 1}")
        self.held_out, self.scenario = [np.asarray(part, dtype=np.int64) for part in held_out], scenario
        self.periods = periods

    @property
    def partition(self) -> int | str:
        """Identifies the partition: its seed, or 16 hex digits, a hash of the given `parts`."""
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
        cut = len(part) - max(1, int(len(part) * VALIDATION))
        cut = len(self.periods[t - 1].splits["train"]) if self.periods else cut
        return part[:cut], part[cut:]


class StageData:
    """Training and validation examples of the stages of a `schedule`, read anew at every call.

    With a `replay_share`, validation examples are a sample with that share of old ones. A stage has as many
    as without replay, and the same ones in every epoch.
    """

    def __init__(
        self,
        stream: MegaBatchStream,
        schedule: Sequence[Stage],
        device: torch.device,
        replay_share: float = 0.0,
    ):
        self._stream, self._schedule, self._device = stream, schedule, device
        self._replay_share = replay_share
        self._valid: tuple[int, AnyExamples] | None = None
        self.black = stream.dataset.black.to(device)

    def train(self, index: int) -> AnyExamples:
        """Training examples of stage `index`, of which `replay` draws."""
        return self._examples(index, 0)

    def valid(self, index: int) -> AnyExamples:
        """Validation examples of stage `index`; those of the last one asked for are kept."""
        if self._valid is None or self._valid[0] != index:
            self._valid = index, self._examples(index, 1)
        return self._valid[1]

    def replay(self, index: int, part: int = 0) -> Replay | None:
        """How epochs of stage `index` draw from its training examples (`part` 1: how validation samples);
        None: they have them all."""
        stage = self._schedule[index]
        if not (self._replay_share and stage.earlier):
            return None
        sizes, count = [*self.sizes(index, part).values()], len(stage.earlier)
        return Replay(tuple(sizes[:count]), sum(sizes[count:]), self._replay_share)

    def sizes(self, index: int, part: int = 0) -> dict[int, int]:
        """Training (`part` 1: validation) examples of each mega-batch t of stage `index`, in their order."""
        return {t: len(self._stream.split(t)[part]) for t in self._schedule[index].train_on}

    def classes(self, index: int) -> int:
        """Number of classes that a learner knows in stage `index`: of a stream by date those so far."""
        periods = self._stream.periods[: self._schedule[index].last]
        return sum(len(period.new_classes) for period in periods) or self._stream.dataset.classes

    def _examples(self, index: int, part: int) -> AnyExamples:
        dataset = self._stream.dataset
        indices = np.concatenate([self._stream.split(t)[part] for t in self._schedule[index].train_on])
        replay = self.replay(index, part)
        if replay and part:
            indices = indices[replay.sample(np.random.RandomState([self._stream.seed, index]))]
        # A replay reads few of its training examples: to normalise all takes longer than to train.
        stored = replay is not None and not part
        return dataset.select(dataset.train, torch.from_numpy(indices), self._device, stored)
