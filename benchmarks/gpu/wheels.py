"""Step `wheels`, here: a folder of wheels for a GPU machine without a network.

The machine has Linux on x86-64, Python 3.12, torch and the usual packages of machine learning; the folder has
what ALMA needs besides. fairscale and antlr4 come as sources without extensions and are built here.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from alma.errors import UserError
from alma.files import make_directory
from benchmarks.gpu.frame import ROOT, Asked, Case, Row

PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
TARGET = ["--python-version=3.12", "--implementation=cp", *(f"--platform={name}" for name in PLATFORMS)]
LARGEST = 60_000_000
"""Bytes of the folder: what may be carried to the machine is 64 MiB, the repository included."""
SOURCES = ("fairscale", "antlr4-python3-runtime")
MISSING = (
    *SOURCES,
    *("fairseq-fixed", "hydra-core", "omegaconf", "bitarray", "cffi", "pycparser", "submitit", "plotly"),
    *("argcomplete", "orjson", "zstandard", "tensorboardx", "schedulefree", "rensa"),
)
"""Packages that the machine lacks; tests compare them with what ALMA requires."""


def cases(asked: Asked) -> Iterator[Case]:
    """Build, download, look. UserError: no folder is given."""
    if not (folder := asked.wheels):
        raise UserError("wheels needs --wheels FOLDER, where they go")
    make_directory(folder)
    pinned = pins((ROOT / "requirements.txt").read_text())
    sources = [pin for pin in pinned if pin.startswith(SOURCES)]
    others = [pin for pin in pinned if pin not in sources]
    build = ["wheel", "--no-deps", "--no-build-isolation", f"--wheel-dir={folder}", *sources]
    download = ["download", "--no-deps", "--only-binary=:all:", *TARGET, f"--dest={folder}", *others]
    for words in (build, download):
        yield {"what": f"pip {words[0]}"}, partial(do, [sys.executable, "-m", "pip", *words])
    yield {"what": "folder"}, lambda: {"MB": sum(path.stat().st_size for path in wheels_of(folder)) / 1e6}


def pins(text: str) -> list[str]:
    """`name==version` of each package in MISSING, from requirements.txt. UserError: one has no pin."""
    pinned = dict(line.split(";")[0].strip().split("==") for line in text.splitlines() if "==" in line)
    if absent := [name for name in MISSING if name not in pinned]:
        raise UserError(f"requirements.txt has no {', '.join(absent)}: `make pin` renews it")
    return [f"{name}=={pinned[name]}" for name in MISSING]


def wheels_of(folder: Path) -> list[Path]:
    """One wheel of each in MISSING. UserError: a folder with others, or with more than LARGEST bytes."""
    found = sorted(folder.glob("*.whl"))
    names = [path.name.split("-")[0].lower().replace("_", "-") for path in found]
    if wrong := sorted({name for name in (*MISSING, *names) if names.count(name) != 1}):
        raise UserError(f"{folder} has no wheel, or several, of {', '.join(wrong)}: make the folder anew")
    if (size := sum(path.stat().st_size for path in found)) > LARGEST:
        raise UserError(f"{folder}: {size / 1e6:.0f} MB of wheels; {LARGEST / 1e6:.0f} MB can be carried")
    return found


def do(words: list[str]) -> Row:
    """The seconds of a command, and the last line that it printed. UserError: it failed."""
    began = time.monotonic()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ended = subprocess.run(words, capture_output=True, text=True, env=environment)
    if ended.returncode:
        raise UserError(f"{' '.join(words[:6])}: {(ended.stderr or ended.stdout).strip()[-250:]}")
    return {"seconds": time.monotonic() - began, "said": (ended.stdout.splitlines() or [""])[-1]}
