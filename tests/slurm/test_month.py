"""A stream that grows: its evaluation matrix is that of the stream made in one go, cell by cell.

Trainings and evaluations are the trainer of month.py, in this process: milliseconds each. A
model is the list of what it was trained on, and its loss on a document follows from both.
"""

import json
import random
import re
import shutil
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from launcher import call
from month import SEEDS, Killer, alma_test, chosen, ends, matrix, run_here

from alma.evaluations import item_losses_file
from alma.records import Run
from data_prep.__main__ import main as data_prep
from slurm import arrivals
from slurm.engine import children
from slurm.lm.local import state_of
from tests.growing import assert_same, record_of


@pytest.mark.parametrize("seed", SEEDS)
def test_a_grown_stream_has_the_matrix_of_one_made_in_one_go(growing, launch, seed):
    chance = random.Random(seed)
    words, waiting_time = chosen(chance)
    for megabatches in ends(chance, waiting_time):
        growing.has(megabatches)
        assert launch(*words, "--out", "grown") == 0
    assert launch(*words, "--out", "at_once") == 0
    assert_same("grown", "at_once")


def test_alma_test_trains_nothing_and_says_what_is_new(growing, launch, monkeypatch, capsys):
    growing.has(2)
    assert launch("--learner", "sm", "--out", "run") == 0
    assert "nothing new" in alma_test(monkeypatch, capsys, "run")
    growing.has(4)
    before = sorted(Path("run").rglob("*"))
    output = alma_test(monkeypatch, capsys, "run", "--dry-run")
    assert "run: 3 models are tested on what arrived: 6 evaluations" in output
    assert sorted(Path("run").rglob("*")) == before
    output = alma_test(monkeypatch, capsys, "run")
    assert "run: perplexity on what has arrived" in output
    assert re.search(r"^model +2024-03 +2024-04$", output, re.MULTILINE)
    assert re.findall(r"^(untrained|of \S+) +[\d.]+ +[\d.]+$", output, re.MULTILINE) == [
        "untrained",
        "of 2024-01",
        "of 2024-02",
    ]
    assert "ask with: alma due run" in output
    status = state_of(Path("run"))
    assert (status.state, status.why) == ("done", "tested on what has arrived since: alma due run")
    Path("run/stage_02").mkdir()
    assert state_of(Path("run")).why == "2 of 4 stages requested"
    Path("run/stage_02").rmdir()
    rows = Run.read("run").rows
    assert [len(row["extra"]["matrix"]) for row in rows] == [4, 4, 4]
    assert not Path("run/stage_02").exists()
    assert "nothing new" in alma_test(monkeypatch, capsys, "run")
    growing.has(6)
    assert launch("--learner", "sm", "--out", "run") == 0
    assert launch("--learner", "sm", "--out", "at_once") == 0
    assert_same("run", "at_once")


@pytest.mark.parametrize("seed", SEEDS)
def test_kills_between_any_two_writes_repeat_and_lose_nothing(growing, launch, monkeypatch, seed):
    chance = random.Random(seed)
    words, waiting_time = chosen(chance)
    killer = Killer(monkeypatch, chance)
    for megabatches in ends(chance, waiting_time):
        growing.has(megabatches)
        tests_first = partial(call, arrivals.main, monkeypatch, "grown")
        if Path("grown").exists() and chance.random() < 0.5:
            killer.launched(tests_first, 3)
        killer.launched(partial(launch, *words, "--out", "grown"), 6)
    assert launch(*words, "--out", "at_once") == 0
    assert_same("grown", "at_once")
    assert killer.kills


def test_a_deleted_checkpoint_is_a_named_hole(growing, launch, monkeypatch, capsys):
    growing.has(3)
    launch("--learner", "gens", "--out", "run")
    next(Path("run/stage_00").rglob("model.txt")).unlink()  # deployed after each stage
    growing.has(4)
    output = alma_test(monkeypatch, capsys, "run", "--dry-run")
    assert "run: stage 0: model.txt is deleted: not tested on 2024-04" in output
    assert "run: 3 models are deleted and cannot be tested" in output
    assert "run: 1 model is tested" in output
    output = alma_test(monkeypatch, capsys, "run")
    assert "stage 2: model.txt is deleted: not tested on 2024-04" in output
    assert {stage: len(values) for stage, values in matrix("run").items()} == {
        None: 4,
        0: 3,
        1: 3,
        2: 3,
    }
    output = alma_test(monkeypatch, capsys, "run")
    assert "stage 2: model.txt is deleted" in output
    assert "nothing new" in output


def test_only_the_newest_stages_are_tested(growing, launch, monkeypatch, capsys):
    growing.has(3)
    launch("--learner", "sm", "--out", "run", "--test-past", "1")
    growing.has(4)
    launch("--learner", "sm", "--out", "run", "--test-past", "1")
    lengths = {stage: len(values) for stage, values in matrix("run").items()}
    assert lengths == {None: 3, 0: 3, 1: 3, 2: 4, 3: 4}
    growing.has(5)
    assert "nothing new" in alma_test(monkeypatch, capsys, "run", "--test-past", "0")
    alma_test(monkeypatch, capsys, "run")  # as it was launched
    assert len(matrix("run")[3]) == 5
    assert len(matrix("run")[2]) == 4
    alma_test(monkeypatch, capsys, "run", "--test-past", "9", "--jobs", "2")
    launch("--learner", "sm", "--out", "run", "--test-past", "9")
    growing.has(6)
    launch("--learner", "sm", "--out", "run")
    launch("--learner", "sm", "--out", "at_once")
    assert_same("run", "at_once")


def test_a_result_that_has_more_megabatches_than_the_run(growing, launch, monkeypatch):
    """The stream grows during the first job: the row ends with the run's mega-batches."""

    def grow(*words, **keywords) -> None:
        growing.has(5)
        run_here(*words, **keywords)

    growing.has(3)
    monkeypatch.setattr(children, "run", grow)
    launch("--learner", "sm", "--out", "run")
    assert set(map(len, matrix("run").values())) == {3}
    names = []
    monkeypatch.setattr(children, "run", lambda *words: names.append(words[2]) or run_here(*words))
    assert call(arrivals.main, monkeypatch, "run") == 0
    assert names == ["test of untrained model on 2024-04 to 2024-05"]
    assert set(map(len, matrix("run").values())) == {5}
    assert len(Run.read("run").late_evaluations) == 8


def test_what_alma_test_cannot_test_is_one_line(growing, launch, monkeypatch, capsys):
    growing.has(3)
    launch("--learner", "sm", "--out", "run")
    Path("stream").rename("moved")
    output = alma_test(monkeypatch, capsys, "run", code=2)
    assert output.startswith("error: run: no stream in stream")
    assert "give its new place as --stream STREAM" in output
    assert "nothing new" in alma_test(monkeypatch, capsys, "run", "--stream", "moved")
    shutil.copytree("moved", "other")
    stream = json.loads(Path("other/stream.json").read_text())
    stream["test"]["files"] = stream["valid"]["files"]
    Path("other/stream.json").write_text(json.dumps(stream))
    output = alma_test(monkeypatch, capsys, "run", "--stream", "other", code=2)
    assert "run: it was trained on another stream than other (stream_sha256: " in output
    info = json.loads(Path("run/run.json").read_text())
    Path("run/run.json").write_text(json.dumps(info | {"command": "true"}))
    assert "no command of `alma train`" in alma_test(monkeypatch, capsys, "run", code=2)
    assert "0 to" not in alma_test(monkeypatch, capsys, "run", "--test-past", "-1", code=2)


def test_late_evaluations_come_before_all_trainings(growing, launch, capsys):
    Path("e.yaml").write_text("learner: [sm, ens]\n")
    words = ("--stream", "stream", "--out", "runs", "e.yaml")
    growing.has(2)
    launch(*words)
    growing.has(3)
    capsys.readouterr()
    launch(*words)
    output = capsys.readouterr()
    orders = [line.partition(" ")[2] for line in (output.out + output.err).splitlines()]
    begun = [line for line in orders if line.endswith("started")]
    is_late = [line.startswith("test of") for line in begun]
    assert is_late.count(True) == 6
    assert is_late == sorted(is_late, reverse=True)


def test_alma_test_writes_losses_by_document_that_are_missing(growing, launch, monkeypatch, capsys):
    growing.has(2)
    launch("--learner", "sm", "--out", "run")
    growing.has(3)
    launch("--learner", "sm", "--out", "run")
    before = record_of("run")
    for _ in range(2):
        for stage, megabatch in ((0, 3), (2, 1)):
            item_losses_file(Path("run"), stage, megabatch).unlink()
        output = alma_test(monkeypatch, capsys, "run")
        assert "run: the losses by document that were missing are written" in output
        assert "2 models are tested on what arrived: 2 evaluations" in output
        after = record_of("run")
        assert after[0] == before[0]
        assert after[1].keys() == before[1].keys()
    shutil.rmtree("run/held_out")  # as of a trainer that returns none
    assert "nothing new" in alma_test(monkeypatch, capsys, "run")


def write_months(folder: Path, text: Path) -> None:
    """Write four months of text, a file each."""
    documents = (text / "help.txt").read_text().split("\n\n")
    for month in range(4):
        lines = []
        for document in documents[month::4]:
            record = {"text": document, "date": f"2024-{month + 1:02d}-03"}
            lines.append(json.dumps(record) + "\n")
        (folder / f"{month}.jsonl").write_text("".join(lines))


@pytest.mark.thorough
@pytest.mark.parametrize("appends", [[1, 1, 1, 1], [2, 1, 1], [1, 3]])
def test_appended_by_alma_data(launch, text, tmp_path, monkeypatch, appends):
    """`test` mixes the first periods, so rows differ there; the matrix and losses do not."""
    write_months(tmp_path, text)
    sizes = "--by month --words 900 --eval-words 300 --valid-words 200 --vocab-size 300"
    sizes += " --max-document-words 40"

    def data(files: list[str], out: str, *more: str) -> None:
        words = [*(f"web={file}" for file in files), "--out", out, *more]
        monkeypatch.setattr(sys, "argv", ["alma data", *words])
        data_prep()

    files = [f"{month}.jsonl" for month in range(4)]
    shutil.rmtree("stream")
    data(files, "stream", *sizes.split())
    launch("--learner", "ens", "--out", "at_once")
    shutil.rmtree("stream")
    begun = 0
    for count in appends:
        more = ["--append"] if begun else sizes.split()
        data(files[begun : begun + count], "stream", *more)
        begun += count
        launch("--learner", "ens", "--out", "grown")
    assert matrix("grown") == matrix("at_once")
    losses = record_of("grown")[1]
    others = record_of("at_once")[1]
    assert losses.keys() == others.keys()
    assert len(losses) == 16
    assert all(np.array_equal(losses[name], others[name]) for name in losses)
