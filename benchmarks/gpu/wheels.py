"""Make a folder of wheels for a GPU machine without a network: `python -m benchmarks.gpu.wheels FOLDER`.

The machine has Linux on x86-64, Python 3.12, torch and the usual packages of machine learning; the folder has
what ALMA needs besides. fairscale and antlr4 come as sources without extensions and are built here.
"""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from alma.errors import Parser, UserError, command
from alma.files import make_directory

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
REQUIREMENTS = Path(__file__).parents[2] / "requirements.txt"


def pins(text: str) -> list[str]:
    """`name==version` of each package in MISSING. UserError: requirements.txt pins another set of packages."""
    pinned = dict(line.split(";")[0].strip().split("==") for line in text.splitlines() if "==" in line)
    if absent := [name for name in MISSING if name not in pinned]:
        raise UserError(f"requirements.txt has no {', '.join(absent)}: `make pin` renews it")
    return [f"{name}=={pinned[name]}" for name in MISSING]


def wheels_of(folder: Path) -> list[Path]:
    """The wheels in a folder. UserError: one of MISSING is not there, or they take more than LARGEST bytes."""
    found = sorted(folder.glob("*.whl"))
    names = {path.name.split("-")[0].lower().replace("_", "-") for path in found}
    if absent := sorted(set(MISSING) - names):
        raise UserError(f"{folder} has no wheel of {', '.join(absent)}: make it with benchmarks.gpu.wheels")
    if (size := sum(path.stat().st_size for path in found)) > LARGEST:
        raise UserError(f"{folder}: {size / 1e6:.0f} MB of wheels; {LARGEST / 1e6:.0f} MB can be carried")
    return found


def pip(*words: str) -> None:
    """UserError: pip failed."""
    if subprocess.run([sys.executable, "-m", "pip", *words]).returncode:
        raise UserError(f"pip {words[0]} failed; its messages are above")


def make(folder: Path, pinned: Sequence[str]) -> None:
    """Download or build a wheel of each `name==version`."""
    sources = [pin for pin in pinned if pin.startswith(SOURCES)]
    pip("wheel", "--no-deps", "--no-build-isolation", f"--wheel-dir={folder}", *sources)
    others = [pin for pin in pinned if pin not in sources]
    pip("download", "--no-deps", "--only-binary=:all:", *TARGET, f"--dest={folder}", *others)


@command
def main() -> None:
    """Make the folder."""
    parser = Parser(prog="python -m benchmarks.gpu.wheels", description=__doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="where the wheels go, such as .wheels")
    folder = parser.parse_args().folder
    make_directory(folder)
    make(folder, pins(REQUIREMENTS.read_text()))
    found = wheels_of(folder)
    print(f"{folder}: {len(found)} wheels, {sum(path.stat().st_size for path in found) / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
