"""Files are whole or absent."""

import hashlib
import json

import pytest

from alma.files import atomic_write, sha256_file, write_json_atomic


def write_and_crash(file, content):
    """Half a job."""
    file.write(content)
    file.flush()
    raise ZeroDivisionError


@pytest.mark.parametrize(("mode", "old", "new"), [("w", "old", "nëw\n"), ("wb", b"old", b"\x00new")])
def test_a_file_changes_only_when_the_block_ends_well(tmp_path, mode, old, new):
    path = tmp_path / "file"
    with atomic_write(path, mode) as file:
        file.write(old)
        assert not path.exists()
    before = path.read_bytes()
    with pytest.raises(ZeroDivisionError), atomic_write(path, mode) as file:
        write_and_crash(file, new)
    assert path.read_bytes() == before
    with atomic_write(path, mode) as file:
        file.write(new)
    assert path.read_bytes() == (new if isinstance(new, bytes) else new.encode())
    assert list(tmp_path.iterdir()) == [path]


def test_a_new_file_can_be_read_by_the_group_like_any_other(tmp_path):
    (tmp_path / "plain").touch()
    write_json_atomic(tmp_path / "atomic", {})
    assert (tmp_path / "atomic").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_json_is_valid_json(tmp_path):
    path = tmp_path / "a.json"
    write_json_atomic(path, {"ä": [1, 0.1, None]})
    assert json.loads(path.read_text()) == {"ä": [1, 0.1, None]}
    with pytest.raises(ValueError, match="JSON"):
        write_json_atomic(path, {"x": float("nan")})
    assert json.loads(path.read_text()) == {"ä": [1, 0.1, None]}


def test_sha256_is_that_of_the_bytes(tmp_path):
    content = bytes(range(256)) * 5000
    (tmp_path / "file").write_bytes(content)
    assert sha256_file(tmp_path / "file") == hashlib.sha256(content).hexdigest()
