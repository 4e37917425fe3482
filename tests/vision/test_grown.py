"""A stream by date that grew in appends has the same record as one made in one go."""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from alma.evaluations import EVALUATIONS, read_item_losses
from alma.records import Run
from tests.vision.conftest import ROOT, command, equal, error_of, numbers
from tests.vision.test_weeks import FAST, arrive, stream
from vision import arrivals, deployed, run
from vision.image_files import ImageSource
from vision.late import to_test
from vision.periods import listed
from vision.scenarios import read_periods

WEEKS = 6
TINY = FAST | {"epochs": 2}
OPTIONS = {
    "sm": {"average": "poly:2", "replay_share": 0.5},
    "ens": {"members": 2, "waiting_time": 2},
    "umix": {"members": 2, "average": 0.5, "classes": "known"},
    "gens": {"gens_init": "copy", "new_members": 2},
    "gmoe": {"router": "flat", "average": "poly:2"},
    "ff": {"replay": True, "from_scratch": True},
}
WAITING = {"gens": {"waiting_time": 2}, "sm": {"waiting_time": 3, "average": "poly:2"}}


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    """All weeks."""
    place = tmp_path_factory.mktemp("whole") / "shop"
    arrive(place, *range(1, WEEKS + 1))
    return place


def grow(folder, out, learner, ends, options, before_append=lambda out: None):
    """A run whose stream ended with each of the weeks in turn, the last `ends` being all."""
    record = None
    start = 1
    for end in ends:
        arrive(folder, *range(start, end + 1))
        if record:
            before_append(out)
        record = run(stream(folder), learner, out, append=True, **TINY | options)
        start = end + 1
    return record


def as_in_one_go(record):
    """What appends must not change: what was trained, the evaluation matrix, losses by image."""
    rows = []
    for row in numbers(record):
        extra = dict(row["extra"])
        raw = dict(extra.pop("raw", {}))
        raw.pop("error", None)  # `value` and this one are of the first command's periods
        extra["test_flops"] = 0.0
        rows.append(row | {"value": 0, "extra": extra, "raw": raw})
    losses = {}
    for path in sorted(record.directory.glob("held_out/*")):
        losses[path.name] = read_item_losses(path).tolist()
    return rows, losses


def random_ends(rng, waiting_time):
    """Weeks after which the stream was trained; with a waiting time, where a stage ends."""
    places = [t for t in range(waiting_time, WEEKS) if t % waiting_time == 0]
    return [*sorted(rng.sample(places, rng.randint(1, len(places)))), WEEKS]


def check_growth(shop, tmp_path, learner, options, seeds):
    whole = run(stream(shop), learner, tmp_path / "whole", **TINY | options)
    expected = as_in_one_go(whole)
    stages = -(-WEEKS // options.get("waiting_time", 1))
    assert len(expected[1]) == stages * WEEKS
    for seed in seeds:
        ends = random_ends(random.Random(seed), options.get("waiting_time", 1))
        place = tmp_path / f"grown_{seed}"
        grown = grow(place / "shop", place / "run", learner, ends, options)
        assert as_in_one_go(grown) == expected, ends
        assert not to_test(grown, WEEKS)
        cells = [(late["stage"], late["megabatch"]) for late in grown.late_evaluations]
        assert len(cells) == len(set(cells)) > 0


@pytest.mark.parametrize("learner", ["sm", "gens"])
def test_a_grown_stream_has_the_record_of_one_made_in_one_go(shop, tmp_path, learner):
    check_growth(shop, tmp_path, learner, OPTIONS[learner], [sorted(OPTIONS).index(learner)])


@pytest.mark.thorough
@pytest.mark.parametrize("learner", OPTIONS)
def test_appends_at_random_weeks_give_the_record_of_one_go(shop, tmp_path, learner):
    check_growth(shop, tmp_path, learner, OPTIONS[learner], range(10, 15))
    if learner in WAITING:
        check_growth(shop, tmp_path / "waiting", learner, WAITING[learner], range(10, 13))


# Models that are gone, and the newest ones only


def test_a_stage_whose_file_is_gone_is_a_hole_that_is_named(shop, tmp_path, capsys):
    def delete(out):
        for name in ("stage_001.pt", "stage_003.pt"):  # the last one is in checkpoint.pt, too
            (out / name).unlink()

    options = {"save_stages": True}
    whole = run(stream(shop), "sm", tmp_path / "whole", **TINY)
    grown = grow(tmp_path / "shop", tmp_path / "run", "sm", [4, 6], options, delete)
    said = capsys.readouterr().out
    assert "models without a file: 1 (stage_001.pt); cells of the evaluation matrix" in said
    assert "that stay empty: 2 (2026-W05, 2026-W06): restore the files" in said
    for one, other in zip(grown.rows, whole.rows, strict=True):
        matrix = one["extra"]["matrix"]
        if one["stage"] == 1:
            assert matrix[:4] == other["extra"]["matrix"][:4]
            assert np.isnan(matrix[4:]).all()
        else:
            assert matrix == other["extra"]["matrix"]
    assert [(cell.stage, cell.megabatches) for cell in to_test(grown, WEEKS)] == [(1, [5, 6])]


def test_a_run_without_the_models_of_its_stages_has_the_newest_one(shop, tmp_path, capsys):
    options = {"save_stages": False}
    grown = grow(tmp_path / "shop", tmp_path / "run", "sm", [4, 6], options)
    assert not list(grown.directory.glob("stage_*.pt"))
    cells = [(late["stage"], late["megabatch"]) for late in grown.late_evaluations]
    assert cells == [(None, 5), (None, 6), (3, 5), (3, 6)]
    assert "models without a file: 3 (stage_000.pt, stage_001.pt, " in capsys.readouterr().out


@pytest.mark.parametrize("newest", [0, 2])
def test_the_newest_models_only(tmp_path, newest):
    options = {"test_past": newest}
    grown = grow(tmp_path / "shop", tmp_path / "run", "sm", [4, 6], options)
    stages = [late["stage"] for late in grown.late_evaluations]
    assert stages == [2, 2, 3, 3][: 2 * newest]
    arrive(tmp_path / "shop", 6)
    again = run(stream(tmp_path / "shop"), "sm", tmp_path / "run", **TINY)  # fills what is missing
    assert not to_test(again, WEEKS)


def test_the_row_of_a_last_stage_that_was_killed_is_completed_by_late_evaluations(
    shop, tmp_path, monkeypatch
):
    """Killed between its checkpoint and its row, which lacks the periods that arrived since."""
    arrive(tmp_path / "shop", 1, 2, 3, 4)
    with monkeypatch.context() as patch:
        append = Run.append

        def killed(record, row):
            if row["t"] == 4:
                raise KeyboardInterrupt
            append(record, row)

        patch.setattr(Run, "append", killed)
        with pytest.raises(KeyboardInterrupt):
            run(stream(tmp_path / "shop"), "sm", tmp_path / "run", **TINY)
    arrive(tmp_path / "shop", 5, 6)
    grown = run(stream(tmp_path / "shop"), "sm", tmp_path / "run", append=True, **TINY)
    assert as_in_one_go(grown) == as_in_one_go(run(stream(shop), "sm", tmp_path / "all", **TINY))


# alma test


def command_of_test(place, *, dry_run=False, test_past=None):
    options = argparse.Namespace(
        test_past=test_past,
        dry_run=dry_run,
        jobs=1,
        device="cpu",
        data_root=None,
        cluster="local",
        wait=False,
    )
    read_periods.cache_clear()
    listed.cache_clear()
    arrivals.test([Run.read(place)], options)


def test_models_are_tested_without_training(shop, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    arrive(tmp_path / "shop", 1, 2, 3)
    flags = "--data-root shop --by week --arch mlp --hidden 4 --epochs 2 --no-augment"
    words = f"{flags} --batch-size 8 --optimizer adadelta --out".split()
    command(monkeypatch, *words, "run")
    arrive(tmp_path / "shop", 4, 5, 6)
    before = (tmp_path / "run/results.jsonl").read_bytes()
    capsys.readouterr()
    command_of_test("run", dry_run=True)
    images = sum(len(period.splits["test"]) for period in listed(source_of("shop"))[0][3:])
    assert f"run: 4 earlier models to test on what has arrived: {4 * images:,} images x" in (
        capsys.readouterr().out
    )
    assert not (tmp_path / "run" / EVALUATIONS).exists()
    command_of_test("run")
    lines = capsys.readouterr().out.splitlines()
    assert lines[-5].split() == ["model", "2026-W04", "2026-W05", "2026-W06"]
    assert [line.split()[:-3] for line in lines[-4:]] == [
        ["untrained"],
        *(["of", f"2026-W0{week}"] for week in (1, 2, 3)),
    ]
    assert (tmp_path / "run/results.jsonl").read_bytes() == before
    tested = Run.read("run")
    assert tested.config["megabatches"] == WEEKS
    assert len(tested.late_evaluations) == 12
    newest, _ = deployed.load("run")
    weights = torch.load("run/stage_002.pt", weights_only=True)["model"]
    assert equal(newest.model.state_dict(), weights)
    command_of_test("run")
    assert "no model to test" in capsys.readouterr().out
    forget()
    assert "give --append" in error_of(monkeypatch, capsys, *words, "run")
    forget()
    command(monkeypatch, *words, "run", "--append")
    forget()
    command(monkeypatch, *words, "whole")
    assert as_in_one_go(Run.read("run")) == as_in_one_go(Run.read("whole"))


def test_a_short_last_stage_that_was_tested_on_more_does_not_grow(tmp_path, monkeypatch, refused):
    options = {"waiting_time": 2}
    grow(tmp_path / "shop", tmp_path / "run", "sm", [3], options)
    arrive(tmp_path / "shop", 4)
    weeks = stream(tmp_path / "shop")
    tested = run(weeks, "sm", tmp_path / "run", only_test=True, **TINY | options)
    assert len(tested.late_evaluations) == 3
    assert "\nof 2026-W03 " in arrivals.table(tested, tested.late_evaluations)
    line = refused(run, weeks, "sm", tmp_path / "run", append=True, **TINY | options)
    assert "stage 1 was trained when the stream ended with mega-batch 3" in line


def source_of(place):
    return ImageSource(place, "week", record="run/arrived.jsonl")


def forget():
    listed.cache_clear()
    read_periods.cache_clear()


# Kills


CHILD = """
import json, sys
from vision import run
from tests.vision.test_weeks import stream
options = json.loads(sys.argv[3])
run(stream(sys.argv[1]), options.pop("learner"), sys.argv[2], append=True, **options)
"""


@pytest.mark.thorough
@pytest.mark.parametrize("learner", ["sm", "gens"])
def test_kills_at_random_times_change_nothing(shop, tmp_path, learner):
    options = TINY | OPTIONS[learner]
    whole = run(stream(shop), learner, tmp_path / "whole", **options)
    rng = random.Random(f"kills {learner}")
    child = json.dumps(options | {"learner": learner, "save_interval": 0.0})
    words = [sys.executable, "-c", CHILD, str(tmp_path / "shop"), str(tmp_path / "run"), child]
    start = 1
    kills = 0
    for end in (2, 4, WEEKS):
        arrive(tmp_path / "shop", *range(start, end + 1))
        start = end + 1
        finished = False
        attempts = 0
        while not finished:
            process = subprocess.Popen(words, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"})
            attempts += 1
            if attempts > 4:
                assert process.wait(120) == 0
            wait_for_rows(tmp_path / "run", process)
            time.sleep(rng.uniform(0.0, 0.3))
            process.send_signal(signal.SIGKILL)
            status = process.wait()
            finished = status == 0
            kills += status == -signal.SIGKILL
    assert kills
    assert as_in_one_go(Run.read(tmp_path / "run")) == as_in_one_go(whole)


def wait_for_rows(place, process):
    """Until the process has written into the run's folder, or has ended."""
    before = written(place)
    while process.poll() is None and written(place) == before:
        time.sleep(0.01)


def written(place):
    return sorted((path.name, path.stat().st_mtime_ns) for path in place.glob("*.jsonl"))
