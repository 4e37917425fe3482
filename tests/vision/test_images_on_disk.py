"""--cache-images: decoded images in files that are mapped into memory; --image-size of other data sets."""

import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.vision.conftest import numbers
from tests.vision.test_memory import folder as write_folder
from tests.vision.test_run import command, jobs
from vision import MegaBatchStream, data, folder, run
from vision.shared import SharedMemory


@pytest.fixture(autouse=True)
def _empty_cache():
    data.load.cache_clear()


@pytest.fixture
def tree(tmp_path):
    """24 training and 8 test images of 80 x 80 pixels, large enough to stay bytes."""
    write_folder(tmp_path / "tree", 24, 8, 80)
    return tmp_path / "tree"


def load(root, cache=None, size=None):
    data.load.cache_clear()
    return data.load("folder", str(root), image_size=size, cache_images=cache and str(cache))


def never(*_):
    raise AssertionError("decoded again")


def equal(one, other):
    assert one.fingerprint == other.fingerprint
    assert (one.mean, one.std, one.classes) == (other.mean, other.std, other.classes)
    return all(
        torch.equal(a, b) for a, b in zip((*one.train, *one.test), (*other.train, *other.test), strict=True)
    )


def test_images_on_disk_are_those_in_memory_and_are_decoded_once(tree, tmp_path, monkeypatch):
    plain, first = load(tree), load(tree, tmp_path / "cache")
    monkeypatch.setattr(folder, "_decoded", never)
    assert equal(plain, first)
    assert equal(plain, load(tree, tmp_path / "cache"))
    files = sorted(path.name for path in (tmp_path / "cache").iterdir())
    assert [re.sub("[0-9a-f]{16}", "HASH", name) for name in files] == [
        ".lock",
        "test_HASH.npy",
        "train_HASH.npy",
    ]
    assert np.load(tmp_path / "cache" / files[2]).shape == (24, 3, 80, 80)  # as any reader of .npy files
    moved = tree.rename(tmp_path / "moved")
    assert equal(plain, load(moved, tmp_path / "cache"))


def test_pixels_are_mapped_not_copied(tree, tmp_path):
    found = load(tree, tmp_path / "cache")
    for part in (found.train, found.test):
        place = part.images.data_ptr()
        (line,) = (
            line
            for line in Path("/proc/self/maps").read_text().splitlines()
            if in_range(line.split()[0], place)
        )
        assert ".npy" in line
    examples = found.select(found.train, torch.arange(24))
    assert examples.source.data_ptr() == found.train.images.data_ptr()


def in_range(text, place):
    start, stop = (int(each, 16) for each in text.split("-"))
    return start <= place < stop


@pytest.mark.parametrize("learner", ["sm", "gens"])
def test_a_run_from_disk_equals_one_in_memory_bit_for_bit(tree, tmp_path, learner):
    options = {"epochs": 2, "hidden": 4, "batch_size": 4, "replay_share": 0.5}
    found = []
    for cache in (None, tmp_path / "cache"):
        record = run(MegaBatchStream(load(tree, cache), 2), learner, tmp_path / f"run{len(found)}", **options)
        state = torch.load(record.directory / "checkpoint.pt", weights_only=True)["learner"]["model"]
        found.append((numbers(record), record.config, state))
    assert found[0][:2] == found[1][:2]
    assert all(torch.equal(found[0][2][name], found[1][2][name]) for name in found[0][2])


def test_a_changed_image_or_size_makes_another_file(tree, tmp_path):
    cache = tmp_path / "cache"
    before = load(tree, cache)
    assert load(tree, cache, size=9).shape == (3, 9, 9)
    path = tree / "train" / "a" / "00003.png"
    Image.fromarray(np.zeros((80, 80, 3), np.uint8)).save(path)
    after = load(tree, cache)
    assert after.fingerprint != before.fingerprint
    assert not after.train.images[3].any()
    assert len(list(cache.glob("train_*.npy"))) == 3
    assert len(list(cache.glob("test_*.npy"))) == 2


def test_what_was_killed_while_decoding_is_made_anew(tree, tmp_path, monkeypatch):
    class Killed(BaseException):
        pass

    def half(paths, size, allocate):
        allocate((len(paths), 3, 80, 80))[:2] = 1
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(folder, "_decoded", half)
        with pytest.raises(Killed):
            load(tree, tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("*.npy"))
    assert equal(load(tree), load(tree, tmp_path / "cache"))


def test_errors_are_one_line(tree, tmp_path, refused, monkeypatch):
    cache = tmp_path / "cache"
    load(tree, cache)
    (file,) = cache.glob("train_*.npy")
    os.truncate(file, 1000)
    assert f"{file} is damaged" in refused(load, tree, cache)
    (tmp_path / "file").touch()
    assert f"{tmp_path}/file is not a folder" in refused(load, tree, tmp_path / "file")
    (tree / "test" / "a" / "00001.png").write_bytes(b"")
    assert "cannot read the image" in refused(load, tree, tmp_path / "other")
    assert not list((tmp_path / "other").glob("test_*"))

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    line = refused(load, tree, tmp_path / "third")
    assert "cannot be written (No space left on device): choose another --cache-images" in line


def test_a_set_larger_than_the_memory_is_refused_without_a_cache(tree, tmp_path, refused, monkeypatch):
    pages = os.sysconf
    monkeypatch.setattr(os, "sysconf", lambda name: 100 if name == "SC_PHYS_PAGES" else pages(name))
    assert "give --cache-images DIR, or lower --image-size" in refused(load, tree)
    assert load(tree, tmp_path / "cache").shape == (3, 80, 80)


def test_the_command_line(tree, tmp_path, monkeypatch, refused):
    cache = tmp_path / "cache"
    words = ["--dataset", "folder", "--data-root", tree, "--cache-images", cache, "--megabatches", 2]
    (job,) = jobs(*words)
    assert f"--cache-images {cache}" in job.command
    assert "changed images in memory" in refused(jobs, *words, "--scenario", "rotated")
    command(
        monkeypatch,
        *words,
        "--epochs",
        1,
        "--hidden",
        2,
        "--seeds",
        "0-1",
        "--jobs",
        2,
        "--out",
        tmp_path / "run",
    )
    assert len(list(cache.glob("*.npy"))) == 2


@pytest.mark.parametrize("shared", [False, True])
def test_other_data_sets_are_scaled_as_a_folder_is(monkeypatch, shared):
    if shared:
        monkeypatch.setitem(data.SHARED, ("digits", "data", False, 20), SharedMemory())
    found = data.load("digits", image_size=20)
    assert found.shape == (1, 20, 20)
    data.load.cache_clear()
    plain = data.load("digits")
    assert (found.mean, found.std, found.classes) == (plain.mean, plain.std, plain.classes)
    assert found.fingerprint != plain.fingerprint
    assert torch.equal(found.train.labels, plain.train.labels)
    for k in (0, 500):
        image = Image.fromarray(plain.train.images[k, 0].numpy()).resize((20, 20), Image.Resampling.BILINEAR)
        assert torch.equal(found.train.images[k, 0], torch.from_numpy(np.array(image)))
