"""The run directory: rows are complete, unchanged when read, and never mixed with another run's."""

import errno
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alma import provenance
from alma.errors import UserError
from alma.records import Run

ROOT = Path(__file__).resolve().parents[2]
CONFIG = {
    "learner": "sm",
    "megabatches": 4,
    "waiting_time": 1,
    "replay": False,
    "seed": 0,
    "model": {"d": 8},
}


def row(t, **changes):
    """A valid row."""
    return {
        "t": t,
        "stage": t - 1 if t else None,
        "trained_on": [t] if t else [],
        "metric": "error",
        "value": 0.5,
        "parameters": 10,
        "train_flops": 1e9,
        "eval_flops_per_example": 100,
        "seconds": 0.1,
        "peak_memory_bytes": 1000,
        "extra": {},
    } | changes


@pytest.fixture
def run(tmp_path):
    """A run without rows."""
    return Run.open(tmp_path, CONFIG)


def test_a_run_is_described_and_resumed(tmp_path):
    """Tuples equal lists in a config."""
    config = CONFIG | {"layers": (1, 2)}
    run = Run.open(tmp_path / "new/run", config, seeds={"members": [1, 2]})
    run.append(row(0))
    run.note(stages=2)
    file = tmp_path / "new/run/run.json"
    info = json.loads(file.read_text())
    before = file.stat().st_ino
    run.note(stages=2)
    assert file.stat().st_ino == before
    assert (info["config"], info["seeds"]) == (CONFIG | {"layers": [1, 2]}, {"members": [1, 2]})
    assert info["versions"]["python"] == sys.version.split()[0]
    assert info["machine"]["cores"] >= 1
    assert info["machine"]["memory_bytes"] > 1 << 28
    again = Run.open(tmp_path / "new/run", config)
    assert again.info == info
    again.append(row(1))
    assert [r["t"] for r in Run.read(tmp_path / "new/run").rows] == [0, 1]


def test_another_config_is_refused_with_both_values(tmp_path):
    run = Run.open(tmp_path, CONFIG | {"old": 1})
    run.append(row(1))
    with pytest.raises(UserError) as caught:
        Run.open(tmp_path, CONFIG | {"model": {"d": 16}, "new": None})
    message = str(caught.value)
    assert "model.d: 8 -> 16; new: not given -> null; old: 1 -> not given" in message
    assert "another --out" in message
    assert "learner" not in message
    assert len(Run.read(tmp_path).rows) == 1


def test_an_untrained_run_with_another_config_is_replaced(tmp_path):
    """Measurements of its untrained model are removed, logs are kept.
    A checkpoint counts as training."""
    before = Run.open(tmp_path, CONFIG)
    before.append(row(0))
    for name in ("untrained.json", "untrained.log"):
        (tmp_path / name).touch()
    run = Run.open(tmp_path, CONFIG | {"seed": 1}, untrained=["untrained.json", "none.json"])
    assert (run.config["seed"], run.rows, before.rows) == (1, [], [])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.json", "untrained.log"]
    run.append(row(0))
    (tmp_path / "stage_00").mkdir()
    (tmp_path / "stage_00/checkpoint_last.pt").touch()
    with pytest.raises(UserError, match="seed: 1 -> 2"):
        Run.open(tmp_path, CONFIG | {"seed": 2})
    assert len(Run.open(tmp_path, CONFIG | {"seed": 1}).rows) == 1


def test_a_config_needs_its_required_keys(tmp_path):
    with pytest.raises(ValueError, match="lacks megabatches, seed"):
        Run.open(tmp_path / "run", {"learner": "sm", "waiting_time": 1, "replay": False})
    assert not (tmp_path / "run").exists()


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run with three rows."""
    run = Run.open(tmp_path_factory.mktemp("run"), CONFIG)
    for t in range(3):
        run.append(row(t))
    return run, run.results.read_bytes()


@given(cut=st.integers(0, 700))
@settings(max_examples=30, deadline=None)
def test_complete_rows_survive_a_cut_anywhere(finished, cut):
    """An incomplete last line is ignored by readers, which change nothing, and removed on
    opening."""
    run, content = finished
    assert len(content) < 700
    run.results.write_bytes(content[:cut])
    complete_lines = content[:cut].count(b"\n")
    assert [r["t"] for r in Run.read(run.directory).rows] == list(range(complete_lines))
    assert run.results.read_bytes() == content[:cut]
    Run.open(run.directory, CONFIG)
    assert run.results.read_bytes().splitlines() == content.splitlines()[:complete_lines]


INVALID = [
    ({"t": 5}, "beyond mega-batch 4"),
    ({"t": True}, "`$.t`"),
    ({"value": "0.5"}, "`$.value`"),
    ({"stage": None}, "stage is None but"),
    ({"trained_on": []}, "trained_on is []"),
    ({"parameters": 1.5}, "`$.parameters`"),
    ({"parameters": 10**400}, "`$.parameters`"),
    ({"surprise": 1}, "unknown fields ['surprise']"),
    ({"extra": {"valid": "text"}}, "`$.extra.valid`"),
    ({"extra": {"matrix": [0.1] * 5}}, "matrix has 5 numbers, not 2 to 4"),
    ({"extra": {"matrix_experts": [{"a": [1]}, {"b": [1]}]}}, "different layers"),
    ({"extra": {"raw": {"loss": 1.0}}}, "raw lacks error"),
    ({"extra": {"raw": {"error": None}}}, "`$.extra.raw.error`"),
]


@pytest.mark.parametrize(("changes", "message"), INVALID)
def test_invalid_rows_are_refused_and_are_errors_in_a_file(run, changes, message):
    run.append(row(0))
    with pytest.raises(ValueError, match=re.escape(message)):
        run.append(row(2) | changes)
    assert run.rows == [row(0)]
    with run.results.open("a") as file:
        file.write(json.dumps(row(2) | changes) + "\n" + json.dumps(row(3)) + "\n")
    with pytest.raises(
        UserError, match=f"{re.escape(str(run.results))}:2: not a row .*{re.escape(message)}"
    ):
        _ = run.rows


@pytest.mark.parametrize(
    ("line", "message"),
    [
        *((bad, "not a row") for bad in ("{}", "not json", "[1]", '{"t": 1', "")),
        (json.dumps(row(0)), "second row for t=0"),
        (json.dumps(row(1, metric="perplexity")), "perplexity after error: a run has one metric"),
    ],
)
def test_another_corrupt_line_is_an_error(run, line, message):
    run.append(row(0))
    run.results.write_text(run.results.read_text() + line + "\n" + json.dumps(row(3)) + "\n")
    with pytest.raises(UserError, match=f"{re.escape(str(run.results))}:2: {message}"):
        _ = run.rows


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"megabatches": "4"}, "megabatches: Expected `int`, got `str`"),
        ({"waiting_time": 5}, "waiting_time: Expected `int` <= 4"),
        ({"learner": "\ud800"}, "JSON is malformed"),
        ({"learner": "\x1b[2J"}, "control characters, "),
        (
            {"deep": json.loads("[" * 50 + "]" * 50)},
            "control characters, huge numbers or deep nesting",
        ),
        ({"fairseq_flags": "--lr"}, "fairseq_flags: "),
    ],
)
def test_a_config_whose_values_are_of_other_kinds_is_an_error(tmp_path, config, message):
    (tmp_path / "run.json").write_text(json.dumps({"config": CONFIG | config}))
    with pytest.raises(UserError, match=re.escape(f"{tmp_path / 'run.json'}: {message}")):
        Run.read(tmp_path)


def test_a_repeated_t_is_refused_whoever_wrote_it(tmp_path):
    """Rows are read again only if the file has changed."""
    first = Run.open(tmp_path, CONFIG)
    second = Run.open(tmp_path, CONFIG)
    first.append(row(1))
    second.append(row(2))
    for run in (first, second, Run.open(tmp_path, CONFIG)):
        with pytest.raises(ValueError, match="already has t=2"):
            run.append(row(2, value=0.4))
    first.append(row(3))
    assert [(r["t"], r["value"]) for r in first.rows] == [(1, 0.5), (2, 0.5), (3, 0.5)]
    line = first.results.read_bytes()
    first.results.write_bytes(line.replace(b'"t": 3', b'"t": 4'))  # of the same size
    with pytest.raises(ValueError, match="already has t=4"):
        first.append(row(4))


def test_other_rows_are_refused(run, tmp_path):
    incomplete = row(1)
    del incomplete["seconds"]
    with pytest.raises(ValueError, match="missing required field `seconds`"):
        run.append(incomplete)
    for value in (float("nan"), 1e150):  # reports take squares of values
        with pytest.raises(UserError, match="t=1: training diverged"):
            run.append(row(1, value=value))
    with pytest.raises(ValueError, match=r"Run\.read"):
        Run.read(tmp_path).append(row(0))
    assert run.rows == []


def test_a_full_disk_leaves_no_half_row(run, monkeypatch):
    run.append(row(0))
    before = run.results.read_bytes()
    write = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:20]))
        with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
            run.append(row(1))
    assert run.results.read_bytes() == before
    run.append(row(1))
    assert len(run.rows) == 2


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(
    values=st.lists(st.floats(0, 1e9), min_size=5, max_size=5),
    order=st.permutations(range(5)),
    extra=st.dictionaries(st.text(), JSON, max_size=3),
)
@settings(max_examples=10, deadline=None)
def test_rows_come_back_unchanged_and_in_order(finished, values, order, extra):
    with tempfile.TemporaryDirectory() as folder:
        run = Run(Path(folder), finished[0].info, writable=True)
        rows = [row(t, value=value, extra=extra) for t, value in enumerate(values)]
        for t in order:
            run.append(rows[t])
        assert run.rows == rows


WRITER = """
import sys, test_records
run = test_records.Run.open(sys.argv[1], test_records.CONFIG | {"megabatches": 100000})
for t in range(100000):
    run.append(test_records.row(t))
"""


def test_reading_during_a_run_and_resuming_after_a_kill(tmp_path):
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, Path(__file__).parent)))
    }
    with subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], env=environment) as writer:
        deadline = time.monotonic() + 60
        seen = 0
        while seen < 40 and time.monotonic() < deadline:
            if (tmp_path / "run.json").exists():
                rows = Run.read(tmp_path).rows
                assert [r["t"] for r in rows] == list(range(len(rows)))
                seen = len(rows)
        writer.kill()
    assert seen >= 40
    run = Run.open(tmp_path, CONFIG | {"megabatches": 100000})
    count = len(run.rows)
    run.append(row(count))
    assert [r["t"] for r in run.rows] == list(range(count + 1))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"it has no run\.json"),
        ("not json", "malformed"),
        ("[]", "should be an object"),
        ("{}", "lacks config"),
        ('{"config": {"learner": "sm"}}', "lacks megabatches, waiting_time, replay, seed"),
        ('{"config":' * 99_999, "nested too deeply"),
    ],
)
def test_other_directories_are_refused(tmp_path, content, message):
    if content is not None:
        (tmp_path / "run.json").write_text(content)
    with pytest.raises(UserError, match=message):
        Run.read(tmp_path)


def test_paths_that_cannot_be_a_run_are_refused(tmp_path):
    for name in ("file", "results.jsonl"):
        (tmp_path / name).touch()
    places = {"file": "not a folder", "file/run": "not a folder", ".": r"not its run\.json"}
    for place, message in places.items():
        with pytest.raises(UserError, match=f"{message}.*: choose another --out"):
            Run.open(tmp_path / place, CONFIG)


def test_the_commit_is_unknown_outside_the_projects_own_checkout(tmp_path, monkeypatch):
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path)]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "zero"], check=True)
    module = tmp_path / "provenance.py"
    module.write_text("")
    monkeypatch.setattr(provenance, "__file__", str(module))
    assert provenance.commit() is None
    subprocess.run([*git, "add", "provenance.py"], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "one"], check=True)
    assert re.fullmatch(r"[0-9a-f]{40}", provenance.commit())
    module.write_text("changed")
    assert provenance.commit().endswith("-dirty")
    monkeypatch.setenv("GIT_DIR", str(Path(__file__).parents[2] / ".git"))  # as in a hook
    assert provenance.commit().endswith("-dirty")


def test_growing_settings_are_updated(tmp_path):
    start = CONFIG | {"parts": [1, 2]}
    first = Run.open(tmp_path, start)
    first.append(row(1))
    grown = start | {"parts": [1, 2, 5], "megabatches": 5}
    with pytest.raises(UserError, match="megabatches: 4 -> 5"):
        Run.open(tmp_path, grown, growing=["parts"])
    assert Run.read(tmp_path).info == first.info
    run = Run.open(tmp_path, grown, growing=["parts", "megabatches"])
    assert run.info == Run.read(tmp_path).info == first.info | {"config": grown}
