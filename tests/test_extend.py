"""docs/extend.md: pasted into a checkout as the page says, its code and commands do what it promises."""

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CODE = ("alma", "data_prep", "fairseq_alma", "slurm", "vision")
BLOCK = re.compile(r"^```(python|bash)\n(.*?)^```", re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def pasted(tmp_path_factory):
    """A copy of the code with the blocks of the page pasted, and the output of each of its commands."""
    place = tmp_path_factory.mktemp("checkout")
    for name in CODE:
        shutil.copytree(ROOT / name, place / name, ignore=shutil.ignore_patterns("__pycache__"))
    blocks = BLOCK.findall((ROOT / "docs/extend.md").read_text("utf-8"))
    for text in (text for kind, text in blocks if kind == "python"):
        with open(place / text.split()[1], "a") as file:  # after "#"
            file.write(f"\n\n{text}")
    folder = place / "bin"  # with `alma` of the copy
    folder.mkdir()
    (folder / "alma").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m alma "$@"\n')
    (folder / "alma").chmod(0o755)
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "PYTHONPATH": str(place), "OMP_NUM_THREADS": "1"}
    output = {}
    for line in "".join(text for kind, text in blocks if kind == "bash").splitlines():
        done = subprocess.run(line, shell=True, cwd=place, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, (line, done.stderr)
        output[" ".join(line.split()[:2])] = done.stdout + done.stderr
    return place, output


def values(place, name):
    (run,) = (place / "runs/restart").glob(f"{name}*")
    return [json.loads(line)["value"] for line in (run / "results.jsonl").read_text().splitlines()]


def test_a_learner_of_images(pasted):
    """It restarts every second stage: equal to SM before the first restart, and no worse than untrained."""
    place, _ = pasted
    restart, sm = values(place, "restart"), values(place, "sm")
    assert restart[:2] == sm[:2]
    assert restart[3:] != sm[3:]
    assert max(restart[1:]) < restart[0]
    (run,) = (place / "runs/restart").glob("restart*")
    assert json.loads((run / "run.json").read_text())["config"]["restart_every"] == 2


def test_a_corpus_format(pasted):
    place, output = pasted
    stream = json.loads((place / "code/stream.json").read_text())
    assert len(stream["megabatches"]) == 3
    files = len(list(place.glob("*/*.py")))
    assert f"{files} documents" in output["alma data"]


def test_a_learner_of_language_models(pasted):
    assert re.search(r"recent .* 4@2 ", pasted[1]["alma train"])


def test_a_measure_in_the_report(pasted):
    place, output = pasted
    assert "median" in output["alma report"]
    for name in ("restart", "sm"):
        assert f"{100 * statistics.median(values(place, name)[1:]):.2f}" in output["alma report"]
