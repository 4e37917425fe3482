"""No damage to a stream passes `python -m data_prep.inspect --verify`."""

import os
import re
from pathlib import Path

import numpy as np
import pytest

from alma.stream import read_index, write_index
from data_prep import similarity, verify

from .small_streams import bless


def test_a_whole_stream_is_verified(iid_stream, inspected):
    code, text, error = inspected(iid_stream, "--verify")
    assert (code, error) == (0, "")
    assert re.fullmatch(r"verified 16 files, [\d.e-]+ GB in \d+\.\d s\n", text)


def test_a_stream_of_data_prep_is_verified(corpus, prepare, tmp_path, inspected):
    assert inspected(prepare(corpus, out=tmp_path / "out"), "--verify", "--workers", 2)[0] == 0


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def remove(name: str):
    return lambda out: (out / name).unlink()


def edit_ids(change):
    """Change the ids of megabatch_00 in place, with matching checksums."""

    def damage(out: Path) -> None:
        path = out / "megabatch_00/train.bin"
        ids = np.fromfile(path, np.uint16)
        change(ids)
        ids.tofile(path)
        bless(out)

    return damage


def edit_sizes(change):
    """Write another index of megabatch_00, with matching checksums."""

    def damage(out: Path) -> None:
        path = out / "megabatch_00/train.idx"
        write_index(path, change(np.array(read_index(path)[0])), 8)
        bless(out)

    return damage


def put_pointer(out: Path) -> None:
    path = out / "megabatch_00/train.idx"
    path.write_bytes(path.read_bytes()[:-8] + bytes(8))
    bless(out)


def edit_file(name: str, change):
    """Change the bytes of a file, with matching checksums."""

    def damage(out: Path) -> None:
        path = out / name
        path.write_bytes(change(path.read_bytes()))
        bless(out)

    return damage


def swap_keys(keys: bytes) -> bytes:
    """Swap the last key of a block of 50 and the first of the next."""
    return keys[: 49 * 16] + keys[50 * 16 : 51 * 16] + keys[49 * 16 : 50 * 16] + keys[51 * 16 :]


def copy_key(out: Path) -> None:
    """Copy the key of a document of megabatch_02 to test and valid."""
    key = (out / "megabatch_02/train.keys").read_bytes()[149 * 16 : 150 * 16]
    for part, place in (("test", 149), ("valid", 10)):
        keys = np.frombuffer((out / f"{part}.keys").read_bytes(), "S16").copy()
        keys[place] = key
        keys.tofile(out / f"{part}.keys")
    bless(out)


IDX, BIN = "megabatch_00/train.idx: ", "megabatch_00/train.bin: "
DAMAGES = {
    "other type": (
        lambda out: write_index(out / "test.idx", read_index(out / "test.idx")[0], 9) or bless(out),
        ["test.idx: of type uint32, not as 64 tokens need"],
    ),
    "truncated .bin": (
        lambda out: os.truncate(out / "test.bin", (out / "test.bin").stat().st_size - 1),
        ["test.bin: truncated: ", "test.bin: ends inside"],
    ),
    "flipped byte": (lambda out: flip(out / "valid.keys"), ["valid.keys: changed after writing"]),
    "longer file": (lambda out: (out / "dict.txt").write_text("a 1\n" * 999), ["dict.txt: changed after"]),
    **{
        f"missing {name}": (remove(name), [f"{name}: missing"])
        for name in ("test.bin", "test.idx", "dict.txt")
    },
    "no index": (lambda out: (out / "test.idx").write_text("no"), ["test.idx: not a fairseq mmap index"]),
    "id beyond": (
        edit_ids(lambda ids: ids.put([0, 1], [64, 999])),
        [BIN + "2 ids beyond the 64 of the dict"],
    ),
    "no eos": (edit_ids(lambda ids: ids.put([-1], [7])), [IDX + "1 items do not end in eos"]),
    "other sizes": (
        edit_sizes(lambda sizes: sizes + 1),
        [IDX + "its items add up to", IDX + "does not end in a"],
    ),
    "empty item": (edit_sizes(lambda sizes: np.append(sizes, 0)), [IDX + "1 items of no tokens"]),
    "no break at the end": (edit_sizes(lambda sizes: sizes[:-1]), [IDX + "does not end in a document break"]),
    "pointer": (put_pointer, [IDX + "1 pointers are not where the items start"]),
    "documents": (lambda out: bless(out, documents=201), [IDX + "has 200 documents, stream.json says 201"]),
    "items": (lambda out: bless(out, items=7), ["items, stream.json says 7"]),
    "tokens": (lambda out: bless(out, tokens=7), ["tokens, stream.json says 7"]),
    "short dict.txt": (
        edit_file("dict.txt", lambda text: text[5:]),
        ["dict.txt: has 59 lines, stream.json says 60"],
    ),
    "no count": (
        edit_file("dict.txt", lambda text: text.replace(b"u7 1", b"u7")),
        ["line 8 is not `token count`"],
    ),
    "twice": (
        edit_file("dict.txt", lambda text: text.replace(b"u7 ", b"u6 ")),
        ["line 8: the token 'u6' a second"],
    ),
    "no token": (
        edit_file("dict.txt", lambda text: text.replace(b"u7 1", b"<s> 1")),
        ["the token '<s>' a second"],
    ),
    "keys": (
        edit_file("test.keys", lambda keys: keys[16:]),
        ["test.keys: 2,384 bytes, not 16 for each of 150 doc"],
    ),
    "order of keys": (
        edit_file("test.keys", lambda keys: keys[16:] + keys[:16]),
        ["test.keys: its keys do not ascend"],
    ),
    "swapped keys": (edit_file("test.keys", swap_keys), ["test.keys: its keys do not ascend"]),
    "key twice": (
        edit_file("test.keys", lambda keys: keys[:16] * 2 + keys[32:]),
        ["1 documents are in test twice"],
    ),
    "key in three parts": (
        copy_key,
        ["1 documents are in megabatch_02 and in valid", "1 documents are in valid and in test"],
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_each_damage_is_found(iid_stream, inspected, monkeypatch, name):
    monkeypatch.setattr(verify, "_KEYS_AT_ONCE", 50)
    monkeypatch.setattr(similarity, "_BLOCK", 97)
    assert inspected(iid_stream, "--verify")[0] == 0
    damage, messages = DAMAGES[name]
    damage(iid_stream)
    code, text, error = inspected(iid_stream, "--verify")
    assert code == 2
    for message in messages:
        assert sum(message in line for line in text.splitlines()) == 1, text
    number = len(text.splitlines())
    assert number == len(messages) or "key" not in name, text
    assert error.startswith(f"error: {iid_stream}: {number} problem{'s' * (number > 1)}; copy ")
    assert len(error.splitlines()) == 1


def test_all_damages_are_listed_at_once(iid_stream, inspected, monkeypatch):
    monkeypatch.setattr(verify, "_RUNS", 10)  # so the keys of valid, which descend, are sorted in memory
    names = ["no eos", "pointer", "documents", "keys"]  # first those that update the checksums
    names += ["truncated .bin", "flipped byte", "missing dict.txt"]
    for name in names:
        DAMAGES[name][0](iid_stream)
    code, text, error = inspected(iid_stream, "--verify", "--workers", 2)
    assert code == 2
    for name in names:
        for message in DAMAGES[name][1]:
            assert message in text, name
    assert f"{len(text.splitlines())} problems" in error


def test_keys_with_zeros_and_high_bits_are_distinguished(iid_stream, inspected):
    """Keys are ordered as unsigned bytes; trailing zeros count."""
    rng = np.random.default_rng(0)
    keys = sorted(rng.bytes(15) + end for end in [b"\0", b"\1"] for _ in range(75))
    assert keys[0][0] < 128 < keys[-1][0]
    keys[40] = keys[41][:-1] + b"\0"
    keys[41] = keys[41][:-1] + b"\1"
    edit_file("test.keys", lambda _: b"".join(keys))(iid_stream)
    assert inspected(iid_stream, "--verify")[:2][0] == 0


def test_leftovers_are_a_warning(iid_stream, inspected):
    (iid_stream / ".work-0123456789abcdef").mkdir()
    (iid_stream / "megabatch_00/.train.bin.12ab.tmp").touch()
    code, text, error = inspected(iid_stream, "--verify")
    assert code == 0
    assert text.startswith("verified 16 files")
    assert [line.split(": left by")[0] for line in error.splitlines()] == [
        f"warning: {iid_stream}/.work-0123456789abcdef",
        f"warning: {iid_stream}/megabatch_00/.train.bin.12ab.tmp",
    ]


@pytest.mark.parametrize(
    "name", ["truncated .bin", "missing test.bin", "missing test.idx", "missing dict.txt", "id beyond"]
)
def test_a_damaged_stream_is_not_described(iid_stream, inspected, name):
    DAMAGES[name][0](iid_stream)
    code, text, error = inspected(iid_stream)
    assert (code, text) == (2, "")
    assert "--verify" in error
    assert len(error.splitlines()) == 1
