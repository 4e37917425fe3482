"""Wheel, source archive and Dockerfile, installed into fresh environments."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import time
import venv
from pathlib import Path

import pytest

import alma
from tests.test_layout import PACKAGES
from tests.test_readme_answer import README, block_of

ROOT = Path(__file__).resolve().parent.parent
PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"
MOST_BYTES = 300 << 20
MOST_SECONDS = 60
SHIPPED = {*PACKAGES, "experiments"} - {"benchmarks"}
TWO_LINES = """\
python3 -m venv light && light/bin/pip install --no-compile .
light/bin/alma advise --matrix accuracy.csv
"""


def copied(folder: Path) -> Path:
    """A copy of the checkout without what git ignores, as `COPY . .` takes it."""
    git = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(git, cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git repository")
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def environment_of(place: Path) -> dict[str, str]:
    """The environment of a shell in which the virtual environment is active."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return kept | {"PATH": f"{place / 'bin'}{os.pathsep}{os.environ['PATH']}"}


def run(words, place: Path, cwd: Path) -> str:
    """The output of a command in an environment. Skips the test if no package can be had."""
    done = subprocess.run(words, cwd=cwd, env=environment_of(place), capture_output=True, text=True)
    offline = "NewConnectionError|ConnectTimeout|Could not find a version|No matching distribution"
    if done.returncode and re.search(offline, done.stderr):
        pytest.skip(f"no package index can be reached: {done.stderr.splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    return done.stdout


def size_of(folder: Path) -> int:
    """Bytes on the disk of the files below a folder."""
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    return sum(path.stat().st_blocks * 512 for path in files)


def instructions(target: str) -> list[tuple[str, str]]:
    """Words and arguments of a target of the Dockerfile."""
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    of_target: dict[str, list[tuple[str, str]]] = {}
    name = ""
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        word, _, rest = line.partition(" ")
        if word == "FROM":
            name = rest.split(" AS ")[1]
            of_target[name] = []
        of_target[name].append((word, rest))
    return of_target[target]


def runs_of(target: str) -> list[str]:
    """The RUN lines of a target of the Dockerfile."""
    return [rest for word, rest in instructions(target) if word == "RUN"]


@pytest.mark.thorough
def test_two_lines_answer_within_a_minute_and_300_mb(tmp_path: Path) -> None:
    """Those of README.md in a copy of the checkout; then what the Dockerfile runs for its core."""
    source = copied(tmp_path / "source")
    rows = block_of(README.read_text("utf-8"), "accuracy.csv")
    (source / "accuracy.csv").write_text(rows)
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "python3").symlink_to(Path(sys.base_prefix, "bin", PYTHON))
    start = time.monotonic()
    answer = run(["sh", "-c", f"PATH={tools}:$PATH; {TWO_LINES}"], source / "light", source)
    seconds = time.monotonic() - start
    assert "Every month" in answer
    assert seconds < MOST_SECONDS
    place = source / "light"
    assert size_of(place) < MOST_BYTES
    listed = run([place / "bin/pip", "list", "--format=freeze"], place, tmp_path)
    names = {line.partition("==")[0].lower() for line in listed.splitlines()}
    assert f"alma-macroscale=={alma.__version__}" in listed
    assert not {"torch", "fairseq-fixed", "sentencepiece", "submitit"} & names
    for line in runs_of("core"):
        run(["sh", "-c", line], place, source)
    assert run([place / "bin/alma", "--version"], place, tmp_path) == f"alma {alma.__version__}\n"


@pytest.mark.thorough
def test_a_wheel_from_the_source_archive_holds_what_the_checkout_holds(tmp_path: Path) -> None:
    source = copied(tmp_path / "source")
    build = "from setuptools import build_meta as b; print(b.build_sdist('out'))"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True)
    (archive,) = (source / "out").glob("*.tar.gz")
    with tarfile.open(archive) as files:
        files.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    assert unpacked.name == f"alma_macroscale-{alma.__version__}"
    build = "from setuptools import build_meta as b; print(b.build_wheel('out'))"
    subprocess.run([sys.executable, "-c", build], cwd=unpacked, check=True, capture_output=True)
    (wheel,) = (unpacked / "out").glob("*.whl")
    place = tmp_path / "fresh"
    venv.create(place, with_pip=True)
    run([place / "bin/pip", "install", "--no-deps", "--no-index", wheel], place, tmp_path)
    (packages,) = place.glob("lib/python*/site-packages")
    needed = {"alma/py.typed", "fairseq_alma.pth", "fairseq_alma_hook.py"}
    for folder in SHIPPED:
        for path in (source / folder).rglob("*"):
            if path.suffix in {".py", ".yaml", ".csv", ".html", ".sh"}:
                needed.add(str(path.relative_to(source)))
    assert [name for name in sorted(needed) if not (packages / name).is_file()] == []
    assert not (packages / "tests").exists()
    run([place / "bin/python", "-c", "import alma, fairseq_alma_hook"], place, tmp_path)


def test_the_dockerfile_has_a_core_and_all() -> None:
    for target in ("core", "all"):
        words = [word for word, _ in instructions(target)]
        assert words[0] == "FROM"
        assert words.index("COPY") < words.index("RUN")
        assert ("ENTRYPOINT", '["alma"]') in instructions(target)
    (installs,) = runs_of("core")
    assert shlex.split(installs)[:4] == ["python", "-m", "pip", "install"]
    (makes,) = runs_of("all")
    make = [*shlex.split(makes), "--dry-run", "--silent", "PYTHON=python3"]
    done = subprocess.run(make, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert {".git", ".venv*", "*_out"} <= set(ignored)
