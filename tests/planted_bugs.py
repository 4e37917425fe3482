"""Plant one bug at a time in a copy of the code, and run the test files that should find it.

    python tests/planted_bugs.py               # all bugs; about a minute each
    python tests/planted_bugs.py --only switch  # those whose name contains a word

A bug is found if a test fails. `tests/test_planted_bugs.py` checks that every bug can still be planted.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import yaml

ROOT = Path(__file__).resolve().parents[1]
_SECONDS = 900


class Bug(NamedTuple):
    """A change of one place in a file of the product."""

    name: str
    path: str
    right: str  # occurs once in the file
    wrong: str
    tests: str  # files below tests/, separated by spaces


BUGS = [Bug(**each) for each in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())]


def plant(bug: Bug, tree: Path) -> str:
    """Plant a bug in the tree; returns the file's text before. ValueError: the place is not there once."""
    file = tree / bug.path
    text = file.read_text()
    if text.count(bug.right) != 1:
        raise ValueError(f"{bug.name}: {bug.path} has {text.count(bug.right)} times: {bug.right}")
    file.write_text(text.replace(bug.right, bug.wrong))
    return text


def find(bug: Bug, tree: Path) -> str:
    """The first test that fails with the bug; "": it survives."""
    before = plant(bug, tree)
    command = [sys.executable, *"-m pytest -x -q -p no:cacheprovider -m".split(), "not slow and not gpu"]
    command += [f"tests/{name}" for name in bug.tests.split()]
    environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    options = {"cwd": tree, "env": environment, "capture_output": True, "text": True, "timeout": _SECONDS}
    try:
        done = subprocess.run(command, **options)
    except subprocess.TimeoutExpired:
        return f"no end within {_SECONDS} s"
    finally:
        (tree / bug.path).write_text(before)
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    unclear = f"pytest: exit code {done.returncode}" if done.returncode not in (0, 1) else ""
    return failed[0].split(" - ")[0] if failed else unclear


def copy_tree(target: Path) -> None:
    """Copy the tracked and new files of the checkout."""
    git = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(lambda name: (ROOT / name).is_file(), names.splitlines()):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target / name)


def main() -> None:
    """Print a line for each bug, and exit with code 1 if one survives."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", default="", metavar="WORD", help="bugs whose name contains WORD")
    only = parser.parse_args().only
    chosen, survivors = [bug for bug in BUGS if only in bug.name], 0
    with tempfile.TemporaryDirectory() as tree:
        copy_tree(Path(tree))
        for bug in chosen:
            started = time.monotonic()
            test = find(bug, Path(tree))
            survivors += not test
            print(f"{time.monotonic() - started:5.0f} s  {bug.name}: {test or 'SURVIVES'}", flush=True)
    print(f"{len(chosen) - survivors} of {len(chosen)} planted bugs found")
    sys.exit(bool(survivors))


if __name__ == "__main__":
    main()
