"""docs/extend.md: its code does what the page says."""

import importlib
import re
import sys
import tarfile
import types
from pathlib import Path

import pytest
from launcher import read_requests

from alma.report import compare
from alma.report.results import find_runs, group
from data_prep import formats
from data_prep.documents import Reader, find_files, make_shards
from slurm.lm.learners import LEARNERS as LANGUAGE_MODELS
from slurm.lm.plan import make_plan
from vision import MegaBatchStream, run
from vision.learners import LEARNERS as IMAGE_LEARNERS

PAGE = Path(__file__).parents[1] / "docs/extend.md"
BLOCKS = dict(re.findall(r"```python\n# (\S+)\n(.*?)```", PAGE.read_text(), re.DOTALL))
"""Code by the file that it belongs to."""
STREAM = MegaBatchStream("digits", 4)


@pytest.fixture(autouse=True)
def restored():
    """The registries are afterwards as they were."""
    registries = (compare.AVERAGES, formats.FORMATS, LANGUAGE_MODELS, IMAGE_LEARNERS)
    before = [dict(registry) for registry in registries]
    yield
    for registry, entries in zip(registries, before, strict=True):
        registry.clear()
        registry.update(entries)


def execute(path: str, **names: object) -> dict[str, object]:
    """Run the code for a file as if it stood at its end; `names` are imported by it. Returns its names."""
    module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    exists = (PAGE.parents[1] / path).exists()
    namespace = {**vars(importlib.import_module(module)), **names} if exists else {"__name__": module}
    if not exists:
        sys.modules[module] = types.ModuleType(module)  # dataclasses look their module up
    exec(BLOCKS[path], namespace)
    return namespace


def test_every_block_is_run():
    assert list(BLOCKS) == [
        "vision/learners/restart.py",
        "vision/learners/__init__.py",
        "slurm/lm/learners.py",
        "data_prep/formats.py",
        "alma/metrics.py",
        "alma/report/compare.py",
    ]


def test_a_learner_of_images(tmp_path):
    restart = execute("vision/learners/restart.py")["Restart"]
    execute("vision/learners/__init__.py", Restart=restart)
    options = {"epochs": 2, "hidden": 4}
    found = run(STREAM, "restart", tmp_path / "restart", **options)
    expected = run(STREAM, "sm", tmp_path / "sm", from_scratch=True, **options)
    assert [row["value"] for row in found.rows] == [row["value"] for row in expected.rows]
    assert found.config["restart_every"] == 1


def test_a_learner_of_language_models():
    execute("slurm/lm/learners.py")
    (request,) = read_requests(["S", "--learner", "recent", "--out", "R"])
    models = [list(map(str, stage.models)) for stage in make_plan(request, 3).stages]
    assert models == [["R/stage_00"], ["R/stage_00", "R/stage_01"], ["R/stage_01", "R/stage_02"]]


@pytest.mark.parametrize("name", ["a.tar", "a.tar.gz"])
def test_a_corpus_format(tmp_path, name):
    execute("data_prep/formats.py")
    for word in ("one", "two"):
        (tmp_path / word).write_text(f"{word} file")
    with tarfile.open(tmp_path / name, "w:gz" if name.endswith("gz") else "w") as archive:
        for word in ("one", "two"):
            archive.add(tmp_path / word, word)
    (path,) = find_files(str(tmp_path / name))
    (shard,) = make_shards([("web", path)], Reader())
    assert list(Reader().read(shard)) == [("web", "one file", 2), ("web", "two file", 2)]


def test_a_measure_in_the_report(tmp_path):
    median = execute("alma/metrics.py")["median"]
    execute("alma/report/compare.py", median=median)
    record = run(STREAM, "sm", tmp_path / "sm", epochs=1, hidden=2)
    header, row = compare.table(group(find_runs([tmp_path]))[0])
    errors = sorted(100 * row["value"] for row in record.rows[1:])
    assert float(row[header.index("median")]) == pytest.approx(sum(errors[1:3]) / 2, abs=0.01)
