"""Data sets, read from small files in their real formats."""

import gzip
import pickle
import re
import struct

import numpy as np
import pytest
import torch

from vision import MegaBatchStream, data, presets, run
from vision.data import Dataset, Images, make_dataset
from vision.learners import resolve

RNG = np.random.RandomState
EMNIST = ("emnist-balanced-train", "emnist-balanced-test")
pytestmark = pytest.mark.usefixtures("no_cache")


def test_digits():
    digits = data.load("digits")
    assert digits is data.load("digits"), "read once"
    assert (len(digits.train.labels), len(digits.test.labels)) == (1437, 360)
    assert (digits.shape, digits.classes) == ((1, 8, 8), 10)
    assert digits.train.images.dtype == torch.uint8
    assert (digits.train.images.min(), digits.train.images.max()) == (0, 255)
    for images in (digits.train, digits.test):
        share = images.labels.bincount() / len(images.labels)
        assert 0.07 < share.min() < share.max() < 0.13
    x, labels = digits.examples(digits.train)
    assert abs(x.mean()) < 1e-5
    assert abs(x.std() - 1) < 1e-4
    assert torch.equal(labels, digits.train.labels)


def test_examples_are_normalised_and_channels_last():
    images = Images(
        torch.tensor([[0, 255], [51, 102]], dtype=torch.uint8).view(2, 2, 1, 1),
        torch.tensor([1, 0]),
    )
    x, labels = Dataset("folder", images, images, 2, (0.5, 0.2), (0.25, 0.1)).examples(images)
    assert x.flatten().tolist() == pytest.approx([-2, 8, -1.2, 2])
    assert labels.tolist() == [1, 0]
    assert (x.dtype, labels.dtype, x.device.type) == (torch.float32, torch.int64, "cpu")
    pictures = Images(torch.randint(0, 256, (4, 3, 5, 6), dtype=torch.uint8), torch.arange(4))
    before = pictures.images.clone()
    x = make_dataset("folder", pictures, pictures).examples(pictures, torch.device("cpu")).images
    assert x.is_contiguous(memory_format=torch.channels_last)
    assert not x.is_contiguous()
    assert torch.equal(pictures.images, before)


@pytest.mark.gpu
def test_examples_on_a_gpu():
    digits = data.load("digits")
    on_cpu = digits.examples(digits.test)
    on_gpu = digits.examples(digits.test, "cuda")
    assert on_gpu.images.device.type == on_gpu.labels.device.type == "cuda"
    assert torch.allclose(on_gpu.images.cpu(), on_cpu.images, atol=1e-5)
    assert torch.equal(on_gpu.labels.cpu(), on_cpu.labels)


def test_mean_and_std_of_the_pixels_and_black():
    images = torch.from_numpy(RNG(0).randint(0, 256, (7, 3, 5, 4)).astype(np.uint8))
    images[:, 2] = 9
    images[0, :, 0, 0] = 0
    dataset = make_dataset(
        "folder",
        Images(images, torch.tensor([0, 1, 2, 0, 1, 2, 6])),
        Images(images[:1], torch.tensor([3])),
    )
    pixels = images.double().transpose(0, 1).flatten(1) / 255
    assert dataset.mean == pytest.approx(pixels.mean(1).tolist())
    assert dataset.std == pytest.approx(pixels.std(1).tolist())
    assert dataset.classes == 7
    assert torch.equal(dataset.black, dataset.examples(dataset.train).images[0, :, 0, 0])
    assert dataset.black.tolist() == pytest.approx(
        [-m / s for m, s in zip(dataset.mean, dataset.std, strict=True)]
    )
    images[:, 2] = 9
    assert make_dataset("folder", dataset.train, dataset.test).std[2] > 0, (
        "a constant channel has a positive std"
    )


def test_fingerprint_changes_with_any_byte():
    def fingerprint(part=None, tensor=0) -> str:
        parts = [
            Images(torch.zeros(3, 1, 2, 2, dtype=torch.uint8), torch.zeros(3, dtype=torch.int64))
            for _ in range(2)
        ]
        if part is not None:
            parts[part][tensor].view(-1)[-1] = 1
        return Dataset("digits", *parts, 2, (0.0,), (1.0,)).fingerprint

    prints = [fingerprint(), *(fingerprint(part, tensor) for part in (0, 1) for tensor in (0, 1))]
    assert len(set(prints)) == 5
    assert fingerprint() == prints[0]
    assert re.fullmatch("[0-9a-f]{16}", prints[0])


# Arrays of your own


def gray(n=12):
    return RNG(0).randint(0, 256, (n, 5, 4)).astype(np.uint8), np.arange(n) % 3


def test_arrays_of_any_layout_make_the_same_data_set():
    x, y = gray()
    dataset = make_dataset("mine", (x, y), (x[:4], y[:4]))
    assert (dataset.shape, dataset.classes, dataset.train.labels.dtype) == (
        (1, 5, 4),
        3,
        torch.int64,
    )
    assert torch.equal(dataset.train.images[:, 0], torch.from_numpy(x))
    for images, labels in (
        (x[:, None], y.tolist()),
        (torch.from_numpy(x), torch.from_numpy(y)),
        (np.asfortranarray(x), y.astype(np.uint8)),
        (x[::-1][::-1], y),
        Images(torch.from_numpy(x)[:, None], torch.from_numpy(y)),
    ):
        other = make_dataset("mine", (images, labels), (x[:4], y[:4]))
        assert (other.fingerprint, other.mean, other.std) == (
            dataset.fingerprint,
            dataset.mean,
            dataset.std,
        )
    colour = np.stack([x, x, x], 1)
    assert make_dataset("mine", (colour, y), (colour, y)).shape == (3, 5, 4)


def test_a_data_set_of_your_own_trains_with_the_defaults_of_a_folder(tmp_path):
    part = gray()
    record = run(
        MegaBatchStream(make_dataset("mine", part, part), 2), "sm", tmp_path, epochs=1, hidden=2
    )
    assert (record.config["dataset"], record.config["arch"], len(record.rows)) == ("mine", "vgg", 3)
    assert vars(resolve("mine", "gens", "draft")) == vars(resolve("folder", "gens", "draft"))
    assert presets.megabatches("mine") == presets.megabatches("folder") == 100


NEEDED = "give uint8 (n, height, width) or (n, channels, height, width)"
WRONG = [
    (lambda x, y: (x / 255, y), f"training images of mine are float64 (12, 5, 4): {NEEDED}"),
    (lambda x, y: (x.astype(int), y), "are int64 (12, 5, 4)"),
    (lambda x, y: (x.reshape(12, 20), y), "are uint8 (12, 20)"),
    (lambda x, y: (x[:0], y[:0]), "are uint8 (0, 5, 4)"),
    (lambda x, y: (np.stack([x, x, x], 3), y), "are uint8 (12, 5, 4, 3)"),
    (
        lambda x, y: (x, y - 1),
        "labels of training images of mine are int64 (12,) from -1: give 12",
    ),
    (lambda x, y: (x, y / 2), "are float64 (12,) from 0.0: give 12 whole numbers >= 0"),
    (lambda x, y: (x, y[1:]), "are int64 (11,)"),
    (lambda x, y: (x, np.eye(3)[y]), "are float64 (12, 3)"),
    (lambda x, y: (x[:, 1:], y), "mine: training images are (1, 4, 4), test images (1, 5, 4)"),
]


@pytest.mark.parametrize(("change", "message"), WRONG)
def test_other_arrays_are_one_line(refused, change, message):
    assert message in refused(make_dataset, "mine", change(*gray()), gray())


# Data sets of torchvision


def write_idx(path, array):
    """Write an array in the format of MNIST: type and number of dimensions, sizes, bytes."""
    content = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content + array.astype(np.uint8).tobytes())


def write_mnist(root, name="mnist"):
    """Write 12 training and 6 test images as the four files of MNIST or EMNIST."""
    written = {}
    classes, stems = (10, ("train", "t10k")) if name == "mnist" else (47, EMNIST)
    for part, prefix, n in zip(("train", "test"), stems, (12, 6), strict=True):
        images = RNG(n).randint(0, 256, (n, 28, 28))
        labels = RNG(n).randint(0, classes, n)
        labels[0] = classes - 1
        raw = root / name.upper() / "raw"
        write_idx(raw / f"{prefix}-images-idx3-ubyte", images)
        write_idx(raw / f"{prefix}-labels-idx1-ubyte", labels)
        written[part] = images, labels
    return written


def check(read, written):
    """Check that a data set equals what was written,
    with images (n, channels, height, width) as bytes."""
    for name, (images, labels) in written.items():
        part = getattr(read, name)
        assert (part.images.dtype, part.labels.dtype) == (torch.uint8, torch.int64)
        assert np.array_equal(part.images.numpy(), images.reshape(part.images.shape))
        assert part.images.is_contiguous()
        assert np.array_equal(part.labels.numpy(), labels)


@pytest.mark.parametrize("name", ["mnist", "emnist"])
@pytest.mark.parametrize("packed", [(), ("train-images", "test-labels", "t10k-labels"), ("",)])
def test_mnist_and_emnist(tmp_path, name, packed):
    """Files may be packed, some or all, in a folder that is read-only."""
    written = write_mnist(tmp_path, name)
    raw = tmp_path / name.upper() / "raw"
    for path in list(raw.iterdir()):
        if not any(part in path.name for part in packed):
            continue
        path.with_name(path.name + ".gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    raw.chmod(0o555)
    read = data.load(name, str(tmp_path))
    check(read, written)
    assert (read.shape, read.classes) == ((1, 28, 28), 10 if name == "mnist" else 47)
    if name == "mnist":
        assert (read.mean, read.std) == ((0.1307,), (0.3081,))
    else:
        assert read.mean == pytest.approx([written["train"][0].mean() / 255])


@pytest.fixture
def cifar(monkeypatch):
    """Write a few images as CIFAR-10 or CIFAR-100, and disable torchvision's check of the MD5
    sum."""
    import torchvision.datasets.cifar

    monkeypatch.setattr(torchvision.datasets.cifar, "check_integrity", lambda path, md5=None: True)

    def write(root, name):
        ten = name == "cifar10"
        classes, key = (10, "labels") if ten else (100, "fine_labels")
        folder = root / ("cifar-10-batches-py" if ten else "cifar-100-python")
        folder.mkdir()
        meta, words = ("batches.meta", "label_names") if ten else ("meta", "fine_label_names")
        (folder / meta).write_bytes(
            pickle.dumps({words: [f"class {i}" for i in range(classes)]}, 2)
        )
        trains = [f"data_batch_{i}" for i in range(1, 6)] if ten else ["train"]
        written: dict[str, list] = {"train": [], "test": []}
        for seed, file in enumerate([*trains, "test_batch" if ten else "test"]):
            images = RNG(seed).randint(0, 256, (4, 3, 32, 32)).astype(np.uint8)
            labels = [classes - 1, *RNG(seed).randint(0, classes, 3).tolist()]
            (folder / file).write_bytes(
                pickle.dumps({"data": images.reshape(4, 3072), key: labels}, 2)
            )
            written["train" if file in trains else "test"].append((images, labels))
        expected = {}
        for part, parts in written.items():
            expected[part] = tuple(map(np.concatenate, zip(*parts, strict=True)))
        return expected

    return write


@pytest.mark.parametrize(("name", "classes", "count"), [("cifar10", 10, 20), ("cifar100", 100, 4)])
def test_cifar(tmp_path, cifar, name, classes, count, refused):
    written = cifar(tmp_path, name)
    read = data.load(name, str(tmp_path))
    check(read, written)
    assert (read.shape, read.classes, len(read.train.labels)) == ((3, 32, 32), classes, count)
    mean = (0.4914, 0.4822, 0.4465)
    assert read.mean == pytest.approx(
        mean if name == "cifar10" else written["train"][0].mean((0, 2, 3)) / 255
    )
    path = next(tmp_path.glob("*/*train" if classes > 10 else "*/data_batch_3"))
    whole = path.read_bytes()
    for damaged in (
        b"",
        whole[:100],
        whole[:-1],
        b"<html>" + whole[6:],
        pickle.dumps({"labels": []}),
    ):
        path.write_bytes(damaged)
        data.load.cache_clear()
        assert f"cannot read {name}" in refused(data.load, name, str(tmp_path))


@pytest.mark.parametrize("name", ["mnist", "emnist", "cifar10"])
def test_a_missing_data_set_is_one_line(tmp_path, name, refused):
    line = refused(data.load, name, str(tmp_path))
    assert line.startswith(f"cannot read {name} from {tmp_path}")
    assert "--data-root, or use --download" in line


@pytest.mark.parametrize("packed", [False, True])
def test_damaged_files_are_one_line(tmp_path, refused, packed):
    write_mnist(tmp_path)
    raw = tmp_path / "MNIST/raw"
    if packed:
        whole = (raw / "train-images-idx3-ubyte").read_bytes()
        (raw / "train-images-idx3-ubyte").unlink()
        (raw / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(whole))
    for path in sorted(raw.iterdir()):
        whole = path.read_bytes()
        for damaged in (b"", whole[:2], whole[:7], whole[:-1], whole + b"0", b"<html>" + whole[6:]):
            path.write_bytes(damaged)
            line = refused(data.load, "mnist", str(tmp_path))
            of_gzip = path.suffix == ".gz"
            assert (f"{path}: " if of_gzip else f"mnist from {tmp_path} ({raw}: ") in line, damaged[
                :9
            ]
        path.write_bytes(whole)
    write_idx(tmp_path / "MNIST/raw/train-labels-idx1-ubyte", np.zeros(11))
    line = refused(data.load, "mnist", str(tmp_path))
    assert line.startswith("labels of training images of mnist are int64 (11,)")
