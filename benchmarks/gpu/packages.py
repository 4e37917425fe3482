"""Packages for a GPU machine without a network: a folder of wheels, and the step `setup`, which
installs it.

The machine has Linux on x86-64, Python 3.12, torch and the usual packages of machine learning; the
folder has what ALMA needs besides. fairscale and antlr4 come as sources without extensions and are
built here. `setup` runs with the machine's Python before anything is installed, so this file
imports no package.
"""

import re
import shutil
import subprocess
import sys
import sysconfig
from functools import partial
from pathlib import Path
from typing import Any

from alma.errors import UserError
from alma.files import make_directory
from benchmarks.gpu.process import ROOT, Cases, Row

PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
TARGET = [
    "--python-version=3.12",
    "--implementation=cp",
    *(f"--platform={name}" for name in PLATFORMS),
]
CARRIED = 64 << 20
"""Bytes that may be carried to the machine: the wheels and the working tree."""
SOURCES = ("fairscale", "antlr4-python3-runtime")
MISSING = (
    *SOURCES,
    *("fairseq-fixed", "hydra-core", "omegaconf", "bitarray", "cffi", "pycparser", "submitit"),
    *("orjson", "zstandard", "tensorboardx", "msgspec", "rensa"),
)
"""Packages that the machine lacks; tests compare them with what ALMA requires."""

LOOK = """
import torch, fairseq_cli.train, fairseq.data.data_utils_fast, fairseq.data.token_block_utils_fast
from fairseq.models import ARCH_MODEL_REGISTRY
assert "switch_gmoe" in ARCH_MODEL_REGISTRY, "the environment has no fairseq_alma.pth"
gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
print("torch", torch.__version__, "CUDA", torch.version.cuda, *gpus, torch.__file__)
"""


def carry(folder: Path | None) -> None:
    """Build, download, and print what there is to carry. UserError: no folder, or it is too
    large."""
    if not folder:
        raise UserError("wheels needs --wheels FOLDER, where they go")
    make_directory(folder)
    for path in folder.glob("*.whl"):  # of another day
        path.unlink()
    pinned = pins((ROOT / "requirements.txt").read_text())
    sources = [pin for pin in pinned if pin.startswith(SOURCES)]
    build = ["wheel", "--no-deps", "--no-build-isolation", f"--wheel-dir={folder}", *sources]
    download = ["download", "--no-deps", "--only-binary=:all:", *TARGET, f"--dest={folder}"]
    for words in (build, download + [pin for pin in pinned if pin not in sources]):
        pip = [sys.executable, "-m", "pip", *words, "--quiet"]
        if subprocess.run(pip, check=False).returncode:
            raise UserError(f"pip {words[0]} failed; is there a network?")
    listed = [
        "git",
        "-C",
        str(ROOT),
        "ls-files",
        "--cached",
        "--others",
        "--exclude-standard",
        "-z",
    ]
    names = subprocess.run(listed, capture_output=True, text=True, check=True).stdout.split("\0")
    tree = sum(path.stat().st_size for path in map(ROOT.joinpath, names) if path.is_file())
    size = sum(path.stat().st_size for path in folder.glob("*.whl"))
    sizes = (
        f"{size / 1e6:.0f} MB of wheels and {tree / 1e6:.0f} MB of files, of {CARRIED / 1e6:.0f} MB"
    )
    if size + tree > CARRIED:
        raise UserError(f"{sizes} that can be carried")
    print(f"{folder}: {sizes} that can be carried")


def pins(text: str) -> list[str]:
    """`name==version` of each package in MISSING, from requirements.txt. UserError: one has no
    pin."""
    matches = (re.match(r"([\w.-]+)==([\w.]+)", line) for line in text.splitlines())
    pinned = {match[1]: match[2] for match in matches if match}
    absent = [name for name in MISSING if name not in pinned]
    if absent:
        raise UserError(f"requirements.txt has no {', '.join(absent)}: `make pin` renews it")
    return [f"{name}=={pinned[name]}" for name in MISSING]


def setup(args: Any) -> Cases:
    """Make the environment and install each wheel, if there are some; import."""
    python = str(args.environment / "bin/python") if args.wheels else sys.executable
    if args.wheels:
        yield {"what": "environment"}, partial(make, args.environment)
        yield (
            {"what": "wheels"},
            partial(install, args.environment, sorted(args.wheels.glob("*.whl"))),
        )
    yield {"what": "import"}, lambda: {"printed": do([python, "-W", "ignore", "-c", LOOK])}


def make(environment: Path) -> Row:
    """An environment without pip: the machine may lack ensurepip, and its own pip can install
    elsewhere."""
    shutil.rmtree(environment, ignore_errors=True)
    do([sys.executable, "-m", "venv", "--without-pip", str(environment)])
    machine = dict.fromkeys(sysconfig.get_path(kind) for kind in ("purelib", "platlib"))
    (inside,) = environment.glob("lib/python*/site-packages")
    lines = "".join(f"import site; site.addsitedir({folder!r})\n" for folder in machine)
    (inside / "machine.pth").write_text(f"{lines}{ROOT}\n")
    shutil.copy(ROOT / "fairseq_alma.pth", inside / "plugin.pth")  # read after machine.pth
    return {}


def install(environment: Path, wheels: list[Path]) -> Row:
    """All wheels at once; if one is damaged, all others. UserError names it."""
    (inside,) = environment.glob("lib/python*/site-packages")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-index",
        "--no-deps",
        "--no-compile",
    ]
    pip += ["--no-cache-dir", "--upgrade", "--target", str(inside)]
    damaged: dict[str, str] = {}
    try:
        do([*pip, *map(str, wheels)])
    except UserError:
        for wheel in wheels:
            try:
                do([*pip, str(wheel)])
            except UserError as error:
                damaged[wheel.name] = str(error)[-100:]
    if damaged:
        raise UserError("; ".join(f"{name}: {why}" for name, why in damaged.items()))
    return {"wheels": len(wheels)}


def do(words: list[str]) -> str:
    """The last line that a command printed. UserError: it failed."""
    ended = subprocess.run(words, check=False, capture_output=True, text=True)
    if ended.returncode:
        raise UserError(
            f"exit code {ended.returncode}: {(ended.stderr or ended.stdout).strip()[-250:]}"
        )
    return (ended.stdout.splitlines() or [""])[-1]
