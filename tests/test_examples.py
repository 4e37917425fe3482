"""Every example runs. fairseq's trainings are stand-ins (tests/slurm/fake),
but for the test marked slow."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from alma.records import Run
from slurm.lm.plan import make_plan
from slurm.lm.request import read_requests, resolved

ROOT = Path(__file__).parent.parent
NOTEBOOK = ROOT / "examples/anytime_learning.ipynb"
WIKI = ROOT / "examples/wiki"
FAKE = ROOT / "tests/slurm/fake"
EXECUTE = """
import sys, nbclient, nbformat
notebook = nbformat.read(sys.argv[1], as_version=4)
nbclient.NotebookClient(notebook, timeout=1200, kernel_name="python3").execute()
nbformat.write(notebook, sys.argv[2])
"""


def environment(folder: Path, *first: Path) -> dict[str, str]:
    """In which `alma` is this tree's, whatever is installed;
    modules come from `first` if they are there."""
    program = folder / "bin/alma"
    program.parent.mkdir(exist_ok=True)
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m alma "$@"\n')
    program.chmod(0o755)
    path = os.pathsep.join(
        (str(program.parent), str(Path(sys.executable).parent), os.environ["PATH"])
    )
    modules = os.pathsep.join(map(str, (*first, ROOT)))
    return {**os.environ, "PATH": path, "PYTHONPATH": modules, "FAKE_PIDS": str(folder / "pids")}


def executed(folder: Path, *first: Path) -> list[dict]:
    """The code cells of the notebook with their outputs; fails if one of them raises."""
    pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    command = [sys.executable, "-c", EXECUTE, str(NOTEBOOK), "executed.ipynb"]
    subprocess.run(command, check=True, cwd=folder, env=environment(folder, *first))
    cells = json.loads((folder / "executed.ipynb").read_text())["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def check(cells: list[dict], folder: Path) -> None:
    """The digits are learnt, the ensemble beats its member, a figure is shown,
    and text has all its rows."""
    out = folder / "notebook_out"
    last = {name: Run.read(out / name).rows[-1]["value"] for name in ("sm", "ens", "gmoe", "sm_w5")}
    assert max(last.values()) < 0.25
    assert last["ens"] < last["sm"]
    assert [row["t"] for row in Run.read(out / "text").rows] == [0, 1, 2, 3]
    assert any(
        "image/png" in output.get("data", {}) for cell in cells for output in cell["outputs"]
    )
    outputs = [
        output for cell in cells for output in cell["outputs"] if output.get("name") == "stdout"
    ]
    text = "".join("".join(output["text"]) for output in outputs)
    assert re.search(r"^ens +\d+\.\d\d +\d+\.\d% +\d+\.\d$", text, re.MULTILINE)
    assert "t = 3: perplexity" in text


def test_the_notebook_has_its_outputs_without_paths_of_a_machine():
    text = NOTEBOOK.read_text()
    outputs = [output for cell in json.loads(text)["cells"] for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert not any(output["output_type"] == "error" for output in outputs)
    assert len(text) < 200_000
    assert not re.search(r"/(home|work|tmp|root|Users)/", text)


@pytest.mark.thorough
def test_the_notebook_runs(tmp_path):
    check(executed(tmp_path, FAKE), tmp_path)


def test_fairseq_accepts_the_flags_of_the_notebook():
    source = "\n".join(
        "".join(cell["source"]) for cell in json.loads(NOTEBOOK.read_text())["cells"]
    )
    (line,) = (
        line for line in source.replace("\\\n", "").splitlines() if line.startswith("alma train")
    )
    (request,) = resolved(read_requests(shlex.split(line)[2:]))
    assert len(make_plan(request, 3).stages) == 3


@pytest.mark.slow
def test_the_notebook_trains_a_language_model(tmp_path):
    check(executed(tmp_path), tmp_path)
    values = [row["value"] for row in Run.read(tmp_path / "notebook_out/text").rows]
    assert values == sorted(values, reverse=True)


@pytest.mark.thorough
def test_wikipedia_from_the_downloaded_file_to_the_report(tmp_path, text):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    out = tmp_path / "wiki"
    out.mkdir()
    documents = [
        document for file in sorted(text.iterdir()) for document in file.read_text().split("\n\n")
    ]
    articles = ["Only a stub.", *documents]
    titles = [f"Article {number}" for number in range(len(articles))]
    columns = {"id": titles, "title": titles, "text": articles}  # as in the download
    parquet.write_table(pyarrow.table(columns), out / "wiki.parquet")
    sizes = {"WORDS": "3k", "EVAL_WORDS": "2k", "VALID_WORDS": "1k", "VOCAB_SIZE": "500"}
    command = ["bash", str(WIKI / "run.sh"), str(out)]
    settings = environment(tmp_path, FAKE) | sizes
    finished = subprocess.run(command, cwd=tmp_path, env=settings, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    lines = [json.loads(line) for line in (out / "wiki.jsonl").read_text().splitlines()]
    assert len(lines) == sum(len(document.split()) >= 50 for document in documents)
    assert all(line["text"].startswith("Article ") for line in lines)
    for learner in ("sm4", "gmoe"):
        assert [row["t"] for row in Run.read(out / "runs" / learner).rows] == [0, 1, 2, 3, 4]
    assert list((out / "report").glob("*.png"))
