"""Kinds of damage to a file: functions (draw, path, place) that rewrite it, or return False if they
do not apply to it. `draw` is Hypothesis's, `place` the folder of the case."""

import bz2
import gzip
import json
import math
import os
import pickle
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
OWN_SUMS = (".pt", ".gz", ".bz2", ".zst")
"""Files that hold their check sums, so that another sound file in their place is none the worse."""
_TRAPS = (
    *(
        "\u202etxt.exe",
        "a\u0000b",
        "\u200b\u200d\ufeff",
        "e\u0301" * 50,
        "\u2028\u2029\x85",
        "\x1b[2J\x07",
    ),
    *(
        "\ud83d\ude00",
        "İıß\u01c6",
        "-rf",
        "$(touch executed)",
        "%s%n{0}{x!r}",
        "../" * 9,
        "=",
        "",
        "\ud800",
    ),
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
    addition = draw(st.sampled_from((data, b"\n", bytes(512))) | st.binary(min_size=1, max_size=99))
    return data + addition if draw(st.booleans()) else addition + data


def _recode(draw: Draw, data: bytes) -> bytes | None:
    """Text in another encoding, with other line ends, or with a trap of Unicode in it."""
    at = draw(st.integers(0, len(data)))
    traps = [*(trap.encode("utf-8", "surrogatepass") for trap in _TRAPS), b"\xff\xfe", b"\xc3"]
    changed = [data[:at] + draw(st.sampled_from(traps)) + data[at:], data.replace(b"\n", b"\r\n")]
    return draw(st.sampled_from([*changed, b"\xef\xbb\xbf" + data]))


def swap(draw: Draw, path: Path, place: Path) -> None:
    """Another file of the inputs in its place."""
    files = [
        file for file in sorted((place / "work").rglob("*")) if file.is_file() and file != path
    ]
    path.write_bytes(draw(st.sampled_from(files)).read_bytes() if files else b"other")


def replace(draw: Draw, path: Path, place: Path) -> None:
    """No file, a folder, a link to itself, a link to nothing."""
    path.unlink()
    kind = draw(st.integers(0, 3))
    if kind == 1:
        path.mkdir()
    elif kind:
        path.symlink_to(path.name if kind == 2 else "nowhere")


def change_value(draw: Draw, path: Path, place: Path) -> bool | None:
    """Another value of a JSON, JSON lines or YAML file, or another name in a mapping."""
    if path.suffix not in (".json", ".jsonl", ".yaml"):
        return False
    text = path.read_text("utf-8")
    is_yaml = path.suffix == ".yaml"
    lines = text.splitlines() if path.suffix == ".jsonl" else [text]
    number = draw(st.integers(0, len(lines) - 1))
    record = yaml.safe_load(text) if is_yaml else json.loads(lines[number])
    if not (places := _places(record)):
        return False
    container, key = places[draw(st.integers(0, len(places) - 1))]
    new = draw(_VALUES)
    if new is _MISSING:
        del container[key]
    elif isinstance(container, dict) and isinstance(new, str) and draw(st.booleans()):
        container[new] = container.pop(key)
    else:
        container[key] = new
    lines[number] = yaml.safe_dump(record) if is_yaml else json.dumps(record)
    path.write_text("\n".join([*lines, ""]))
    return None


def _places(value: Any) -> list[tuple[Any, Any]]:
    """All (container, key) in nested lists and mappings."""
    keys: list[Any] = []
    if isinstance(value, dict):
        keys = list(value)
    elif isinstance(value, list):
        keys = list(range(len(value)))
    return [place for key in keys for place in [(value, key), *_places(value[key])]]


def nest(draw: Draw, path: Path, place: Path) -> bool | None:
    """100,000 brackets, or a YAML file that multiplies itself."""
    if path.suffix not in (".json", ".jsonl", ".yaml"):
        return False
    depth = draw(st.sampled_from((500, 100_000)))
    texts = [
        "[" * depth + "]" * depth,
        '{"a":' * depth + "1" + "}" * depth,
        '{"config": ' + "[" * depth,
    ]
    if path.suffix == ".yaml":
        laughs = [f"a{k}: &a{k} [{', '.join([f'*a{k - 1}'] * 9) if k else 'x'}]" for k in range(9)]
        texts += ["\n".join(laughs), "a: &a {b: *a}", "learner: &x sm\nseed: *y"]
    path.write_text(texts[draw(st.integers(0, len(texts) - 1))] + "\n")
    return None


def execute(draw: Draw, path: Path, place: Path) -> None:
    """A file that makes a folder when it is unpickled, or its YAML tags are obeyed."""

    class MakesFolder:
        def __reduce__(self) -> tuple[Callable, tuple[str]]:
            return os.mkdir, (str(place / MARKER),)

    if path.suffix == ".yaml":
        path.write_text(f"learner: !!python/object/apply:os.mkdir ['{place / MARKER}']\n")
    elif path.suffix == ".pt":
        import torch

        torch.save(
            {"model": MakesFolder()}, path, _use_new_zipfile_serialization=draw(st.booleans())
        )
    else:
        path.write_bytes(pickle.dumps(MakesFolder(), draw(st.sampled_from((0, 2, 4)))))


def bomb(draw: Draw, path: Path, place: Path) -> bool | None:
    """Few bytes that unpack to gigabytes."""
    packers = {
        ".gz": lambda data: gzip.compress(data, 1),
        ".bz2": bz2.compress,
        ".zst": zstandard.compress,
    }
    if path.suffix not in packers:
        return False
    path.write_bytes(
        packers[path.suffix](draw(st.sampled_from((b" ", b"\0", b"word "))) * (1 << 22)) * 160
    )
    return None


SEEN_BY_SUMS: dict[str, Damage] = {
    "bits flipped": _of_bytes(_flip),
    "truncated": _of_bytes(_cut),
    "bytes added": _of_bytes(_grow),
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
}
