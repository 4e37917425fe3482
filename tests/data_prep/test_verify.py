"""`alma inspect --verify`: damage shows in the checksums, a leak in the keys."""

import os
import re
from pathlib import Path

import numpy as np
import pytest

from data_prep import verify

from .small_streams import bless


def test_a_whole_stream_is_verified(iid_stream, inspected):
    code, text, error = inspected(iid_stream, "--verify", "--workers", 2)
    assert (code, error) == (0, "")
    assert re.fullmatch(r"verified 16 files, [\d.e-]+ GB\n", text)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def grow(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"1")


DAMAGES = {
    "test.bin": (truncate, "truncated: "),
    "valid.keys": (flip, "changed after writing"),
    "dict.txt": (grow, "changed after writing"),
    "megabatch_01/train.idx": (Path.unlink, "missing"),
}


def test_all_damages_are_listed_at_once(iid_stream, inspected):
    for name, (damage, _) in DAMAGES.items():
        damage(iid_stream / name)
    code, text, error = inspected(iid_stream, "--verify")
    assert code == 2
    for name, (_, message) in DAMAGES.items():
        assert sum(f"{name}: {message}" in line for line in text.splitlines()) == 1, name
    assert error.startswith(f"error: {iid_stream}: 4 problems; copy ")
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize("name", ["test.bin", "megabatch_01/train.idx"])
def test_a_damaged_stream_is_not_described(iid_stream, inspected, name):
    DAMAGES[name][0](iid_stream / name)
    code, text, error = inspected(iid_stream)
    assert (code, text) == (2, "")
    assert "--verify" in error
    assert len(error.splitlines()) == 1


def edit_keys(out: Path, part: str, place: int, key: bytes) -> None:
    """Put a key at a place, in order, with matching checksums."""
    keys = np.fromfile(out / f"{part}.keys", "S16")
    keys[place] = key
    np.sort(keys).tofile(out / f"{part}.keys")
    bless(out)


def test_documents_of_two_parts_are_found(iid_stream, inspected, monkeypatch):
    """Equal documents, and pieces of one document, whose keys share 12 bytes; trailing zeros
    count."""
    monkeypatch.setattr(verify, "_KEYS_AT_ONCE", 50)
    keys = (iid_stream / "megabatch_02/train.keys").read_bytes()
    edit_keys(iid_stream, "test", 149, keys[149 * 16 : 150 * 16])
    edit_keys(iid_stream, "valid", 10, keys[149 * 16 : 150 * 16])
    edit_keys(iid_stream, "megabatch_01/train", 7, keys[32:44] + b"\0\0\1\0")
    code, text, _ = inspected(iid_stream, "--verify")
    assert code == 2
    assert [line.partition(": ")[2] for line in text.splitlines()] == [
        "1 documents are in megabatch_02 and in valid",
        "1 documents are in valid and in test",
        "1 documents have pieces in megabatch_01 and in megabatch_02",
    ]


def test_a_document_that_is_twice_in_a_part_is_found(iid_stream, inspected):
    edit_keys(iid_stream, "test", 1, (iid_stream / "test.keys").read_bytes()[:16])
    assert "1 documents are in test twice" in inspected(iid_stream, "--verify")[1]
