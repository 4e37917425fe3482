"""Data sets, read from small files in their real formats."""

import gzip
import pickle
import re
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from vision import data, folder, idx
from vision.data import Dataset, Images, make_dataset

RNG = np.random.RandomState
EMNIST = ("emnist-balanced-train", "emnist-balanced-test")


@pytest.fixture(autouse=True)
def _empty_cache():
    data.load.cache_clear()


def test_digits():
    found = data.load("digits")
    assert found is data.load("digits"), "read once"
    assert (len(found.train.labels), len(found.test.labels)) == (1437, 360)
    assert (found.shape, found.classes) == ((1, 8, 8), 10)
    assert found.train.images.dtype == torch.uint8
    assert found.train.images.min() == 0
    assert found.train.images.max() == 255
    for images in (found.train, found.test):
        share = images.labels.bincount() / len(images.labels)
        assert share.min() > 0.07
        assert share.max() < 0.13
    x, labels = found.examples(found.train)
    assert abs(x.mean()) < 1e-5
    assert abs(x.std() - 1) < 1e-4
    assert torch.equal(labels, found.train.labels)


def test_examples_are_normalised_and_channels_last():
    images = Images(
        torch.tensor([[0, 255], [51, 102]], dtype=torch.uint8).view(2, 2, 1, 1), torch.tensor([1, 0])
    )
    found = Dataset("folder", images, images, 2, (0.5, 0.2), (0.25, 0.1))
    x, labels = found.examples(images)
    assert x.flatten().tolist() == pytest.approx([-2, 8, -1.2, 2])
    assert labels.tolist() == [1, 0]
    assert (x.dtype, labels.dtype, x.device.type) == (torch.float32, torch.int64, "cpu")
    pictures = Images(torch.randint(0, 256, (4, 3, 5, 6), dtype=torch.uint8), torch.arange(4))
    made = make_dataset("folder", pictures, pictures)
    before = pictures.images.clone()
    x = made.examples(pictures, torch.device("cpu")).images
    assert x.is_contiguous(memory_format=torch.channels_last)
    assert not x.is_contiguous()
    assert torch.equal(pictures.images, before)


@pytest.mark.gpu
def test_examples_on_a_gpu():
    found = data.load("digits")
    here, there = found.examples(found.test), found.examples(found.test, "cuda")
    assert there.images.device.type == there.labels.device.type == "cuda"
    assert torch.allclose(there.images.cpu(), here.images, atol=1e-5)
    assert torch.equal(there.labels.cpu(), here.labels)


def test_mean_and_std_of_the_pixels():
    images = torch.from_numpy(RNG(0).randint(0, 256, (7, 3, 5, 4)).astype(np.uint8))
    images[:, 2] = 9
    pictures = Images(images, torch.tensor([0, 1, 2, 0, 1, 2, 6]))
    made = make_dataset("folder", pictures, Images(images[:1], torch.tensor([3])))
    pixels = images.double().transpose(0, 1).flatten(1) / 255
    assert made.mean == pytest.approx(pixels.mean(1).tolist())
    assert made.std[:2] == pytest.approx(pixels.std(1).tolist()[:2])
    assert made.std[2] > 0, "a constant channel has a positive std"
    assert made.classes == 7


def test_fingerprint_changes_with_any_byte():
    def fingerprint(changed=None) -> str:
        parts = [
            Images(torch.zeros(3, 1, 2, 2, dtype=torch.uint8), torch.zeros(3, dtype=torch.int64))
            for _ in range(2)
        ]
        if changed:
            part, tensor = changed
            parts[part][tensor].view(-1)[-1] = 1
        return Dataset("digits", *parts, 2, (0.0,), (1.0,)).fingerprint

    prints = [fingerprint(each) for each in (None, (0, 0), (0, 1), (1, 0), (1, 1))]
    assert len(set(prints)) == 5
    assert fingerprint() == prints[0]
    assert re.fullmatch("[0-9a-f]{16}", prints[0])


def test_unknown_names_and_sizes(refused):
    assert "digits, mnist" in refused(data.load, "nist")
    assert "--cache-images needs --dataset folder" in refused(data.load, "digits", cache_images="there")
    assert "--image-size 0" in refused(data.load, "folder", image_size=0)


# Data sets of torchvision


def write_idx(path: Path, array: np.ndarray, packed: bool = False) -> None:
    """Write an array in the format of MNIST: type and number of dimensions, sizes, bytes."""
    header = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    content = header + array.astype(np.uint8).tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    if packed:
        path.with_name(path.name + ".gz").write_bytes(gzip.compress(content))
    else:
        path.write_bytes(content)


def write_mnist(
    root: Path, packed: bool = False, name: str = "mnist"
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
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


def check(found: Dataset, written: dict[str, tuple[np.ndarray, np.ndarray]]) -> None:
    """Check that a data set equals what was written, with images (n, channels, height, width) as bytes."""
    for part, (images, labels) in written.items():
        read = getattr(found, part)
        assert read.images.dtype == torch.uint8
        assert read.labels.dtype == torch.int64
        assert np.array_equal(read.images.numpy(), images.reshape(read.images.shape))
        assert read.images.is_contiguous()
        assert np.array_equal(read.labels.numpy(), labels)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ["mnist", "emnist"])
def test_mnist_and_emnist(tmp_path, name, packed):
    written = write_mnist(tmp_path, packed, name)
    found = data.load(name, str(tmp_path))
    check(found, written)
    assert found.shape == (1, 28, 28)
    if name == "mnist":
        assert (found.classes, found.mean, found.std) == (10, (0.1307,), (0.3081,))
    else:
        assert found.classes == 47
        assert found.mean == pytest.approx([written["train"][0].mean() / 255])


@pytest.fixture
def cifar(monkeypatch):
    """Write a few images as CIFAR-10 or CIFAR-100, and disable torchvision's check of the MD5 sum."""
    import torchvision.datasets.cifar

    monkeypatch.setattr(
        torchvision.datasets.cifar, "check_integrity", lambda path, md5=None: Path(path).is_file()
    )

    def write(root: Path, name: str) -> dict[str, tuple[np.ndarray, np.ndarray]]:
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


@pytest.mark.parametrize("name", ["mnist", "emnist", "cifar10", "cifar100"])
def test_a_missing_data_set_is_one_line(tmp_path, name, refused):
    line = refused(data.load, name, str(tmp_path))
    assert line.startswith(f"cannot read {name} from {tmp_path}")
    assert "--data-root" in line
    assert "--download" in line


def test_truncated_files_are_one_line(tmp_path, refused):
    write_mnist(tmp_path)
    for path in sorted((tmp_path / "MNIST" / "raw").iterdir()):
        whole = path.read_bytes()
        for length in (0, 2, 4, 7, 15, len(whole) // 2, len(whole) - 1):
            if length < len(whole):
                path.write_bytes(whole[:length])
                assert str(path) in refused(data.load, "mnist", str(tmp_path)), length
        path.write_bytes(whole)
    assert len(data.load("mnist", str(tmp_path)).train.labels) == 12


def test_packed_files_damaged_anywhere_are_one_line(tmp_path, refused):
    write_mnist(tmp_path, packed=True)
    path = tmp_path / "MNIST" / "raw" / "train-images-idx3-ubyte.gz"
    write_idx(path.with_suffix(""), RNG(0).randint(0, 3, (12, 28, 28)), packed=True)  # compressible
    whole = path.read_bytes()
    for position in (
        0,
        *range(10 + len(path.stem), len(whole) - 4, len(whole) // 40),
    ):  # not the name
        for damaged in (whole[:position], whole[:position] + b"\xff\x00\xff\x00" + whole[position + 4 :]):
            path.write_bytes(damaged)
            assert str(path) in refused(data.load, "mnist", str(tmp_path)), position


def test_files_of_another_length_or_kind_than_their_header_says_are_refused(tmp_path, refused):
    labels = struct.pack(">II", 0x801, 12) + bytes(12)
    for content in (labels[:-1], labels + b"0"):
        (tmp_path / "images").write_bytes(content)
        assert "its header says 20" in refused(idx.read, tmp_path / "images", 1)
    assert "not an idx file of images" in refused(idx.read, tmp_path / "images", 3)
    path, packed = tmp_path / "labels", tmp_path / "labels.gz"
    packed.write_bytes(gzip.compress(labels))
    assert idx.read(path, 1).tolist() == [0] * 12
    packed.write_bytes(gzip.compress(labels) + 20 * gzip.compress(bytes(1 << 20)))
    assert f"{packed}: 21 bytes or more, its header says 20" in refused(idx.read, path, 1)
    packed.write_bytes(gzip.compress(struct.pack(">II", 0x801, 2**32 - 1)))
    assert "its header says 4,294,967,303 bytes, more than any set" in refused(idx.read, path, 1)


def test_different_numbers_of_images_and_labels_are_refused(tmp_path, refused):
    write_mnist(tmp_path)
    write_idx(tmp_path / "MNIST" / "raw" / "train-labels-idx1-ubyte", np.zeros(11))
    assert "12 images, but 11 labels" in refused(data.load, "mnist", str(tmp_path))


def test_a_read_only_root_of_several_data_sets_some_files_packed(tmp_path, cifar):
    """Files are unpacked in memory."""
    written = write_mnist(tmp_path, packed=True), write_mnist(tmp_path, name="emnist")
    raw = tmp_path / "EMNIST/raw"
    one = raw / "emnist-balanced-test-images-idx3-ubyte"
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


@pytest.mark.parametrize(("name", "classes", "count"), [("cifar10", 10, 20), ("cifar100", 100, 4)])
def test_cifar(tmp_path, cifar, name, classes, count):
    written = cifar(tmp_path, name)
    found = data.load(name, str(tmp_path))
    check(found, written)
    assert (found.shape, found.classes, len(found.train.labels)) == ((3, 32, 32), classes, count)
    known = (0.4914, 0.4822, 0.4465)
    mean = known if name == "cifar10" else written["train"][0].mean((0, 2, 3)) / 255
    assert found.mean == pytest.approx(mean)


def test_damaged_cifar_is_one_line(tmp_path, cifar, refused):
    cifar(tmp_path, "cifar10")
    path = tmp_path / "cifar-10-batches-py" / "data_batch_3"
    whole = path.read_bytes()
    for damaged in (b"", whole[:100], whole[:-1], b"<html>" + whole[6:], pickle.dumps({"labels": []})):
        path.write_bytes(damaged)
        assert "cannot read cifar10" in refused(data.load, "cifar10", str(tmp_path))


# A folder of images


def picture(path: Path, pixels: np.ndarray) -> None:
    """Write a PNG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


@pytest.fixture
def tree(tmp_path) -> Path:
    """70 + 4 images of 6 x 4 pixels in two classes, more than one chunk of the decoder."""
    for part, n in (("train", 35), ("test", 2)):
        for label, name in enumerate(("cat", "dog")):
            for i in range(n):
                colour = np.full((6, 4, 3), [i, 100 * label, {"train": 1, "test": 2}[part]], dtype=np.uint8)
                picture(tmp_path / part / name / f"{i:02}.png", colour)
    return tmp_path


def test_folder(tree):
    found = data.load("folder", str(tree))
    assert (found.shape, found.classes, found.name) == ((3, 6, 4), 2, "folder")
    assert found.train.images.dtype == torch.uint8
    assert found.train.labels.tolist() == [0] * 35 + [1] * 35
    assert found.train.images[:, :, 0, 0].tolist() == [[i, 100 * c, 1] for c in range(2) for i in range(35)]
    assert (found.train.images == found.train.images[:, :, :1, :1]).all()
    assert found.test.images[:, :, 5, 3].tolist() == [[i, 100 * c, 2] for c in range(2) for i in range(2)]
    x = found.examples(found.train).images[:, :2]
    assert x.mean((0, 2, 3)).tolist() == pytest.approx([0, 0], abs=1e-5)
    assert x.std((0, 2, 3)).tolist() == pytest.approx([1, 1], abs=1e-3)


def test_files_are_those_of_torchvision_in_its_order(tmp_path):
    from torchvision.datasets import ImageFolder

    for name in ("dog/1.png", "cat/2.png", "cat/b/10.PNG", "cat/b/9.png", "cat/a/z.png", "cat/a.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.zeros((6, 4, 3), np.uint8)).save(tmp_path / name, format="PNG")
    (tmp_path / "cat/note.txt").touch()
    (tmp_path / "linked").symlink_to(tmp_path / "dog")
    expected = ImageFolder(str(tmp_path))
    listed = folder._listed(tmp_path)
    pairs = [(path, label) for label, paths in enumerate(listed.values()) for path in paths]
    assert (pairs, list(listed)) == (expected.samples, expected.classes)


def test_image_size(tree, refused):
    picture(tree / "train" / "cat" / "00.png", np.full((9, 9, 3), 7, dtype=np.uint8))
    line = refused(data.load, "folder", str(tree))
    assert "(6, 4) and (9, 9)" in line
    assert "--image-size" in line
    found = data.load("folder", str(tree), image_size=5)
    assert found.shape == (3, 5, 5)
    assert (found.train.images[0] == 7).all()
    assert found.train.images[1].flatten(1).unique(dim=1).flatten().tolist() == [1, 0, 1]
    for path in (tree / "test").rglob("*.png"):
        picture(path, np.zeros((6, 5, 3), dtype=np.uint8))
    picture(tree / "train" / "cat" / "00.png", np.zeros((6, 4, 3), dtype=np.uint8))
    assert "--image-size" in refused(data.load, "folder", str(tree))


def test_unreadable_images_are_named(tree, refused):
    path = tree / "train" / "dog" / "33.png"
    whole = path.read_bytes()
    for content in (b"", b"not an image", whole[: len(whole) // 2]):
        path.write_bytes(content)
        assert str(path) in refused(data.load, "folder", str(tree))
    picture(path, np.full((6, 4), 1000, dtype=np.uint16))
    line = refused(data.load, "folder", str(tree))
    assert str(path) in line
    assert "8 bits" in line


@pytest.mark.parametrize("part", ["train", "test"])
def test_incomplete_trees(tree, part, refused):
    (tree / part / "dog").rename(tree / "dog")
    line = refused(data.load, "folder", str(tree))
    assert "differ in classes: dog" in line
    (tree / part).rename(tree / "elsewhere")
    line = refused(data.load, "folder", str(tree))
    assert f"no folder {part}/" in line
    assert "--data-root" in line
    (tree / part).mkdir()
    line = refused(data.load, "folder", str(tree))
    assert "--data-root" in line
    assert "--download" not in line
    (tree / part / "cat").mkdir()
    assert f"{tree / part / 'cat'} has no images" in refused(data.load, "folder", str(tree))


def test_gray_and_palette_images_become_colour(tmp_path):
    for part in ("train", "test"):
        picture(tmp_path / part / "a" / "gray.png", np.full((2, 2), 40, dtype=np.uint8))
        palette = Image.fromarray(np.ones((2, 2), dtype=np.uint8), mode="P")
        palette.putpalette([0, 0, 0, 10, 20, 30])
        palette.save(tmp_path / part / "a" / "palette.png")
        Image.new("RGBA", (2, 2), (1, 2, 3, 255)).save(tmp_path / part / "a" / "rgba.png")
    found = data.load("folder", str(tmp_path))
    assert found.shape == (3, 2, 2)
    assert found.train.images[:, :, 1, 1].tolist() == [[40, 40, 40], [10, 20, 30], [1, 2, 3]]


def test_black_is_a_normalised_black_pixel():
    images = torch.randint(0, 256, (20, 3, 4, 4), dtype=torch.uint8)
    images[0, :, 0, 0] = 0
    dataset = make_dataset("folder", Images(images, torch.arange(20)), Images(images, torch.arange(20)))
    assert torch.equal(dataset.black, dataset.examples(dataset.train).images[0, :, 0, 0])
    expected = [-mean / std for mean, std in zip(dataset.mean, dataset.std, strict=True)]
    assert dataset.black.tolist() == pytest.approx(expected)
