"""docs/extend.md and extend_more.md: pasted as they say,
their code and commands do what they promise."""

import ast
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.thorough
ROOT = Path(__file__).parents[1]
CODE = ("alma", "data_prep", "fairseq_alma", "slurm", "vision")
BLOCK = re.compile(r"^```(python|bash)\n(.*?)^```", re.DOTALL | re.MULTILINE)


def paste(place, where, text):
    """Add `text` at the end of a file, or of a class in it:
    `where` is "# FILE" or "# FILE, in CLASS"."""
    name, _, kind = where.removeprefix("# ").partition(", in ")
    file = place / name
    lines = file.read_text().splitlines() if file.exists() else []
    ends = {
        node.name: node.end_lineno
        for node in ast.parse("\n".join(lines)).body
        if hasattr(node, "name")
    }
    at = ends[kind] if kind else len(lines)
    file.write_text("\n".join([*lines[:at], "", text, *lines[at:]]))


@pytest.fixture(scope="module")
def pasted(tmp_path_factory):
    """A copy of the code with the blocks of the pages pasted,
    and the output of each of its commands."""
    place = tmp_path_factory.mktemp("checkout")
    for name in CODE:
        shutil.copytree(ROOT / name, place / name, ignore=shutil.ignore_patterns("__pycache__"))
    pages = [(ROOT / "docs" / name).read_text("utf-8") for name in ("extend.md", "extend_more.md")]
    blocks = BLOCK.findall("".join(pages))
    for text in (text for kind, text in blocks if kind == "python"):
        paste(place, *text.split("\n", 1))
    folder = place / "bin"  # with `alma` of the copy
    folder.mkdir()
    (folder / "alma").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m alma "$@"\n')
    (folder / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    for program in folder.iterdir():
        program.chmod(0o755)
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "PYTHONPATH": str(place), "OMP_NUM_THREADS": "1"}
    output = {}
    for line in "".join(text for kind, text in blocks if kind == "bash").splitlines():
        done = subprocess.run(
            line, shell=True, cwd=place, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, (line, done.stderr)
        command = " ".join(line.split()[:2])
        output[command] = output.get(command, "") + done.stdout + done.stderr
    return place, output


def values(place, name):
    (run,) = (place / "runs/restart").glob(f"{name}*")
    return [json.loads(line)["value"] for line in (run / "results.jsonl").read_text().splitlines()]


def test_images_network_and_metric_of_ones_own(pasted):
    place, output = pasted
    assert re.findall("after mega-batch ([0-9]): {'loss'", output["python mine.py"]) == list(
        "12345"
    )
    config = json.loads((place / "runs/network/run.json").read_text())["config"]
    assert (config["arch"], config["metric"]) == ("own:small_network", "worst_class_error")
    assert "Test worst_class_error after mega-batch t, mine, B = 5" in output["alma report"]


def test_a_learner_of_images(pasted):
    """It restarts every second stage: equal to SM before the first restart,
    and no worse than untrained."""
    place, _ = pasted
    restart = values(place, "restart")
    sm = values(place, "sm")
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


def test_an_option_of_language_models(pasted):
    """Neither the launcher nor fairseq's side names it but where it is declared and where it
    acts."""
    run = pasted[0] / "runs/frozen"
    assert json.loads((run / "run.json").read_text())["config"]["freeze_embeddings"] is True
    files = [run / f"stage_0{stage}/checkpoint_best.pt" for stage in (0, 1)]
    first, second = (torch.load(file, weights_only=False)["model"] for file in files)
    same = [name for name in first if torch.equal(first[name], second[name])]
    assert "decoder.embed_tokens.weight" in same
    assert not any("self_attn" in name for name in same)


def test_a_measure_in_the_report(pasted):
    place, output = pasted
    assert "median" in output["alma report"]
    for name in ("restart", "sm"):
        assert f"{100 * statistics.median(values(place, name)[1:]):.2f}" in output["alma report"]
