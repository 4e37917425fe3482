"""Files of MNIST whose headers lie."""

import gzip
import struct

import pytest

from vision import idx

LABELS = struct.pack(">II", 0x801, 12) + bytes(12)


@pytest.mark.parametrize("data", [LABELS[:-1], LABELS + b"0", b"", LABELS[:7]])
def test_files_of_another_length_are_refused(tmp_path, refused, data):
    path = tmp_path / "labels"
    path.write_bytes(data)
    line = refused(idx.read, path, 1)
    assert "its header says 20" in line or "not an idx file of labels" in line
    assert str(path) in line


def test_an_archive_that_unpacks_to_more_than_its_header_says_is_refused(tmp_path, refused):
    path, packed = tmp_path / "labels", tmp_path / "labels.gz"
    packed.write_bytes(gzip.compress(LABELS))
    assert idx.read(path, 1).tolist() == [0] * 12
    packed.write_bytes(gzip.compress(LABELS) + 20 * gzip.compress(bytes(1 << 20)))
    assert f"{packed}: 21 bytes or more, its header says 20" in refused(idx.read, path, 1)
    packed.write_bytes(gzip.compress(struct.pack(">II", 0x801, 2**32 - 1)))
    assert "its header says 4,294,967,303 bytes, more than any set" in refused(idx.read, path, 1)


def test_labels_in_place_of_images_are_refused(tmp_path, refused):
    (tmp_path / "images").write_bytes(LABELS)
    assert "not an idx file of images" in refused(idx.read, tmp_path / "images", 3)
