"""Kinds of damage to a file: functions (draw, path, place) that rewrite it, or return False if they do not
apply to it. `draw` is Hypothesis's, `place` the folder of the case."""

import bz2
import gzip
import json
import math
import os
import pickle
import shutil
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
import zstandard
from hypothesis import strategies as st

Draw = Callable[[st.SearchStrategy], Any]
Damage = Callable[[Draw, Path, Path], bool | None]

MARKER = "executed"
"""Name of the folder, beside the working folder, that executed input makes."""
OTHER_MODELS = ("dense/checkpoint_last.pt", "runs/digits/checkpoint.pt")
"""Of the sound inputs: without experts, and of images."""
OWN_SUMS = (".pt", ".gz", ".bz2", ".zst")
"""Files that hold their check sums, so that another sound file in their place is none the worse."""
_TRAPS = (
    *("\u202etxt.exe", "a\u0000b", "\u200b\u200d\ufeff", "e\u0301" * 50, "\u2028\u2029\x85", "\x1b[2J\x07"),
    *("\ud83d\ude00", "İıß\u01c6", "-rf", "$(touch executed)", "%s%n{0}{x!r}", "../" * 9, "=", "", "\ud800"),
)
_PATHS = ("../../precious/file", "../../../etc/passwd", "..", "/dev/full")
_MISSING = object()
_VALUES = st.one_of(
    st.sampled_from((None, True, "text", -7, 1.5, [], {}, [[1], "x"], {"a": {"b": 1}}, _MISSING)),
    st.sampled_from((10**400, 2**63, -(2**63) - 1, 2**31, 1e308, -1, 0, 10**9)),
    st.sampled_from((math.nan, math.inf, -math.inf)),
    st.sampled_from((*_TRAPS, *_PATHS, "new", "a b", "__class__")),
)


def _of_bytes(change: Callable[[Draw, bytes], bytes | None]) -> Damage:
    """Damage to any file that is not empty; None: it does not apply."""

    def damage(draw: Draw, path: Path, place: Path) -> bool | None:
        data = path.read_bytes()
        changed = change(draw, data) if data else None
        if changed is None:
            return False
        path.write_bytes(changed)
        return None

    return damage


def _place_in(draw: Draw, data: bytes) -> int:
    return draw(st.integers(0, len(data) - 1))


def _flip(draw: Draw, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(draw(st.sampled_from((1, 1, 2, 8)))):
        changed[_place_in(draw, data)] ^= 1 << draw(st.integers(0, 7))
    return bytes(changed)


def _cut(draw: Draw, data: bytes) -> bytes:
    return data[: draw(st.sampled_from((0, 1, len(data) - 1)) | st.integers(0, len(data) - 1))]


def _grow(draw: Draw, data: bytes) -> bytes:
    more = draw(st.sampled_from((data, b"\n", bytes(512))) | st.binary(min_size=1, max_size=99))
    return data + more if draw(st.booleans()) else more + data


def _blank(draw: Draw, data: bytes) -> bytes:
    """A block of zeros, or of one other byte, as a failing disk leaves it."""
    start, size = _place_in(draw, data), draw(st.sampled_from((16, 512, 4096)))
    block = bytes([draw(st.sampled_from((0, 0xA5)))]) * min(size, len(data) - start)
    return data[:start] + block + data[start + len(block) :]


def _recode(draw: Draw, data: bytes) -> bytes | None:
    """Text in another encoding, with other line ends, or with a trap of Unicode in it."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return None
    at = draw(st.integers(0, len(text)))
    trap = draw(st.sampled_from(_TRAPS)).encode("utf-8", "surrogatepass")
    broken = (trap, b"\xed\xa0\x80", b"\xff\xfe", b"\xc3")
    changed = [text.encode("utf-16"), b"\xef\xbb\xbf" + data, data.replace(b"\n", b"\r\n")]
    changed += [text[:at].encode() + bad + text[at:].encode() for bad in broken]
    return draw(st.sampled_from(changed))


def swap(draw: Draw, path: Path, place: Path) -> None:
    """Another file of the inputs in its place."""
    others = [each for each in sorted((place / "work").rglob("*")) if each.is_file() and each != path]
    path.write_bytes(draw(st.sampled_from(others)).read_bytes() if others else b"other")


def replace(draw: Draw, path: Path, place: Path) -> None:
    """No file, a folder, a link to itself, a link to nothing."""
    path.unlink()
    kind = draw(st.integers(0, 3))
    if kind == 1:
        path.mkdir()
    elif kind:
        path.symlink_to(path.name if kind == 2 else "nowhere")


def change_value(draw: Draw, path: Path, place: Path) -> bool | None:
    """Another value of a JSON, JSON lines, YAML or torch file, or another name in a mapping."""
    lines, number = [""], 0
    try:
        if path.suffix == ".pt":
            import torch

            record = torch.load(path, weights_only=True)
        elif path.suffix == ".yaml":
            record = yaml.safe_load(path.read_text("utf-8"))
        elif path.suffix in (".json", ".jsonl"):
            text = path.read_text("utf-8")
            lines = text.splitlines() if path.suffix == ".jsonl" else [text]
            number = draw(st.integers(0, len(lines) - 1))
            record = json.loads(lines[number])
        else:
            return False
    except (ValueError, OSError):
        return False
    if not (places := _places(record)):
        return False
    container, key = places[draw(st.integers(0, len(places) - 1))]
    old, new = container[key], draw(_VALUES)
    if type(old).__name__ == "Tensor" and isinstance(new, int | float):
        new = old * 0 + min(float(new), 3e38) if old.is_floating_point() else old * 0 - 1
    if new is _MISSING:
        del container[key]
    elif isinstance(container, dict) and isinstance(new, str) and draw(st.booleans()):
        container[new] = container.pop(key)
    else:
        container[key] = new
    if path.suffix == ".pt":
        torch.save(record, path)
    elif path.suffix == ".yaml":
        path.write_text(yaml.safe_dump(record))
    else:
        path.write_text("\n".join([*lines[:number], json.dumps(record), *lines[number + 1 :], ""]))
    return None


def _places(value: Any) -> list[tuple[Any, Any]]:
    """All (container, key) in nested lists and mappings."""
    if isinstance(value, tuple):
        return [place for each in value for place in _places(each)]
    keys = list(value) if isinstance(value, dict) else range(len(value) if isinstance(value, list) else 0)
    return [place for key in keys for place in [(value, key), *_places(value[key])]]


def nest(draw: Draw, path: Path, place: Path) -> bool | None:
    """100,000 brackets, or a YAML file that multiplies itself."""
    if path.suffix not in (".json", ".jsonl", ".yaml"):
        return False
    depth = draw(st.sampled_from((500, 100_000)))
    texts = ["[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth, '{"config": ' + "[" * depth]
    if path.suffix == ".yaml":
        laughs = [f"a{k}: &a{k} [{', '.join([f'*a{k - 1}'] * 9) if k else 'x'}]" for k in range(9)]
        texts += ["\n".join(laughs), "a: &a {b: *a}", "learner: &x sm\nseed: *y"]
    path.write_text(texts[draw(st.integers(0, len(texts) - 1))] + "\n")
    return None


class MakesFolder:
    """A pickle of it makes a folder when it is loaded."""

    def __init__(self, marker: Path) -> None:
        self.marker = str(marker)

    def __reduce__(self) -> tuple[Callable, tuple[str]]:
        return os.mkdir, (self.marker,)


def execute(draw: Draw, path: Path, place: Path) -> None:
    """A file that makes a folder when it is unpickled, or its YAML tags are obeyed."""
    bad: Any = MakesFolder(place / MARKER)
    if draw(st.booleans()):
        bad = {"model": bad, "data": bad, "learner": bad, "labels": [0]}
    if path.suffix == ".yaml":
        path.write_text(f"learner: !!python/object/apply:os.mkdir ['{place / MARKER}']\n")
    elif path.suffix == ".pt" and draw(st.booleans()):
        import torch

        torch.save(bad, path, _use_new_zipfile_serialization=draw(st.booleans()))
    else:
        text = pickle.dumps(bad, draw(st.sampled_from((0, 2, 4))))
        path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)


def bomb(draw: Draw, path: Path, place: Path) -> bool | None:
    """Few bytes that unpack to gigabytes, or claim to."""
    packers = {".gz": lambda data: gzip.compress(data, 1), ".bz2": bz2.compress, ".zst": zstandard.compress}
    if pack := packers.get(path.suffix):
        fill = draw(st.sampled_from((b" ", b"\0", b"word ")))
        path.write_bytes(pack(fill * (1 << 22)) * 160)  # more than a child may hold
    elif path.suffix == ".png":
        side = draw(st.sampled_from((9_500, 60_000, 2**31 - 1)))
        head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
        chunks = [(b"IHDR", head), (b"IDAT", zlib.compress(bytes(1 << 20))), (b"IEND", b"")]
        packed = [struct.pack(">I", len(d)) + n + d + struct.pack(">I", zlib.crc32(n + d)) for n, d in chunks]
        path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(packed))
    elif path.name.endswith("ubyte"):
        data = path.read_bytes()
        path.write_bytes(data[:4] + struct.pack(">I", 2**32 - 1) + data[8:])
    else:
        return False
    return None


def other(draw: Draw, path: Path, place: Path) -> bool | None:
    """A sound checkpoint of another architecture, or of images in place of text."""
    if path.suffix != ".pt":
        return False
    shutil.copyfile(place.parent / "sound" / draw(st.sampled_from(OTHER_MODELS)), path)
    return None


SEEN_BY_SUMS: dict[str, Damage] = {
    "bits flipped": _of_bytes(_flip),
    "truncated": _of_bytes(_cut),
    "bytes added": _of_bytes(_grow),
    "block lost": _of_bytes(_blank),
    "file swapped": swap,
}
"""Kinds that a check sum sees."""
KINDS = SEEN_BY_SUMS | {
    "not a file": replace,
    "encoding": _of_bytes(_recode),
    "value": change_value,
    "nesting": nest,
    "execution": execute,
    "bomb": bomb,
    "other model": other,
}
