"""Processes of --jobs share their data, and compute what one process computes."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from vision import data, shared


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """The folder of temporary files."""
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    return place


@pytest.mark.parametrize("options", [{}, {"image_size": 5, "resize_size": 6}])
def test_mapped_data_are_the_data(tmp_path, options):
    arguments = {"name": "digits", **options}
    loaded = data.load(**arguments)
    for _ in range(2):  # the first writes
        mapped = shared.load(tmp_path, arguments)
        assert mapped.preparation == loaded.preparation
        assert (mapped.fingerprint, mapped.classes) == (loaded.fingerprint, loaded.classes)
        for split in ("train", "test"):
            for one, other in zip(getattr(mapped, split), getattr(loaded, split), strict=True):
                assert torch.equal(one, other)
    assert str(tmp_path) in Path("/proc/self/maps").read_text(), "the images are copies"
    assert len(list(tmp_path.glob("*.json"))) == 1


def test_a_full_disk_leaves_each_process_its_own_copy(tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shared, "_write", full)
    dataset = shared.load(tmp_path, {"name": "digits"})
    assert torch.equal(dataset.train.images, data.load("digits").train.images)


def test_a_folder_that_a_killed_process_left_is_removed(temporary):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    left = temporary / f"{shared.PREFIX}{ended.pid}-abc"
    alive = temporary / f"{shared.PREFIX}{os.getpid()}-abc"
    other = temporary / f"{shared.PREFIX}notes-abc"
    link = temporary / f"{shared.PREFIX}{ended.pid}-link"
    for folder in (left, alive, other):
        folder.mkdir()
    link.symlink_to(other)
    with shared.folder() as place:
        assert place.is_dir()
        assert sorted(temporary.iterdir()) == sorted([alive, other, link, place])
    assert not place.exists()
