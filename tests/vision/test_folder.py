"""Folders of images, in memory or in files that are mapped;
data sets that the processes of a sweep share."""

import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.vision.conftest import command, equal, error_of, jobs, numbers, picture
from vision import MegaBatchStream, data, decoding, folder, run, unreadable

pytestmark = pytest.mark.usefixtures("no_cache")


def load(root, cache=None, size=None):
    data.load.cache_clear()
    return data.load("folder", str(root), image_size=size, cache_images=cache and str(cache))


def same(one, other):
    assert one.fingerprint == other.fingerprint
    assert (one.mean, one.std, one.classes) == (other.mean, other.std, other.classes)
    return equal([*one.train, *one.test], [*other.train, *other.test])


def test_folder(tree):
    read = load(tree)
    assert (read.shape, read.classes, read.name) == ((3, 6, 4), 2, "folder")
    assert read.train.images.dtype == torch.uint8
    assert read.train.labels.tolist() == [0] * 35 + [1] * 35
    assert read.train.images[:, :, 0, 0].tolist() == [
        [i, 100 * c, 1] for c in range(2) for i in range(35)
    ]
    assert (read.train.images == read.train.images[:, :, :1, :1]).all()
    assert read.test.images[:, :, 5, 3].tolist() == [
        [i, 100 * c, 2] for c in range(2) for i in range(2)
    ]
    x = read.examples(read.train).images[:, :2]
    assert x.mean((0, 2, 3)).tolist() == pytest.approx([0, 0], abs=1e-5)
    assert x.std((0, 2, 3)).tolist() == pytest.approx([1, 1], abs=1e-3)


def test_gray_and_palette_images_become_colour(tmp_path):
    for part in ("train", "test"):
        picture(tmp_path / part / "a" / "gray.png", np.full((2, 2), 40, dtype=np.uint8))
        palette = Image.fromarray(np.ones((2, 2), dtype=np.uint8), mode="P")
        palette.putpalette([0, 0, 0, 10, 20, 30])
        palette.save(tmp_path / part / "a" / "palette.png")
        Image.new("RGBA", (2, 2), (1, 2, 3, 255)).save(tmp_path / part / "a" / "rgba.png")
    read = load(tmp_path)
    assert read.shape == (3, 2, 2)
    assert read.train.images[:, :, 1, 1].tolist() == [[40, 40, 40], [10, 20, 30], [1, 2, 3]]


COUNTS = "images: 70 for training and 4 for tests; classes: 2; "
COUNTS += "files left out: 6 hidden, 2 in no class, 2 .txt, 1 without suffix, 1 .heic"


def clutter(tree):
    """What a Mac, a notebook and a user leave in a folder; no image of it is read."""
    colour = np.full((6, 4, 3), 9, dtype=np.uint8)
    for part in ("train", "test"):
        for place in (".ipynb_checkpoints", "cat/.ipynb_checkpoints"):
            picture(tree / part / place / "00-checkpoint.png", colour)
        (tree / part / "dog" / "._00.png").write_bytes(b"Mac OS X")
        picture(tree / part / "stray.png", colour)
    for name in ("a.txt", "b.TXT", "c.heic", "README"):
        (tree / "train/cat" / name).write_bytes(b"no image")


def test_what_is_hidden_or_no_image_is_left_out_and_counted(tree):
    plain = load(tree)
    assert str(folder.listed(tree)).endswith("files left out: none")
    clutter(tree)
    assert same(load(tree), plain)
    assert str(folder.listed(tree)) == COUNTS


def test_a_link_to_a_folder_above_repeats_no_image(tree):
    plain = load(tree)
    (tree / "train/cat/again").symlink_to(tree / "train/cat")
    assert same(load(tree), plain)


def test_a_folder_that_two_classes_share_is_read_for_both(tree):
    for name in ("cat", "dog"):
        (tree / "train" / name / "shared").symlink_to(tree / "test/cat")
    shared = [path for _, path in folder.listed(tree).train if "shared" in path]
    assert len(shared) == 2 * len(list((tree / "test/cat").iterdir()))


def test_files_are_in_the_order_of_torchvision(tree):
    from torchvision.datasets import ImageFolder

    for name in ("cat/sub/a.JPG", "cat-2/b.bmp", "cat/sub-2/c.jpeg", "cat/Z.webp", "cat/sub/d.ppm"):
        for part in ("train", "test"):
            picture(tree / part / name, np.full((6, 4, 3), 200, dtype=np.uint8))
    reference = ImageFolder(tree / "train")
    listing = folder.listed(tree)
    assert listing.classes == reference.classes == ["cat", "cat-2", "dog"]
    assert [path for _, path in listing.train] == [path for path, _ in reference.samples]
    assert load(tree).train.labels.tolist() == reference.targets


@pytest.mark.parametrize("name", ["a.gif", "a.jfif", "a.GIF"])
def test_gif_and_jfif_are_read(tree, name):
    for part in ("train", "test"):
        picture(tree / part / "cat" / "a.png", np.full((6, 4, 3), 40, dtype=np.uint8))
        kind = "GIF" if "gif" in name.lower() else "JPEG"
        Image.open(tree / part / "cat/a.png").save(tree / part / "cat" / name, kind)
    read = load(tree)
    assert len(read.train.labels) == 74 - 2
    last = sorted(path.name for path in (tree / "train/cat").iterdir()).index(name)
    assert (read.train.images[last].int() - 40).abs().max() < 3


UPRIGHT = [None, None, "FLIP_LEFT_RIGHT", "ROTATE_180", "FLIP_TOP_BOTTOM", "TRANSPOSE", "ROTATE_90"]
UPRIGHT += ["TRANSVERSE", "ROTATE_270"]
"""By orientation, how a camera that is held so stores what is seen."""


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp", "tiff"])
def test_images_are_upright_as_viewers_show_them(tmp_path, suffix):
    """Some orientations swap width and height."""
    shown = np.zeros((16, 8, 3), dtype=np.uint8)
    shown[:8, :4] = 255  # top left
    small = Image.fromarray(shown).resize((4, 4), Image.Resampling.BILINEAR)
    exact = {"jpg": {"quality": 100}, "webp": {"lossless": True}}.get(suffix, {})
    for orientation, turn in enumerate(UPRIGHT):
        stored = Image.fromarray(shown)
        exif = Image.Exif()
        if orientation:
            exif[0x0112] = orientation
        for part in ("train", "test"):
            path = tmp_path / part / "a" / f"{orientation}.{suffix}"
            path.parent.mkdir(parents=True, exist_ok=True)
            (stored.transpose(Image.Transpose[turn]) if turn else stored).save(
                path, exif=exif, **exact
            )
    for size, expected in ((None, shown), (4, np.asarray(small))):
        images = load(tmp_path, size=size).train.images.permute(0, 2, 3, 1).int()
        assert (images - torch.from_numpy(expected.copy()).int()).abs().max() < 9


def test_damaged_exif_data_do_not_keep_an_image_out(tree):
    for path in tree.rglob("*.png"):
        Image.open(path).save(path.with_suffix(".jpg"), quality=100, exif=b"Exif\x00\x00nonsense")
        path.unlink()
    assert load(tree).shape == (3, 6, 4)


def test_image_size(tree):
    picture(tree / "train" / "cat" / "00.png", np.full((9, 9, 3), 7, dtype=np.uint8))
    read = load(tree, size=5)
    assert read.shape == (3, 5, 5)
    assert (read.train.images[0] == 7).all()
    assert read.train.images[1].flatten(1).unique(dim=1).flatten().tolist() == [1, 0, 1]


def empty(tree):
    for part in ("train", "test"):
        (tree / part / "bird").mkdir()


def large_tests(tree):
    for path in (tree / "test").rglob("*.png"):
        picture(path, np.zeros((6, 5, 3), np.uint8))


REFUSED = [
    (lambda tree: (tree / "test/dog").rename(tree / "dog"), "differ in classes: dog"),
    (empty, "train/bird: no images"),
    (
        lambda tree: (tree / "test").rename(tree / "elsewhere"),
        "/test: unreadable (No such file or directory): --data-root",
    ),
    (
        lambda tree: picture(tree / "train/cat/00.png", np.zeros((9, 9, 3), np.uint8)),
        "several sizes, such as (6, 4) and (9, 9): give --image-size",
    ),
    (large_tests, "images of train/ and test/ differ in size: give --image-size"),
    (lambda tree: os.truncate(tree / "train/dog/33.png", 40), "cannot read the image"),
    (lambda tree: os.truncate(tree / "train/dog/33.png", 0), "dog/33.png"),
    (lambda tree: (tree / "train/dog/33.png").write_bytes(b"no image"), "dog/33.png"),
    (
        lambda tree: picture(tree / "test/cat/00.png", np.full((6, 4), 1000, np.uint16)),
        "8 bits per channel",
    ),
]


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_what_is_no_folder_of_images_is_one_line(tree, refused, change, message):
    change(tree)
    assert message in refused(load, tree)


# Files of decoded images


def test_images_on_disk_are_those_in_memory_are_mapped_and_decoded_once(
    tree, tmp_path, monkeypatch
):
    cache = tmp_path / "cache"
    plain = load(tree)
    first = load(tree, cache)
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    for part in (first.train, first.test):
        spans = [([int(end, 16) for end in line[0].split("-")], line[-1]) for line in maps]
        (file,) = [file for (low, high), file in spans if low <= part.images.data_ptr() < high]
        assert file.endswith(".npy")
    assert first.select(first.train, torch.arange(9), stored=True).source is first.train.images
    monkeypatch.setattr(folder, "_decoded", None)
    assert same(plain, first)
    names = sorted(path.name for path in cache.iterdir())
    assert [re.sub("[0-9a-f]{16}", "HASH", name) for name in names] == [
        ".lock",
        "test_HASH.npy",
        "train_HASH.npy",
    ]
    assert np.load(cache / names[2]).shape == (70, 3, 6, 4)  # as any reader of .npy files
    assert same(plain, load(tree.rename(tmp_path / "moved"), cache))


def test_a_changed_image_or_size_makes_another_file(tree, tmp_path):
    cache = tmp_path / "cache"
    before = load(tree, cache)
    assert load(tree, cache, size=9).shape == (3, 9, 9)
    picture(tree / "train/cat/03.png", np.zeros((6, 4, 3), np.uint8))
    after = load(tree, cache)
    assert after.fingerprint != before.fingerprint
    assert not after.train.images[3].any()
    assert (len(list(cache.glob("train_*"))), len(list(cache.glob("test_*")))) == (3, 2)


def test_errors_of_the_cache_are_one_line(tree, tmp_path, refused, monkeypatch):
    cache = tmp_path / "cache"
    load(tree, cache)
    (file,) = cache.glob("train_*.npy")
    os.truncate(file, 1000)
    assert f"{file} is damaged" in refused(load, tree, cache)
    (tmp_path / "file").touch()
    assert f"{tmp_path}/file is not a folder" in refused(load, tree, tmp_path / "file")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    line = refused(load, tree, tmp_path / "third")
    assert "cannot be written (No space left on device): choose another --cache-images" in line


def test_a_set_larger_than_the_memory_is_refused_without_a_cache(
    tree, tmp_path, refused, monkeypatch
):
    pages = os.sysconf
    monkeypatch.setattr(os, "sysconf", lambda name: 1 if name == "SC_PHYS_PAGES" else pages(name))
    assert "give --cache-images DIR, or lower --image-size" in refused(load, tree, size=200)
    assert load(tree, tmp_path / "cache", size=200).shape == (3, 200, 200)


def test_a_run_from_disk_equals_one_in_memory_bit_for_bit(tree, tmp_path):
    options = {"epochs": 2, "hidden": 4, "batch_size": 4, "replay_share": 0.5}
    runs = [
        run(MegaBatchStream(load(tree, cache), 2), "gens", tmp_path / str(bool(cache)), **options)
        for cache in (None, tmp_path / "cache")
    ]
    assert numbers(runs[0]) == numbers(runs[1])
    assert runs[0].config == runs[1].config


def test_the_command_line(tree, tmp_path, refused):
    cache = tmp_path / "cache"
    words = f"--dataset folder --data-root {tree} --cache-images {cache}".split()
    words += ["--megabatches", "2", "--arch", "mlp"]
    (job,) = jobs(*words, *f"--epochs 1 --hidden 2 --out {tmp_path / 'run'}".split())
    assert f"--cache-images {cache}" in job.command
    assert "changed images in memory" in refused(jobs, *words, "--scenario", "rotated")
    assert "--cache-images needs --dataset folder" in refused(
        data.load, "digits", cache_images="there"
    )
    assert "--image-size 0" in refused(data.load, "folder", image_size=0)
    assert "digits, mnist" in refused(data.load, "nist")
    job.run()
    assert len(list(cache.glob("*.npy"))) == 2


def test_the_command_says_what_it_reads_of_a_folder_once(tree, tmp_path, monkeypatch, capsys):
    clutter(tree)
    words = f"--dataset folder --data-root {tree} --megabatches 2".split()
    words += ["--arch", "mlp", "--epochs", "1", "--hidden", "2"]
    words += ["--seeds", "0-1", "--out", tmp_path / "runs", "--part", "1/2"]
    command(monkeypatch, *words, "--list")
    assert capsys.readouterr().out == f"{tmp_path}/runs/sm_w1_h2_s0\n"
    command(monkeypatch, *words)
    assert capsys.readouterr().out == COUNTS + "\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--dataset folder --data-root nowhere", "--data-root needs train/CLASS"),
        (
            "--dataset folder --data-root tree --megabatches 36",
            "36 mega-batches of 70 training images: choose",
        ),
        (
            "--dataset folder --data-root tree --scenario classes",
            "5 mega-batches of 2 classes: choose 1",
        ),
        (
            "--dataset folder --data-root two",
            "100 mega-batches of 2 training images: choose 1 to 1, so that each has",
        ),
        ("--megabatches 10,719", "719 mega-batches of 1437 training images: choose 1 to 718"),
        ("--scenario classes --megabatches 11", "11 mega-batches of 10 classes: choose 1 to 10"),
        ("--seeds 0,4294967296", "--seed 4294967296: from 0"),
        ("--stream-seed 4294967296", "--seed 4294967296: from 0"),
    ],
)
@pytest.mark.parametrize("listing", [[], ["--list"]])
def test_a_sweep_is_refused_before_its_first_run_and_by_list(
    tree, tmp_path, monkeypatch, capsys, words, message, listing
):
    monkeypatch.chdir(tmp_path)
    for part in ("train", "test"):
        for grey, name in enumerate("ab"):
            place = tmp_path / "two" / part / name / "0.png"
            picture(place, np.full((4, 4, 3), grey, np.uint8))
    assert message in error_of(monkeypatch, capsys, *words.split(), *listing, "--out", "new")
    assert not Path("new").exists()


def test_other_data_sets_are_scaled_as_a_folder_is():
    scaled = data.load("digits", image_size=20)
    plain = data.load("digits")
    assert scaled.shape == (1, 20, 20)
    assert (scaled.mean, scaled.std, scaled.classes) == (plain.mean, plain.std, plain.classes)
    assert scaled.fingerprint != plain.fingerprint
    assert torch.equal(scaled.train.labels, plain.train.labels)
    for k in (0, 500):
        image = Image.fromarray(plain.train.images[k, 0].numpy()).resize(
            (20, 20), Image.Resampling.BILINEAR
        )
        assert torch.equal(scaled.train.images[k, 0], torch.from_numpy(np.array(image)))


@pytest.mark.parametrize("shape", [(31, 17), (17, 31), (20, 20), (5, 40)])
@pytest.mark.parametrize("shorter", [12, 9])
def test_a_cut_is_that_of_torchvision(tmp_path, shape, shorter):
    from torchvision.transforms import CenterCrop, Compose, Resize

    pixels = np.random.default_rng(0).integers(0, 256, (*shape, 3), np.uint8)
    picture(tmp_path / "one.png", pixels)
    expected = np.asarray(Compose([Resize(shorter), CenterCrop(9)])(Image.fromarray(pixels)))
    assert np.array_equal(
        decoding.read_image(str(tmp_path / "one.png"), decoding.Size(9, 9, shorter)), expected
    )


def test_ten_unreadable_images_are_named_and_the_others_counted(tmp_path):
    paths = [str(tmp_path / f"{number:02d}.png") for number in range(12)]
    for path in paths:
        Path(path).write_text("no image")
    message = str(unreadable.error_of(paths))
    assert message.startswith("cannot read 12 images: ")
    assert sum(path in message for path in paths) == 10
    assert ", and 2 more: replace or delete them" in message
