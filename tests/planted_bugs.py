"""Plant one bug at a time in a copy of the code, and run the test files that should find it.

    python tests/planted_bugs.py               # all bugs; about a minute each
    python tests/planted_bugs.py --only switch  # those whose name contains a word

A bug is found if a test fails. `tests/test_planted_bugs.py` checks that every bug can still be planted.
"""

import argparse
import concurrent.futures
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


def find(bug: Bug, tree: Path) -> tuple[str, float]:
    """The first test that fails with the bug ("": it survives) and the seconds it took."""
    before, started = plant(bug, tree), time.monotonic()
    environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    tests = [f"tests/{name}" for name in bug.tests.split()]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    command += ["-m", "not slow and not gpu", *tests]
    try:
        done = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, timeout=_SECONDS
        )
        lines = done.stdout.splitlines()
        failed = [line.split(" - ")[0] for line in lines if line.startswith(("FAILED", "ERROR"))]
        if done.returncode not in (0, 1):
            failed = failed or [f"pytest: exit code {done.returncode}"]
    except subprocess.TimeoutExpired:
        failed = [f"no end within {_SECONDS} s"]
    finally:
        (tree / bug.path).write_text(before)
    return (failed[0] if failed else ""), time.monotonic() - started


def copy_tree(target: Path) -> Path:
    """The tracked and new files of the checkout."""
    git = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in listed.splitlines():
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    return target


def main() -> None:
    """Print a line for each bug, and exit with code 1 if one survives."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    made.add_argument("--only", default="", metavar="WORD", help="bugs whose name contains WORD")
    made.add_argument("--jobs", type=int, default=1, metavar="N", help="bugs at the same time (default: 1)")
    options = made.parse_args()
    chosen = [bug for bug in BUGS if options.only in bug.name]
    survivors = []
    with tempfile.TemporaryDirectory() as scratch:
        trees = [copy_tree(Path(scratch, str(k))) for k in range(options.jobs)]

        def try_next(bug: Bug) -> tuple[Bug, str, float]:
            tree = trees.pop()
            try:
                return bug, *find(bug, tree)
            finally:
                trees.append(tree)

        with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
            for bug, test, seconds in pool.map(try_next, chosen):
                survivors += [] if test else [bug.name]
                print(f"{seconds:5.0f} s  {bug.name}: {test or 'SURVIVES'}", flush=True)
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} planted bugs found")
    sys.exit(bool(survivors))


if __name__ == "__main__":
    main()
