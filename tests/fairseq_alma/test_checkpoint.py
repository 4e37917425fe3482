"""Messages about unreadable checkpoints; they advise deletion only if the damage is certain."""

import argparse
import errno
import zipfile
from unittest.mock import Mock

import pytest
import torch

from alma.errors import UserError
from fairseq_alma.checkpoint import memory_map

STATE = {"model": {"decoder.weight": torch.ones(1000)}}
DELETE = "delete it, copy an earlier checkpoint"


@pytest.fixture
def path(tmp_path):
    """An intact checkpoint."""
    torch.save(STATE, tmp_path / "checkpoint.pt")
    return tmp_path / "checkpoint.pt"


def message(path) -> str:
    with pytest.raises(UserError) as error:
        memory_map(str(path))
    assert str(error.value).startswith(f"{path}: ")
    return str(error.value)


def test_certain_damage_may_be_deleted(path):
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert "truncated; " + DELETE in message(path)
    path.write_bytes(b"")
    assert "empty; " + DELETE in message(path)
    pickled = whole.index(b"decoder.weight")
    weight = whole.index(
        torch.ones(4).numpy().tobytes()
    )  # torch itself does not compare check sums
    for at, size in ((pickled, 60), (weight, 1)):
        path.write_bytes(whole[:at] + b"\xff" * size + whole[at + size :])
        assert "has a wrong checksum; " + DELETE in message(path)


def test_a_checkpoint_that_unpacks_to_more_than_its_size_is_refused(path):
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("checkpoint/data/999", bytes(1 << 20))
    assert "checkpoint/data/999 in it is compressed, which torch never does" in message(path)


@pytest.mark.parametrize(
    "state",
    [
        [STATE],
        {"model": [1]},
        {"model": {"decoder.weight": "text"}},
        STATE | {"extra_state": [1]},
        STATE | {"extra_state": {"ema": {"decoder.weight": None}}},
        STATE | {"optimizer_history": [{"num_updates": "many"}]},
        STATE | {"optimizer_history": 3},
    ],
)
def test_content_of_other_kinds_is_one_line(path, state):
    torch.save(state, path)
    assert "not a fairseq checkpoint" in message(path)
    assert DELETE not in message(path)


def test_python_objects_are_named_and_not_loaded(path):
    torch.save(STATE | {"args": argparse.Namespace(arch="lm")}, path)
    assert "contains Python objects (argparse.Namespace)" in message(path)
    assert DELETE not in message(path)


def test_foreign_files_are_not_called_damaged(path, tmp_path):
    assert "no such checkpoint" in message(tmp_path / "none.pt")
    assert "is a directory; give a checkpoint in it" in message(tmp_path)
    path.write_text("no checkpoint\n" * 10)
    assert "not a fairseq checkpoint" in message(path)
    assert DELETE not in message(path)
    torch.save({"weights": 1}, path)
    assert "not a fairseq checkpoint (KeyError: 'model')" in message(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a", "b")
    assert "not a fairseq checkpoint" in message(path)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            OSError(errno.EIO, "not now"),
            "cannot be read: not now (EIO); the checkpoint may be intact",
        ),
        (OSError(errno.EACCES, "not now"), "(EACCES); the checkpoint may be intact: try again"),
        (OSError(errno.ESTALE, "not now"), "(ESTALE); the checkpoint may be intact: try again"),
        (
            RuntimeError("unable to mmap 4 bytes: Cannot allocate memory (12)"),
            "Cannot allocate memory",
        ),
    ],
)
def test_an_intact_file_that_cannot_be_read_is_not_called_damaged(path, monkeypatch, error, words):
    monkeypatch.setattr(torch, "load", Mock(side_effect=error))
    line = message(path)
    assert words in line
    assert DELETE not in line
