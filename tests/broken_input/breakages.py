"""Ways to break a file: functions (path, rng, place) that rewrite it, or return False if they do not apply to
it; `place` is the folder of the case."""

import bz2
import gzip
import io
import json
import math
import os
import pickle
import shutil
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import yaml
import zstandard

from tests.broken_input.judge import MARKER

Way = Callable[[Path, Random, Path], bool | None]
_TRAPS = (
    *("\u202etxt.exe", "a\u0000b", "\u200b\u200d\ufeff", "e\u0301" * 50, "\u2028\u2029\x85", "\x1b[2J\x07"),
    *("\ud83d\ude00", "İıß\u01c6", "-rf", "$(touch executed)", "%s%n{0}{x!r}", "../" * 9, "=", "", "\ud800"),
)
_TYPES: tuple[Any, ...] = (None, True, "text", -7, 1.5, [], {}, [[1], "x"], {"a": {"b": 1}}, "")
_HUGE = (10**400, 2**63, -(2**63) - 1, 2**31, 1e308, -1, 0, 10**9)
_MISSING = object()
_BLOCK, _MEMBERS = 1 << 24, 40  # of a bomb: 640 MiB, more than a child may hold

OTHER_MODELS = ("dense/checkpoint_last.pt", "runs/digits/checkpoint.pt")
"""Of the sound inputs: without experts, and of images."""
OWN_SUMS = (".pt", ".gz", ".bz2", ".zst")
"""Files that hold their check sums, so that another sound file in their place is none the worse."""


def _of_bytes(change: Callable[[bytes, Random], bytes | None]) -> Way:
    """A way to break any file that is not empty; None: it does not apply."""

    def way(path: Path, rng: Random, place: Path) -> bool | None:
        data = path.read_bytes()
        changed = change(data, rng) if data else None
        if changed is None:
            return False
        path.write_bytes(changed)
        return None

    return way


def _flip(data: bytes, rng: Random) -> bytes:
    """One to eight bits."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8))):
        changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return changed


def _cut(data: bytes, rng: Random) -> bytes:
    """The end is missing: a part, a byte, or all."""
    return data[: rng.choice((0, 1, len(data) - 1, rng.randrange(len(data))))]


def _grow(data: bytes, rng: Random) -> bytes:
    """More bytes at the end or the beginning: random ones, or the file once more."""
    more = rng.choice((data, rng.randbytes(rng.randint(1, 999)), b"\n", bytes(512)))
    return rng.choice((data + more, more + data))


def _blank(data: bytes, rng: Random) -> bytes:
    """A block of zeros, or of noise, as a failing disk leaves it."""
    start, size = rng.randrange(len(data)), rng.choice((16, 512, 4096))
    block = rng.choice((bytes(size), rng.randbytes(size)))[: len(data) - start]
    return data[:start] + block + data[start + len(block) :]


def _reverse(data: bytes, rng: Random) -> bytes:
    """The other byte order, of words of 2, 4 or 8 bytes."""
    width = rng.choice((2, 4, 8))
    return b"".join(data[at : at + width][::-1] for at in range(0, len(data), width))


def _recode(data: bytes, rng: Random) -> bytes | None:
    """Text in another encoding, with another kind of line ends, or with a trap of Unicode in it."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return None
    at = rng.randrange(len(text) + 1)
    return rng.choice(
        (
            text.encode("utf-16"),
            b"\xef\xbb\xbf" + data,
            data.replace(b"\n", b"\r\n"),
            data.replace(b"\n", b"\r"),
            (text[:at] + rng.choice(_TRAPS) + text[at:]).encode("utf-8", "surrogatepass"),
            text[:at].encode() + rng.choice((b"\xed\xa0\x80", b"\xff\xfe", b"\xc3")) + text[at:].encode(),
        )
    )


def _of_values(draw: Callable[[Any, Random, Path], Any]) -> Way:
    """A way to change one value of a JSON, JSON lines, YAML or torch file, or its name in a mapping."""

    def way(path: Path, rng: Random, place: Path) -> bool | None:
        if path.suffix not in (".pt", ".yaml", ".json", ".jsonl"):
            return False
        try:
            lines, number = [""], 0
            if path.suffix == ".pt":
                import torch

                record = torch.load(path, weights_only=True)
            elif path.suffix == ".yaml":
                record = yaml.safe_load(path.read_text("utf-8"))
            else:
                text = path.read_text("utf-8")
                lines = text.splitlines() if path.suffix == ".jsonl" else [text]
                number = rng.randrange(len(lines))
                record = json.loads(lines[number])
        except (ValueError, OSError):
            return False
        if not (places := _places(record)):
            return False
        container, key = rng.choice(places)
        new = draw(container[key], rng, place)
        if new is _MISSING:
            del container[key]
        elif isinstance(container, dict) and isinstance(new, str) and rng.randrange(2):
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

    return way


def _places(value: Any) -> list[tuple[Any, Any]]:
    """All (container, key) in nested lists and mappings."""
    if isinstance(value, tuple):
        return [place for each in value for place in _places(each)]
    keys = list(value) if isinstance(value, dict) else range(len(value) if isinstance(value, list) else 0)
    return [place for key in keys for place in [(value, key), *_places(value[key])]]


def _retype(value: Any, rng: Random, place: Path) -> Any:
    """A value of another type, or none; another name."""
    return rng.choice((*_TYPES, _MISSING, _MISSING, "new", "a b", "__class__"))


def _number(value: Any, drawn: Any, filled: float) -> Any:
    """`drawn` in place of a value; a tensor is `filled`, or with -1 if it holds whole numbers."""
    if type(value).__name__ != "Tensor":
        return drawn
    return value * 0 + filled if value.is_floating_point() else value * 0 - 1


def _enlarge(value: Any, rng: Random, place: Path) -> Any:
    """A number that is huge, negative, or none."""
    return _number(value, rng.choice(_HUGE), 3e38)


def _undefine(value: Any, rng: Random, place: Path) -> Any:
    """NaN or infinity."""
    odd = rng.choice((math.nan, math.inf, -math.inf))
    return _number(value, odd, odd)


def _trap(value: Any, rng: Random, place: Path) -> str:
    """A text with a trap of Unicode or of shells."""
    return rng.choice(_TRAPS)


def _climb(value: Any, rng: Random, place: Path) -> str:
    """A path out of the folder."""
    return rng.choice(("../../precious/file", str(place / "precious" / "file"), "../../../etc/passwd", ".."))


def climb(path: Path, rng: Random, place: Path) -> bool | None:
    """A path out of the folder as a value or as a key; in an archive, as the name of a member."""
    if not zipfile.is_zipfile(path):
        return _of_values(_climb)(path, rng, place)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(_climb(None, rng, place), b"climbed")
        archive.writestr("archive/data.pkl", pickle.dumps({"model": {}}, 2))
    return None


def swap(path: Path, rng: Random, place: Path) -> None:
    """Another file of the inputs in its place."""
    others = [each for each in sorted((place / "work").rglob("*")) if each.is_file() and each != path]
    path.write_bytes(rng.choice(others).read_bytes() if others else rng.randbytes(100))


def replace(path: Path, rng: Random, place: Path) -> None:
    """No file, a folder, a link to itself, a link to nothing."""
    path.unlink()
    kind = rng.randrange(4)
    if kind == 1:
        path.mkdir()
    elif kind:
        path.symlink_to(path.name if kind == 2 else "nowhere")


def nest(path: Path, rng: Random, place: Path) -> bool | None:
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


class MakesFolder:
    """A pickle of it makes a folder when it is loaded."""

    def __init__(self, marker: Path) -> None:
        self.marker = str(marker)

    def __reduce__(self) -> tuple[Callable, tuple[str]]:
        return os.mkdir, (self.marker,)


def execute(path: Path, rng: Random, place: Path) -> None:
    """A file that makes a folder when it is unpickled, or its YAML tags are obeyed."""
    marker = place / MARKER
    if path.suffix == ".yaml":
        tags = ("python/object/apply:os.mkdir", "python/object/new:os.mkdir")
        path.write_text(f"learner: !!{rng.choice(tags)} ['{marker}']\n")
        return
    bad: Any = MakesFolder(marker)
    if rng.randrange(2):
        bad = {"model": bad, "data": bad, "learner": bad, "labels": [0]}
    if path.suffix == ".pt" and rng.randrange(3):
        import torch

        torch.save(bad, path, _use_new_zipfile_serialization=bool(rng.randrange(2)))
        return
    text = pickle.dumps(bad, rng.choice((0, 2, 4)))
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)


def bomb(path: Path, rng: Random, place: Path) -> bool | None:
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
            inner = next(name for name in whole.namelist() if name.endswith("data.pkl"))
        more = inner.replace("data.pkl", "data/999")
        archive = zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED, compresslevel=1)
        with archive, archive.open(more, "w", force_zip64=True) as file:
            for _ in range(_MEMBERS):
                file.write(bytes(_BLOCK))
    elif path.name.endswith("ubyte"):
        data = path.read_bytes()
        path.write_bytes(data[:4] + struct.pack(">I", rng.choice((2**32 - 1, 10**9))) + data[8:])
    else:
        return False
    return None


def other(path: Path, rng: Random, place: Path) -> bool | None:
    """A sound checkpoint of another architecture, or of images in place of text."""
    if path.suffix != ".pt":
        return False
    if kind := rng.randrange(3):
        shutil.copyfile(place.parent / "sound" / OTHER_MODELS[kind - 1], path)
        return None
    import torch

    buffer = io.BytesIO()
    torch.save(torch.nn.Linear(3, 2).state_dict(), buffer)
    path.write_bytes(buffer.getvalue())
    return None


DAMAGE: dict[str, Way] = {
    "bits flipped": _of_bytes(_flip),
    "truncated": _of_bytes(_cut),
    "bytes added": _of_bytes(_grow),
    "block lost": _of_bytes(_blank),
    "file swapped": swap,
    "byte order": _of_bytes(_reverse),
}
"""Ways that a check sum sees."""
WAYS = DAMAGE | {
    "not a file": replace,
    "encoding": _of_bytes(_recode),
    "wrong type": _of_values(_retype),
    "huge number": _of_values(_enlarge),
    "NaN": _of_values(_undefine),
    "Unicode trap": _of_values(_trap),
    "path traversal": climb,
    "nesting": nest,
    "execution": execute,
    "bomb": bomb,
    "other model": other,
}
