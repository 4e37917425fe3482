"""Processes of --jobs share their data, and compute what one process computes."""

import gc
import os
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from pathlib import Path

import pytest
import torch

from alma.files import locked
from tests.conftest import ROOT
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


def test_the_process_that_reads_the_data_keeps_no_second_copy(tmp_path, monkeypatch):
    written = []
    write = shared._write

    def remembered(place, key, dataset):
        written.append(weakref.ref(dataset.train.images))
        write(place, key, dataset)

    monkeypatch.setattr(shared, "_write", remembered)
    data.load.cache_clear()
    mapped = shared.load(tmp_path, {"name": "digits"})
    gc.collect()
    assert [images() for images in written] == [None]
    assert len(mapped.train.labels)


def test_a_full_disk_leaves_each_process_its_own_copy(tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shared, "_write", full)
    dataset = shared.load(tmp_path, {"name": "digits"})
    assert torch.equal(dataset.train.images, data.load("digits").train.images)


def test_a_folder_that_a_killed_process_left_is_removed(temporary):
    """Also if this process has its number; but none that is alive, here or in another container."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    names = [f"{ended.pid}-abc", f"{os.getpid()}-abc", "notes-abc", f"{os.getppid()}-abc"]
    names.append(f"{ended.pid}-def")
    left, reused, other, alive, elsewhere = (temporary / f"{shared.PREFIX}{n}" for n in names)
    link = temporary / f"{shared.PREFIX}{ended.pid}-link"
    for folder in (left, reused, other, alive, elsewhere):
        folder.mkdir()
    link.symlink_to(other)
    with locked(elsewhere, shared._LOCK), shared.folder() as place:
        assert place.is_dir()
        assert sorted(temporary.iterdir()) == sorted([other, alive, elsewhere, link, place])
    assert not place.exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_removes_the_data(temporary, tmp_path, number):
    words = ["--learner", "sm", "--seeds", "0-3", "--epochs", "500", "--jobs", "2"]
    command = [sys.executable, "vision/run.py", *words, "--out", str(tmp_path / "out")]
    environment = {**os.environ, "TMPDIR": str(temporary)}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE)
    while not list(temporary.glob(f"{shared.PREFIX}{process.pid}-*/*.json")):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(number)
    _, error = process.communicate()
    assert process.returncode == 128 + number
    assert "interrupted; rerun the same command to resume" in error.decode().splitlines()
    assert not list(temporary.glob(f"{shared.PREFIX}*"))
