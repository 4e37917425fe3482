"""Data sets, read from small files in their real formats."""

import gzip
import pickle
import re
import struct

import numpy as np
import pytest
import torch

from vision import data, idx
from vision.data import Dataset, Images, make_dataset

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
        torch.tensor([[0, 255], [51, 102]], dtype=torch.uint8).view(2, 2, 1, 1), torch.tensor([1, 0])
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
    here, there = digits.examples(digits.test), digits.examples(digits.test, "cuda")
    assert there.images.device.type == there.labels.device.type == "cuda"
    assert torch.allclose(there.images.cpu(), here.images, atol=1e-5)
    assert torch.equal(there.labels.cpu(), here.labels)


def test_mean_and_std_of_the_pixels_and_black():
    images = torch.from_numpy(RNG(0).randint(0, 256, (7, 3, 5, 4)).astype(np.uint8))
    images[:, 2], images[0, :, 0, 0] = 9, 0
    made = make_dataset(
        "folder", Images(images, torch.tensor([0, 1, 2, 0, 1, 2, 6])), Images(images[:1], torch.tensor([3]))
    )
    pixels = images.double().transpose(0, 1).flatten(1) / 255
    assert made.mean == pytest.approx(pixels.mean(1).tolist())
    assert made.std == pytest.approx(pixels.std(1).tolist())
    assert made.classes == 7
    assert torch.equal(made.black, made.examples(made.train).images[0, :, 0, 0])
    assert made.black.tolist() == pytest.approx([-m / s for m, s in zip(made.mean, made.std, strict=True)])
    images[:, 2] = 9
    assert make_dataset("folder", made.train, made.test).std[2] > 0, "a constant channel has a positive std"


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


# Data sets of torchvision


def write_idx(path, array, packed=False):
    """Write an array in the format of MNIST: type and number of dimensions, sizes, bytes."""
    content = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    content += array.astype(np.uint8).tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    if packed:
        path.with_name(path.name + ".gz").write_bytes(gzip.compress(content))
    else:
        path.write_bytes(content)


def write_mnist(root, packed=False, name="mnist"):
    """Write 12 training and 6 test images as the four files of MNIST or EMNIST."""
    written = {}
    classes, stems = (10, ("train", "t10k")) if name == "mnist" else (47, EMNIST)
    for part, prefix, n in zip(("train", "test"), stems, (12, 6), strict=True):
        images, labels = RNG(n).randint(0, 256, (n, 28, 28)), RNG(n).randint(0, classes, n)
        labels[0] = classes - 1
        raw = root / name.upper() / "raw"
        write_idx(raw / f"{prefix}-images-idx3-ubyte", images, packed)
        write_idx(raw / f"{prefix}-labels-idx1-ubyte", labels, packed)
        written[part] = images, labels
    return written


def check(read, written):
    """Check that a data set equals what was written, with images (n, channels, height, width) as bytes."""
    for name, (images, labels) in written.items():
        part = getattr(read, name)
        assert (part.images.dtype, part.labels.dtype) == (torch.uint8, torch.int64)
        assert np.array_equal(part.images.numpy(), images.reshape(part.images.shape))
        assert part.images.is_contiguous()
        assert np.array_equal(part.labels.numpy(), labels)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ["mnist", "emnist"])
def test_mnist_and_emnist(tmp_path, name, packed):
    written = write_mnist(tmp_path, packed, name)
    read = data.load(name, str(tmp_path))
    check(read, written)
    assert (read.shape, read.classes) == ((1, 28, 28), 10 if name == "mnist" else 47)
    if name == "mnist":
        assert (read.mean, read.std) == ((0.1307,), (0.3081,))
    else:
        assert read.mean == pytest.approx([written["train"][0].mean() / 255])


@pytest.fixture
def cifar(monkeypatch):
    """Write a few images as CIFAR-10 or CIFAR-100, and disable torchvision's check of the MD5 sum."""
    import torchvision.datasets.cifar

    monkeypatch.setattr(torchvision.datasets.cifar, "check_integrity", lambda path, md5=None: True)

    def write(root, name):
        ten = name == "cifar10"
        classes, key = (10, "labels") if ten else (100, "fine_labels")
        folder = root / ("cifar-10-batches-py" if ten else "cifar-100-python")
        folder.mkdir()
        meta, words = ("batches.meta", "label_names") if ten else ("meta", "fine_label_names")
        (folder / meta).write_bytes(pickle.dumps({words: [f"class {i}" for i in range(classes)]}, 2))
        trains = [f"data_batch_{i}" for i in range(1, 6)] if ten else ["train"]
        written: dict[str, list] = {"train": [], "test": []}
        for seed, file in enumerate([*trains, "test_batch" if ten else "test"]):
            images = RNG(seed).randint(0, 256, (4, 3, 32, 32)).astype(np.uint8)
            labels = [classes - 1, *RNG(seed).randint(0, classes, 3).tolist()]
            (folder / file).write_bytes(pickle.dumps({"data": images.reshape(4, 3072), key: labels}, 2))
            written["train" if file in trains else "test"].append((images, labels))
        return {
            part: tuple(np.concatenate(arrays) for arrays in zip(*several, strict=True))
            for part, several in written.items()
        }

    return write


@pytest.mark.parametrize(("name", "classes", "count"), [("cifar10", 10, 20), ("cifar100", 100, 4)])
def test_cifar(tmp_path, cifar, name, classes, count, refused):
    written = cifar(tmp_path, name)
    read = data.load(name, str(tmp_path))
    check(read, written)
    assert (read.shape, read.classes, len(read.train.labels)) == ((3, 32, 32), classes, count)
    known = (0.4914, 0.4822, 0.4465)
    assert read.mean == pytest.approx(
        known if name == "cifar10" else written["train"][0].mean((0, 2, 3)) / 255
    )
    path = next(tmp_path.glob("*/*train" if classes > 10 else "*/data_batch_3"))
    whole = path.read_bytes()
    for damaged in (b"", whole[:100], whole[:-1], b"<html>" + whole[6:], pickle.dumps({"labels": []})):
        path.write_bytes(damaged)
        data.load.cache_clear()
        assert f"cannot read {name}" in refused(data.load, name, str(tmp_path))


@pytest.mark.parametrize("name", ["mnist", "emnist", "cifar10", "cifar100"])
def test_a_missing_data_set_is_one_line(tmp_path, name, refused):
    line = refused(data.load, name, str(tmp_path))
    assert line.startswith(f"cannot read {name} from {tmp_path}")
    assert "--data-root" in line
    assert "--download" in line


def test_files_damaged_anywhere_are_one_line(tmp_path, refused):
    write_mnist(tmp_path)
    raw = tmp_path / "MNIST" / "raw"
    for path in sorted(raw.iterdir()):
        whole = path.read_bytes()
        for length in (0, 2, 7, len(whole) - 1):
            path.write_bytes(whole[:length])
            assert str(path) in refused(data.load, "mnist", str(tmp_path)), length
        path.write_bytes(whole)
    write_idx(raw / "train-labels-idx1-ubyte", np.zeros(11))
    assert "12 images, but 11 labels" in refused(data.load, "mnist", str(tmp_path))
    path = raw / "train-images-idx3-ubyte"
    path.unlink()
    write_idx(path, RNG(0).randint(0, 3, (12, 28, 28)), packed=True)  # compressible
    path = path.with_name(path.name + ".gz")
    whole = path.read_bytes()
    for position in (0, *range(10 + len(path.stem), len(whole) - 4, len(whole) // 20)):  # not the name
        for damaged in (whole[:position], whole[:position] + b"\xff\x00\xff\x00" + whole[position + 4 :]):
            path.write_bytes(damaged)
            assert str(path) in refused(data.load, "mnist", str(tmp_path)), position


def test_files_of_another_length_or_kind_than_their_header_says_are_refused(tmp_path, refused):
    labels, plain, packed = struct.pack(">II", 0x801, 12) + bytes(12), tmp_path / "a", tmp_path / "b.gz"
    packed.write_bytes(gzip.compress(labels))
    assert idx.read(tmp_path / "b", 1).tolist() == [0] * 12
    for content in (labels[:-1], labels + b"0"):
        plain.write_bytes(content)
        assert "its header says 20 bytes" in refused(idx.read, plain, 1)
    assert "not an idx file of 3 dimensions" in refused(idx.read, plain, 3)
    packed.write_bytes(gzip.compress(labels) + 20 * gzip.compress(bytes(1 << 20)))
    assert f"{packed}: damaged, its header says 20" in refused(idx.read, tmp_path / "b", 1)


def test_a_read_only_root_of_several_data_sets_some_files_packed(tmp_path, cifar):
    """Files are unpacked in memory."""
    written = write_mnist(tmp_path, packed=True), write_mnist(tmp_path, name="emnist")
    one = tmp_path / "EMNIST/raw/emnist-balanced-test-images-idx3-ubyte"
    one.with_name(one.name + ".gz").write_bytes(gzip.compress(one.read_bytes()))
    one.unlink()
    ten = cifar(tmp_path, "cifar10")
    places = [tmp_path, *(path for path in tmp_path.rglob("*") if path.is_dir())]
    try:
        for place in places:
            place.chmod(0o555)
        for name, expected in zip(("mnist", "emnist", "cifar10"), (*written, ten), strict=True):
            check(data.load(name, str(tmp_path)), expected)
    finally:
        for place in places:
            place.chmod(0o755)
