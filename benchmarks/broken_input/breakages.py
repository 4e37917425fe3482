"""Ways to break a file. Each is a function (path, rng, place) that rewrites the file, or returns False if it
does not apply to it; `place` is the case's folder."""

import bz2
import gzip
import io
import json
import math
import os
import pickle
import random
import shutil
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
import zstandard

from benchmarks.broken_input.judge import MARKER

_TRAPS = (
    *("\u202etxt.exe", "a\u0000b", "\u200b\u200d\ufeff", "e\u0301" * 50, "\u2028\u2029\x85", "\x1b[2J\x07"),
    *("\ud83d\ude00", "İıß\u01c6", "-rf", "$(touch executed)", "%s%n{0}{x!r}", "../" * 9, "=", "", "\ud800"),
)
_TYPES: tuple[Any, ...] = (None, True, "text", -7, 1.5, [], {}, [[1], "x"], {"a": {"b": 1}}, "")
_HUGE = (10**400, 2**63, -(2**63) - 1, 2**31, 1e308, -1, 0, 10**9)
_ODD = (math.nan, math.inf, -math.inf)
_BLOCK = 1 << 24  # bytes of a member of a bomb
_MEMBERS = 40  # 640 MiB, more than a child may hold


OTHER_MODELS = ("dense/checkpoint_last.pt", "runs/digits/checkpoint.pt")
"""Of the sound inputs: without experts, and of images."""


class Runs:
    """A pickle of it makes a folder when it is loaded."""

    def __init__(self, marker: Path) -> None:
        self.marker = str(marker)

    def __reduce__(self) -> tuple[Callable, tuple[str]]:
        return os.mkdir, (self.marker,)


def flip(path: Path, rng: random.Random, place: Path) -> bool | None:
    """One to eight bits."""
    data = bytearray(path.read_bytes())
    if not data:
        return False
    for _ in range(rng.choice((1, 1, 2, 8))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)
    return None


def cut(path: Path, rng: random.Random, place: Path) -> bool | None:
    """The end is missing: a part, a byte, or all."""
    data = path.read_bytes()
    if not data:
        return False
    path.write_bytes(data[: rng.choice((0, 1, len(data) - 1, rng.randrange(len(data))))])
    return None


def grow(path: Path, rng: random.Random, place: Path) -> None:
    """More bytes at the end or the beginning: random ones, or the file once more."""
    data = path.read_bytes()
    more = rng.choice((data, rng.randbytes(rng.randint(1, 999)), b"\n", bytes(512)))
    path.write_bytes(rng.choice((data + more, more + data)))


def blank(path: Path, rng: random.Random, place: Path) -> bool | None:
    """A block of zeros, or of noise, as a failing disk leaves it."""
    data = path.read_bytes()
    if not data:
        return False
    start, size = rng.randrange(len(data)), rng.choice((16, 512, 4096))
    block = rng.choice((bytes(size), rng.randbytes(size)))[: len(data) - start]
    path.write_bytes(data[:start] + block + data[start + len(block) :])
    return None


def swap(path: Path, rng: random.Random, place: Path) -> None:
    """Another file of the inputs in its place."""
    others = [each for each in sorted((place / "work").rglob("*")) if each.is_file() and each != path]
    if others:
        path.write_bytes(rng.choice(others).read_bytes())
    else:
        path.write_bytes(rng.randbytes(100))


def replace(path: Path, rng: random.Random, place: Path) -> None:
    """No file, a folder, a link to itself, a link to nothing."""
    path.unlink()
    kind = rng.randrange(4)
    if kind == 1:
        path.mkdir()
    elif kind:
        path.symlink_to(path.name if kind == 2 else "nowhere")


def recode(path: Path, rng: random.Random, place: Path) -> bool | None:
    """Text in another encoding, with another kind of line ends, or with a trap of Unicode in it."""
    try:
        text = path.read_bytes().decode()
    except UnicodeDecodeError:
        return False
    at = rng.randrange(len(text) + 1)
    ways: tuple[Callable[[], bytes], ...] = (
        lambda: text.encode("utf-16"),
        lambda: b"\xef\xbb\xbf" + text.encode(),
        lambda: text.replace("\n", "\r\n").encode(),
        lambda: text.replace("\n", "\r").encode(),
        lambda: (text[:at] + rng.choice(_TRAPS) + text[at:]).encode("utf-8", "surrogatepass"),
        lambda: text[:at].encode() + rng.choice((b"\xed\xa0\x80", b"\xff\xfe", b"\xc3")) + text[at:].encode(),
    )
    path.write_bytes(rng.choice(ways)())
    return None


def _leaves(value: Any, at: tuple = ()) -> list[tuple]:
    """The places of all values in nested lists and mappings."""
    items = (
        value.items() if isinstance(value, dict) else enumerate(value) if type(value) in (list, tuple) else ()
    )
    return [at] * bool(at) + [leaf for key, each in items for leaf in _leaves(each, (*at, key))]


def _edit(path: Path, rng: random.Random, change: Callable[[Any, Any], Any]) -> bool | None:
    """Change one value of a JSON, JSON lines, YAML or torch file: `change(container, key)`."""
    suffix = path.suffix.removesuffix(".gz")
    try:
        if suffix == ".pt":
            import torch

            record = torch.load(path, weights_only=True)
        elif suffix == ".jsonl":
            lines = path.read_text("utf-8").splitlines()
            number = rng.randrange(len(lines))
            record = json.loads(lines[number])
        elif suffix in (".json", ".yaml"):
            text = path.read_text("utf-8")
            record = json.loads(text) if suffix == ".json" else yaml.safe_load(text)
        else:
            return False
    except (ValueError, OSError, UnicodeDecodeError):
        return False
    places = _leaves(record)
    if not places:
        return False
    *parents, key = rng.choice(places)
    container = record
    for each in parents:
        container = container[each]
    if isinstance(container, tuple):
        return False
    change(container, key)
    if suffix == ".pt":
        torch.save(record, path)
    elif suffix == ".jsonl":
        path.write_text("\n".join([*lines[:number], json.dumps(record), *lines[number + 1 :], ""]))
    else:
        path.write_text(json.dumps(record) if suffix == ".json" else yaml.safe_dump(record))
    return None


def retype(path: Path, rng: random.Random, place: Path) -> bool | None:
    """A value of another type, a key that is missing or new."""

    def change(container: Any, key: Any) -> None:
        kind = rng.randrange(6)
        if kind == 0:
            del container[key]
        elif kind == 1 and isinstance(container, dict):
            container[rng.choice(("new", "", "a b", "__class__"))] = rng.choice(_TYPES)
        else:
            container[key] = rng.choice(_TYPES)

    return _edit(path, rng, change)


def enlarge(path: Path, rng: random.Random, place: Path) -> bool | None:
    """A number that is huge, negative, or none."""

    def change(container: Any, key: Any) -> None:
        value = container[key]
        if type(value).__name__ == "Tensor":
            container[key] = value * 0 + 3e38 if value.is_floating_point() else value * 0 - 1
        else:
            container[key] = rng.choice(_HUGE)

    return _edit(path, rng, change)


def undefined(path: Path, rng: random.Random, place: Path) -> bool | None:
    """NaN or infinity."""

    def change(container: Any, key: Any) -> None:
        value = container[key]
        if type(value).__name__ == "Tensor" and value.is_floating_point():
            container[key] = value * rng.choice(_ODD)
        else:
            container[key] = rng.choice(_ODD)

    return _edit(path, rng, change)


def trap(path: Path, rng: random.Random, place: Path) -> bool | None:
    """A text with a trap of Unicode or of shells as a value."""
    return _edit(path, rng, lambda container, key: container.__setitem__(key, rng.choice(_TRAPS)))


def climb(path: Path, rng: random.Random, place: Path) -> bool | None:
    """A path out of the folder as a value or as a key; in an archive, as the name of a member."""
    up = rng.choice(("../../precious/file", str(place / "precious" / "file"), "../../../etc/passwd", ".."))
    if zipfile.is_zipfile(path) or path.suffix in (".zip", ".pt"):
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(up, b"climbed")
            archive.writestr("archive/data.pkl", pickle.dumps({"model": {}}, 2))
        return None

    def change(container: Any, key: Any) -> None:
        if isinstance(container, dict) and rng.randrange(2):
            container[up] = container.pop(key)
        else:
            container[key] = up

    return _edit(path, rng, change)


def nest(path: Path, rng: random.Random, place: Path) -> bool | None:
    """100,000 brackets, or a YAML file that multiplies itself."""
    if path.suffix not in (".json", ".jsonl", ".yaml"):
        return False
    depth = rng.choice((500, 100_000))
    texts = ["[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth, '{"config": ' + "[" * depth]
    if path.suffix == ".yaml":
        laughs = [f"a{k}: &a{k} [{', '.join([f'*a{k - 1}'] * 9) if k else 'x'}]" for k in range(9)]
        texts += ["\n".join(laughs), "a: &a {b: *a}", "a: &a [*a]", "learner: &x sm\nseed: *y"]
    path.write_text(rng.choice(texts) + "\n")
    return None


def execute(path: Path, rng: random.Random, place: Path) -> None:
    """A file that makes a folder when it is unpickled, or its YAML tags are obeyed."""
    marker = place / MARKER
    if path.suffix == ".yaml":
        tags = ("python/object/apply:os.mkdir", "python/object/new:os.mkdir")
        path.write_text(f"learner: !!{rng.choice(tags)} ['{marker}']\n")
        return
    bad: Any = Runs(marker)
    if rng.randrange(2):
        bad = {"model": bad, "data": bad, "learner": bad, "labels": [0]}
    text = pickle.dumps(bad, rng.choice((0, 2, 4)))
    if path.suffix == ".pt" and rng.randrange(3):
        import torch

        torch.save(bad, path, _use_new_zipfile_serialization=bool(rng.randrange(2)))
        return
    if path.suffix in (".npz", ".npy"):
        import numpy as np

        np.savez(path, images=np.array([bad], object))
        return
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)


def bomb(path: Path, rng: random.Random, place: Path) -> bool | None:
    """Few bytes that unpack to gigabytes, or claim to."""
    packers = {".gz": lambda data: gzip.compress(data, 1), ".bz2": bz2.compress, ".zst": zstandard.compress}
    if pack := packers.get(path.suffix):
        fill = rng.choice((b" ", b"\0", b"word "))
        path.write_bytes(pack(fill * (_BLOCK // len(fill))) * _MEMBERS)
    elif path.suffix == ".png":
        side = rng.choice((9_500, 12_000, 60_000, 2**31 - 1))
        head = struct.pack(">IIBBBBB", side, side, 8, rng.choice((0, 2, 6)), 0, 0, 0)
        chunks = [(b"IHDR", head), (b"IDAT", zlib.compress(bytes(1 << 20))), (b"IEND", b"")]
        if rng.randrange(2):
            chunks.insert(1, (b"zTXt", b"a\0\0" + zlib.compress(bytes(1 << 27), 1)))
        packed = [struct.pack(">I", len(d)) + n + d + struct.pack(">I", zlib.crc32(n + d)) for n, d in chunks]
        path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(packed))
    elif path.suffix == ".pt":
        with zipfile.ZipFile(path) as whole:
            members = {info.filename: whole.read(info) for info in whole.infolist()}
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
            for name, data in members.items():
                archive.writestr(name, data)
            inner = next(name for name in members if name.endswith("data.pkl"))
            with archive.open(inner.replace("data.pkl", "data/999"), "w", force_zip64=True) as file:
                for _ in range(_MEMBERS):
                    file.write(bytes(_BLOCK))
    elif path.name.endswith("ubyte"):
        header = bytearray(path.read_bytes())
        header[4:8] = struct.pack(">I", rng.choice((2**32 - 1, 10**9)))
        path.write_bytes(header)
    else:
        return False
    return None


def reverse(path: Path, rng: random.Random, place: Path) -> None:
    """The other byte order, of words of 2, 4 or 8 bytes."""
    data, width = path.read_bytes(), rng.choice((2, 4, 8))
    words = [data[at : at + width] for at in range(0, len(data), width)]
    path.write_bytes(b"".join(word[::-1] for word in words))


def other(path: Path, rng: random.Random, place: Path) -> bool | None:
    """A sound checkpoint of another architecture, or of images in place of text."""
    if path.suffix != ".pt":
        return False
    import torch

    kind = rng.randrange(3)
    if kind:
        shutil.copyfile(place.parent / "sound" / OTHER_MODELS[kind - 1], path)
        return None
    buffer = io.BytesIO()
    torch.save(torch.nn.Linear(3, 2).state_dict(), buffer)
    path.write_bytes(buffer.getvalue())
    return None


WAYS: dict[str, Callable[[Path, random.Random, Path], bool | None]] = {
    "bits flipped": flip,
    "truncated": cut,
    "bytes added": grow,
    "block lost": blank,
    "file swapped": swap,
    "not a file": replace,
    "encoding": recode,
    "wrong type": retype,
    "huge number": enlarge,
    "NaN": undefined,
    "Unicode trap": trap,
    "path traversal": climb,
    "nesting": nest,
    "execution": execute,
    "bomb": bomb,
    "byte order": reverse,
    "other model": other,
}
DAMAGE = ("bits flipped", "truncated", "bytes added", "block lost", "file swapped", "byte order")
"""Ways that a check sum sees."""
OWN_SUMS = (".pt", ".gz", ".bz2", ".zst")
"""Files that hold their check sums, so that another sound file in their place is none the worse."""
