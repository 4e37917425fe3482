"""The stream format: reading reverses writing, and damage is reported."""

import dataclasses
import json

import numpy as np
import pytest

from alma.errors import UserError
from alma.stream import FileInfo, Part, Stream, is_stream, read_index, write_index


@pytest.fixture
def stream(tmp_path):
    """A stream with one part of three items, used as every split."""
    np.array([5, 6, 2, 2, 7, 2], np.uint16).tofile(tmp_path / "valid.bin")
    write_index(tmp_path / "valid.idx", np.array([3, 1, 2]), 8)
    (tmp_path / "dict.txt").write_text("a 1\n")
    files = {name: FileInfo.of(tmp_path / name) for name in ("valid.bin", "valid.idx")}
    part = Part("valid", "valid", 2, 6, 1, 3, 9, {"web": 2}, files)
    dictionary = {"dict.txt": FileInfo.of(tmp_path / "dict.txt")}
    stream = Stream(tmp_path, 2, 7, 4, (part, part), part, part, {"words": 2}, dictionary)
    assert not is_stream(tmp_path)
    stream.write()
    return stream


def test_load_gives_what_was_written(stream):
    assert is_stream(stream.directory)
    assert Stream.load(stream.directory) == stream
    assert stream.path(stream.valid) == str(stream.directory / "valid")
    stream.check([*stream.megabatches, stream.test])


def test_only_ordered_streams_name_held_out_parts(stream):
    assert not stream.ordered
    assert not _record(stream).keys() & {"held_out", "held_out_valid"}
    held_out = dataclasses.replace(stream.valid, name="test_00", prefix="test_00")
    ordered = dataclasses.replace(
        stream, held_out=(held_out,) * 2, held_out_valid=(stream.valid,) * 2
    )
    ordered.write()
    assert Stream.load(stream.directory) == ordered
    assert ordered.ordered
    assert ordered.parts == (*stream.parts, held_out, held_out, stream.valid, stream.valid)


def test_fairseq_reads_the_index(stream):
    from fairseq.data.indexed_dataset import MMapIndexedDataset

    items = [item.tolist() for item in MMapIndexedDataset(stream.path(stream.valid))]
    assert items == [[5, 6, 2], [2], [7, 2]]
    sizes, code = read_index(stream.path(stream.valid) + ".idx")
    assert (sizes.tolist(), code) == ([3, 1, 2], 8)


@pytest.mark.parametrize("code", [4, 8, 9])
def test_index_is_byte_identical_to_fairseqs(tmp_path, code):
    import torch
    from fairseq.data.indexed_dataset import MMapIndexedDatasetBuilder

    from alma.stream import DTYPES

    sizes = [1, 4, 2, 70000]
    builder = MMapIndexedDatasetBuilder(str(tmp_path / "a.bin"), np.dtype(DTYPES[code]).type)
    for size in sizes:
        builder.add_item(torch.ones(size, dtype=torch.int))
    builder.finalize(str(tmp_path / "a.idx"))
    write_index(tmp_path / "b.idx", np.array(sizes), code)
    assert (tmp_path / "a.idx").read_bytes() == (tmp_path / "b.idx").read_bytes()


@pytest.mark.parametrize("name", ["valid.bin", "valid.idx", "dict.txt"])
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.unlink(), "missing"),
        (
            lambda path: path.write_bytes(path.read_bytes()[:-1]),
            "truncated: {less} of {size} bytes",
        ),
        (lambda path: path.write_bytes(path.read_bytes()[:-1] + b"?"), "changed after writing"),
        (lambda path: path.write_bytes(path.read_bytes() + b"?"), "changed after writing"),
    ],
)
def test_check_names_a_damaged_file(stream, name, damage, message):
    path = stream.directory / name
    size = path.stat().st_size
    damage(path)
    with pytest.raises(UserError) as error:
        stream.check(stream.valid)
    assert f"{path}: {message.format(less=size - 1, size=size)}" in str(error.value)


def _record(stream):
    return json.loads((stream.directory / "stream.json").read_text())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 1}, "format version 1"),
        ({"valid": None}, r"got `null` - at `\$.valid`"),
        ({"valid": {"name": "valid"}}, "missing required field `prefix`"),
        ({"megabatches": 3}, "Expected `array`, got `int`"),
        ({"megabatches": []}, "0 mega-batches"),
        ({"held_out": 1}, "2 mega-batches, held-out parts of 1"),
        ({"vocab_size": "many"}, r"Expected `int`, got `str` - at `\$.vocab_size`"),
        ({"corpus": {"spread": float("inf")}}, "malformed"),
        ({"settings": {"words": 1e300}}, "huge numbers"),
        ({"valid": {"words": 0}}, ">= 1"),
        ({"valid": {"prefix": "/etc/x"}}, "prefix"),
        ({"valid": {"prefix": "a/../../x"}}, "prefix"),
        ({"files": {"../x": {"size": 1, "sha256": ""}}}, "key"),
        ({"files": {"dict.txt": {"size": -1, "sha256": ""}}}, ">= 0"),
    ],
)
def test_load_refuses_another_format(stream, changes, message):
    """Changes of fields; those of a part are changes of its fields, and 1 stands for one part."""
    record = _record(stream)
    for name, value in changes.items():
        if name == "valid" and value and value.keys() != {"name"}:
            record[name] |= value
        elif name == "held_out":
            record[name] = [record["test"]]
        else:
            record[name] = value
    (stream.directory / "stream.json").write_text(json.dumps(record))
    with pytest.raises(UserError, match=message):
        Stream.load(stream.directory)


def test_load_refuses_half_a_file_and_no_stream(stream, tmp_path_factory):
    path = stream.directory / "stream.json"
    for text, message in (
        (path.read_text()[:-9], "malformed"),
        ("[" * 100_000, "nested too deeply"),
    ):
        path.write_text(text)
        with pytest.raises(UserError, match=message):
            Stream.load(stream.directory)
    with pytest.raises(UserError, match="no finished stream"):
        Stream.load(tmp_path_factory.mktemp("empty"))


def test_read_index_refuses_other_files(stream):
    index = stream.directory / "valid.idx"
    whole = index.read_bytes()
    for data in (b"", whole[:-1], whole + b"0", b"X" + whole[1:]):
        index.write_bytes(data)
        with pytest.raises(UserError, match="not a fairseq mmap index"):
            read_index(index)
