"""Files of MNIST whose headers lie."""

import gzip
import struct

import pytest

from alma.errors import UserError
from vision import idx

LABELS = struct.pack(">II", 0x801, 12) + bytes(12)


def refused(path) -> str:
    with pytest.raises(UserError) as caught, idx.unpacked(path.parents[2], "MNIST"):
        pass
    assert str(path) in str(caught.value)
    return str(caught.value)


@pytest.fixture
def raw(tmp_path):
    (tmp_path / "MNIST/raw").mkdir(parents=True)
    return tmp_path / "MNIST/raw"


def test_sound_files_are_unpacked(raw):
    (raw / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(LABELS))
    with idx.unpacked(raw.parents[1], "MNIST") as place:
        assert (place / "MNIST/raw/train-labels-idx1-ubyte").read_bytes() == LABELS


def test_an_archive_that_unpacks_to_more_than_its_header_says_is_refused(raw):
    path = raw / "train-labels-idx1-ubyte.gz"
    path.write_bytes(gzip.compress(LABELS) + 20 * gzip.compress(bytes(1 << 20)))
    assert "1,048,592 bytes or more, its header says 20" in refused(path)
    path.write_bytes(gzip.compress(struct.pack(">II", 0x801, 2**32 - 1)))
    assert "its header says 4,294,967,303 bytes, more than any set of this format" in refused(path)


@pytest.mark.parametrize("data", [LABELS[:-1], LABELS + b"0", b"", LABELS[:7]])
def test_files_of_another_length_are_refused(raw, data):
    path = raw / "train-labels-idx1-ubyte"
    path.write_bytes(data)
    assert "its header says 20" in refused(path) or "not an idx file of labels" in refused(path)


def test_labels_in_place_of_images_are_refused(raw):
    path = raw / "train-images-idx3-ubyte"
    path.write_bytes(LABELS)
    assert "not an idx file of images" in refused(path)
