"""The core: what `pip install .` without extras brings, and what commands say that need more."""

import importlib.util
import json
import re
import subprocess
import sys
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest

import alma
from alma.errors import EXTRAS
from tests.alma.matrix_data import EVAL, records, write_records
from tests.alma.monthly import Monthly
from tests.alma.synthetic import image_run
from tests.test_layout import PACKAGES, imports, module_of, sources

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = """
import contextlib, io, json, runpy, sys
lines, foreign, is_blocked = json.load(sys.stdin)
if is_blocked:
    sys.modules.update(dict.fromkeys(foreign))
before = set(sys.modules)
outcomes = []
for line in lines:
    sys.argv, out, err, code = ["alma", *line.split()], io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            runpy.run_module("alma", run_name="__main__", alter_sys=True)
        except SystemExit as end:
            code = end.code or 0
    outcomes.append([code, err.getvalue()])
imported = {name.partition(".")[0] for name in set(sys.modules) - before}
print(json.dumps([outcomes, sorted(imported & set(foreign))]))
"""
"""Runs command lines of alma; with `is_blocked`, packages beyond the core cannot be imported."""
LACKING = {
    "data c.txt --out s --mega-batches 1 --words 9 --valid-words 3 --vocab-size 9": (
        "alma data needs sentencepiece; pip install 'alma-macroscale[corpus]'"
    ),
    "train stream --learner sm --out r": (
        "alma train (--engine fairseq) needs fairseq; pip install 'alma-macroscale[text]'"
    ),
    "train stream --learner sm --out r --dry-run": (
        "alma train (--engine fairseq) needs fairseq; pip install 'alma-macroscale[text]'"
    ),
    "train stream --learner sm --out r --init model": (
        "--engine transformers needs transformers; pip install 'alma-macroscale[transformers]'"
    ),
    "train stream --learner sm --out r --cluster slurm": (
        "--cluster slurm needs submitit; pip install 'alma-macroscale[cluster]'"
    ),
    "report text --mlflow mlruns": "--mlflow needs mlflow; pip install 'alma-macroscale[mlflow]'",
    "advise --mlflow churn --metric accuracy --tracking-uri mlruns": (
        "--mlflow needs mlflow; pip install 'alma-macroscale[mlflow]'"
    ),
    "images --out r": "alma images needs torch; pip install 'alma-macroscale[images]'",
    "images --out r --cluster slurm --dry-run": (
        "--cluster slurm needs submitit; pip install 'alma-macroscale[cluster]'"
    ),
    "matrix m-2024-01 m-2024-02 --data dated.jsonl --by month": (
        "a folder of Hugging Face needs transformers; pip install 'alma-macroscale[transformers]'"
    ),
    "test digits": "a test of images needs torch; pip install 'alma-macroscale[images]'",
    "export digits --out e": "alma export needs torch; pip install 'alma-macroscale[images]'",
    "export text --out e": "alma export needs fairseq; pip install 'alma-macroscale[text]'",
    "predict digits c.txt --out p.csv": (
        "alma predict needs torch; pip install 'alma-macroscale[images]'"
    ),
    "tsne digits": "alma tsne needs torch; pip install 'alma-macroscale[images]'",
    "reproduce figure7 --size small --out r": (
        "alma reproduce needs torch; pip install 'alma-macroscale[images]'"
    ),
    "reproduce table2 --size small --out r": (
        "alma reproduce needs fairseq; pip install 'alma-macroscale[text]'"
    ),
}
"""Command lines and what they say in the core."""


@pytest.fixture(scope="module")
def packaging():
    """setup.py as a module."""
    spec = importlib.util.spec_from_file_location("alma_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def distributions_by_module() -> dict[str, set[str]]:
    """The distributions that have each installed top-level module."""
    modules = metadata.packages_distributions()
    return {module: {distribution_of(name) for name in names} for module, names in modules.items()}


def distribution_of(requirement: str) -> str:
    """The normalised name in a requirement such as numpy>=2."""
    return re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", requirement)[0].lower())


def brought_by(requirements) -> set[str]:
    """Top-level modules that the requirements bring, with those of what they require."""
    distributions = set()
    left = [distribution_of(requirement) for requirement in requirements]
    while left:
        name = left.pop()
        if name in distributions:
            continue
        distributions.add(name)
        try:
            needed = metadata.requires(name) or ()
        except metadata.PackageNotFoundError:  # of another system
            continue
        left += [distribution_of(line) for line in needed if "extra" not in line.partition(";")[2]]
    by_module = distributions_by_module()
    return {module for module, names in by_module.items() if distributions & names}


def ran(lines, packaging, place, is_blocked) -> tuple[list, list[str]]:
    """Exit code and stderr of each command line in the folder `place`, and foreign imports."""
    own = {*PACKAGES, "fairseq_alma_hook", "tests", "experiments"}
    installed = distributions_by_module().keys() - sys.stdlib_module_names - own
    foreign = sorted(installed - brought_by(packaging.CORE))
    assert {"torch", "fairseq", "sentencepiece"} <= set(foreign)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM],
        cwd=place,
        env={"PYTHONPATH": str(ROOT), "PATH": "", "HOME": str(place)},
        input=json.dumps([list(lines), foreign, is_blocked]),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with losses, a text run, an image run, a stream and the folder of a model."""
    folder = tmp_path_factory.mktemp("core")
    rows = ["trained_until,tested_on,loss"]
    for trained in range(2012, 2020):
        for tested in range(2012, 2020):
            loss = 2 + 0.1 * abs(tested - trained) ** 0.7
            rows.append(f"{trained},{tested},{loss:.4f}")
    (folder / "losses.csv").write_text("\n".join(rows) + "\n")
    (folder / "c.txt").write_text("some text\n")
    for name, metric in ("text", "perplexity"), ("images", "error"):
        Monthly(folder / name, metric=metric).months(5).arrive()
    image_run(folder / "digits", [0.3, 0.2])
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text('{"model_type": "llama"}')
    (folder / "stream").mkdir()
    write_records(folder / "dated.jsonl", records())
    (folder / "eval.py").write_text(EVAL)
    for month in ("01", "02"):
        model = folder / f"m-2024-{month}"
        model.mkdir()
        for name in ("config.json", "model.safetensors", "tokenizer.json"):
            (model / name).write_text("{}")
    return folder


@pytest.mark.parametrize("is_blocked", [False, True])
def test_commands_that_only_read_need_the_core_alone(packaging, place, is_blocked):
    program = place / "program"  # a command of one word
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {place}/eval.py "$@"\n')
    program.chmod(0o755)
    matrix = f"matrix a-2024-01 a-2024-02 --data dated.jsonl --by month --command {program}"
    lines = {
        f"{matrix} --metric MAPE": 0,
        "advise --matrix losses.csv --brief brief.html --out advice": 0,
        "advise text": 0,
        "report text --html report.html --out report": 0,
        "report images --html report.html --out report": 0,
        "due text --every 1": 0,
        "gate text": 0,
        "status text images": 0,
        "inspect nowhere": 2,
        "reproduce --list": 0,
        "corpus pydoc topics --out topics.jsonl --max-words 900": 0,
    }
    outcomes, imported = ran(lines, packaging, place, is_blocked)
    codes = {line: code for line, (code, _) in zip(lines, outcomes, strict=True)}
    assert codes == lines, outcomes
    heavy = set().union(*EXTRAS.values(), ["tokenizers", "pyarrow", "onnx"])
    assert not (heavy - brought_by(packaging.CORE)) & set(imported)
    assert "no finished stream here" in outcomes[list(lines).index("inspect nowhere")][1]


def test_a_command_names_the_extra_that_it_lacks_before_it_makes_anything(packaging, place):
    before = sorted(place.rglob("*"))
    outcomes, imported = ran(LACKING, packaging, place, is_blocked=True)
    assert dict(zip(LACKING, outcomes, strict=True)) == {
        line: [2, f"error: {message}\n"] for line, message in LACKING.items()
    }
    assert imported == []
    assert sorted(place.rglob("*")) == before


def test_the_core_imports_what_it_declares(packaging):
    """Late imports count, too, but for those of jobs on a cluster and of a process with torch."""
    allowed = brought_by(packaging.CORE) | sys.stdlib_module_names | set(PACKAGES)
    late = {("alma.tf32", "torch")}
    for name in "reading", "sending", "store":
        late.add((f"alma.report.advice.trackers.{name}", "mlflow"))
    for name in "engine.jobs", "engine.resources", "engine.submission", "lm.stage":
        late.add((f"slurm.{name}", "submitit"))
    beyond = set()
    for path in sources("alma", "slurm"):
        packages = {name.partition(".")[0] for name in imports(path)}
        beyond |= {(module_of(path), package) for package in packages - allowed}
    assert beyond == late


def test_an_extra_brings_what_it_is_named_for(packaging):
    """alma.errors.EXTRAS beside setup.py; `all` has each of them."""
    requirements_by_extra = packaging.EXTRAS | packaging.TRACKERS
    for extra, names in EXTRAS.items():
        requirements = requirements_by_extra[extra]
        if extra in packaging.TRACKERS and importlib.util.find_spec(extra) is None:
            continue  # not in the extra `all`, which the tests install
        assert set(names) <= brought_by(requirements), extra
        assert not set(names) <= brought_by(packaging.CORE), extra
    everything = set().union(*packaging.EXTRAS.values())
    named = set()
    for path in ROOT.rglob("*.py"):
        if path.relative_to(ROOT).parts[0] in packaging.PACKAGES:
            named |= set(re.findall(r"alma-macroscale\[(\w+)\]", path.read_text("utf-8")))
    assert named <= {*requirements_by_extra, "all"}
    foreign = set()
    for path in sources(*packaging.PACKAGES):
        foreign |= {name.partition(".")[0] for name in imports(path)}
    foreign -= sys.stdlib_module_names | set(PACKAGES) | {"fairseq_alma_hook"}
    assert foreign <= brought_by(everything | set(packaging.CORE)) | {"mlflow", "triton"}


def test_the_version_is_in_one_place(packaging):
    assert alma.__version__ == packaging.VERSION
    citation = (ROOT / "CITATION.cff").read_text()
    assert re.findall(r"^version: (.+)$", citation, re.MULTILINE) == [alma.__version__]
    texts = [(ROOT / name).read_text() for name in ("setup.py", "pyproject.toml")]
    assert not any(f'"{alma.__version__}"' in text for text in texts)
