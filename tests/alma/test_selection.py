"""Hyper-parameters are selected by validation score."""

import csv
from pathlib import Path

import pytest

from .synthetic import make_run, report


def test_only_hyper_parameters_are_selected(tmp_path):
    runs = tmp_path / "runs"
    for width, test, valid in ((8, 0.1, 0.4), (16, 0.3, 0.2), (32, 0.2, 0.3)):
        for seed in (0, 1):
            settings = {"valid": [None, valid, valid + seed / 10], "hidden": width, "seed": seed}
            make_run(runs / f"{width}{seed}", [0.9, 0.5, test], metric="error", **settings)
    make_run(runs / "w2", [0.9, 0.9, 0.4], 2, metric="error", valid=[None, None, 0.9], hidden=8)
    usual = {"metric": "error", "valid": [None, 0.9, 0.9], "hidden": 8}
    for name, other in (
        ("replay", True),
        ("dataset", "other"),
        ("learner", "ens"),
        ("scenario", "rotated"),
    ):
        make_run(runs / name, [0.9, 0.4, 0.4], **usual, **{name: other})
    done = report(runs, "--select", "valid", "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    choice = "best of 3 by validation error (%): sm w=1: hidden=16 (22.50); "
    choice += "left out: hidden=32 (32.50), hidden=8 (42.50)"
    assert [line for line in done.stdout.splitlines() if line.startswith("best")] == [choice]
    text = (tmp_path / "out/report.md").read_text()
    assert choice in text
    assert text.count("| sm ") == 5
    with open(tmp_path / "out/report.csv") as file:
        names = {Path(line["run"]).name for line in csv.DictReader(file)}
    assert names == {"160", "161", "w2", "replay", "dataset", "learner", "scenario"}


def test_candidates_are_compared_at_common_t(tmp_path):
    make_run(tmp_path / "a", [90.0, 50.0, 20.0], valid=[None, 50.0, 20.0], lr=1)
    make_run(tmp_path / "b", [90.0, 40.0, 30.0], valid=[None, 40.0, 30.0], lr=2, rows=2)
    make_run(tmp_path / "c", [90.0, 40.0, 30.0], valid=[None, 40.0, 30.0], lr=3, rows=1)
    done = report(tmp_path, "--select", "valid")
    note = "sm w=1: lr=2 (40.00); left out: lr=1 (50.00), lr=3 (no stage complete)"
    assert done.stdout.splitlines()[-1] == f"best of 3 by validation perplexity: {note}"


def test_the_score_after_the_first_stage_alone_may_choose(tmp_path):
    """Of language models; a run of one stage is a candidate like the others."""
    tmp_path.joinpath("runs").mkdir()
    make_run(
        tmp_path / "runs/a", [90.0] * 4 + [20.0], 2, valid=[None, None, 50.0, 50.0, 10.0], lr=1
    )
    make_run(
        tmp_path / "runs/b", [90.0] * 4 + [30.0], 2, valid=[None, None, 40.0, 40.0, 90.0], lr=2
    )
    lines = {}
    for select in ("valid", "valid-first"):
        (lines[select],) = report(tmp_path / "runs", "--select", select).stdout.splitlines()[-1:]
    assert lines == {
        "valid": "best of 2 by validation perplexity: sm w=2: lr=1 (36.67); left out: lr=2 (56.67)",
        "valid-first": "best of 2 by validation perplexity after the first stage: "
        "sm w=2: lr=2 (40.00); left out: lr=1 (50.00)",
    }
    make_run(tmp_path / "runs/c", [90.0] * 5, 2, rows=3, valid=[None, None, 30.0, 30.0, 30.0], lr=3)
    note = report(tmp_path / "runs", "--select", "valid-first").stdout.splitlines()[-1]
    assert "best of 3 by validation perplexity after the first stage: sm w=2: lr=3 (30.00)" in note


AVERAGES = {
    "4": {"average": "poly:4"},
    "64": {"average": "poly:64"},
    "c": {"schedule": "continuous"},
    "d": {"schedule": "continuous", "dropout": 0.1},
    "e": {"schedule": "continuous", "dropout": 0.5},
}
SCORES = {"4": 30.0, "64": 20.0, "c": 35.0, "d": 40.0, "e": 50.0, "plain": 60.0}


@pytest.fixture
def averages(tmp_path):
    for name, score in SCORES.items():
        make_run(tmp_path / name, [90.0, 50.0], valid=[None, score], lr=1, **AVERAGES.get(name, {}))
    return tmp_path


def test_averages_and_schedules_are_chosen_and_each_is_named(averages):
    done = report(averages, "--select", "valid")
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("best")]
    assert line.startswith(
        "best of 6 by validation perplexity: sm w=1: average=poly:64 (20.00); left out: "
    )
    for message in (
        "average=poly:4 (30.00)",
        "schedule=continuous dropout=0.5 (50.00)",
        "none (60.00)",
    ):
        assert message in line


def test_settings_that_are_held_are_not_chosen_among(averages):
    done = report(averages, "--select", "valid", "--hold", "schedule,average")
    assert [line for line in done.stdout.splitlines() if line.startswith("best")] == [
        "best of 3 by validation perplexity: sm, continuous w=1: none (35.00); "
        "left out: dropout=0.1 (40.00), dropout=0.5 (50.00)"
    ]
    assert done.stdout.count("sm, average poly:") == 2
    flags = {"arch": "switch_gmoe", "fairseq_flags": ["--lr", "2e-3"]}
    make_run(averages / "lr", [90.0, 50.0], valid=[None, 1.0], **flags)
    assert "best of" not in report(averages / "lr", "--select", "valid", "--hold", "lr").stdout


def test_a_share_of_replay_is_chosen_on_request(tmp_path):
    for share, score in (("", 30.0), (0.5, 20.0), (0.9, 25.0)):
        config = {"replay_share": share} if share else {}
        make_run(
            tmp_path / f"share{share}", [90.0, 50.0, 40.0], valid=[None, score, score], **config
        )
    assert "best of" not in report(tmp_path, "--select", "valid").stdout
    done = report(tmp_path, "--select", "valid", "--choose", "replay-share").stdout
    (line,) = [line for line in done.splitlines() if line.startswith("best")]
    assert line.startswith(
        "best of 3 by validation perplexity: sm w=1: replay_share=0.5 (20.00); left out:"
    )
