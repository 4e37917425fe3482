"""Runs of one launch that have a training in common train it once."""

import json
from dataclasses import replace
from unittest.mock import Mock

import pytest
from launcher import make, read_requests

from alma.errors import UserError
from alma.records import Run
from slurm.engine.machine import Machine
from slurm.engine.resources import Resources
from slurm.lm.announce import table
from slurm.lm.cluster import show_jobs
from slurm.lm.estimate import estimate
from slurm.lm.plan import make_plan
from slurm.lm.sharing import share, take_over
from tests.machine_fields import without_machine_fields

FLAGS = ("--", "--arch", "switch_gmoe_tiny", "--max-update", "2")


def plans(*lines, megabatches=3):
    """Plans of command lines such as "sm --out R"."""
    requests = [read_requests(["S", "--learner", *line.split(), *FLAGS])[0] for line in lines]
    return [make_plan(request, megabatches) for request in requests]


def sources(run_plans):
    """The directories of shared trainings, and those they share."""
    trainings = [
        training for plan in run_plans for spec in plan.stages for training in spec.trainings
    ]
    return {
        str(training.directory): str(training.source) for training in trainings if training.source
    }


def test_equal_trainings_and_only_these_are_shared():
    lines = (
        "sm --out A",
        "ens --members 3 --out B",
        "gmoe --out C",
        "sm --seed 1 --out D",
        "sm --average .9 --out E",
    )
    run_plans = share(plans(*lines))
    *_, last = table([estimate(plan, 10, Machine((), None)) for plan in run_plans]).splitlines()
    assert last.split()[:2] == ["total", "34"]  # updates of 17 trainings
    assert sources(run_plans) == {
        **{f"B/stage_0{k}/member_0": f"A/stage_0{k}" for k in range(3)},
        "C/stage_00": "A/stage_00",  # before the first growth
    }


def test_a_training_differs_if_the_one_before_does():
    """Stage 1 of gens is a new model in both; stages of sm differ after another first stage."""
    one, other = plans("sm --out A", "sm --out B")
    first, *later = other.stages
    (training,) = first.trainings
    changed = replace(training, arguments=(*training.arguments, "--dropout", "0.5"))
    other = replace(other, stages=(replace(first, trainings=(changed,)), *later))
    assert sources(share([one, other])) == {}


def test_a_complete_training_is_the_source_and_a_begun_one_goes_on(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("B", "C"):
        (tmp_path / name / "stage_00").mkdir(parents=True)
        (tmp_path / name / "stage_00/checkpoint_last.pt").touch()
    (tmp_path / "B/stage_00/trained.json").touch()
    run_plans = share(plans("sm --out A", "sm --out B", "sm --out C", "sm --out D", megabatches=1))
    assert sources(run_plans) == {"A/stage_00": "B/stage_00", "D/stage_00": "B/stage_00"}


def test_results_are_those_of_a_launch_alone(tmp_path):
    """Once for sm and ens together, once apart."""
    apart = make(tmp_path / "apart")
    together = make(tmp_path / "together")
    for name in ("sm", "ens"):
        apart.run_words("stream", "--learner", name, "--out", name, *FLAGS)
        (together.folder / f"{name}.yaml").write_text(f"learner: {name}\nout: {name}\n")
    _, err = together.run_words("sm.yaml", "ens.yaml", "--stream", "stream", *FLAGS)
    assert err.count(", shared with sm/stage_0") == 4
    assert len(together.pids.read_text().split()) == len(apart.pids.read_text().split()) - 4
    for name in ("sm", "ens"):
        assert rows_of(apart.folder / name) == rows_of(together.folder / name)
    noted = [row["extra"].get("shared_with") for row in Run.read(together.folder / "ens").rows]
    assert noted == [None, *([f"sm/stage_0{k}"] for k in range(4))]
    shared = together.folder / "ens/stage_00/member_0"
    assert (shared / "checkpoint_last.pt").samefile(
        together.folder / "sm/stage_00/checkpoint_last.pt"
    )
    assert json.loads((shared / "trained.json").read_text())["shared_with"] == "sm/stage_00"


def rows_of(run):
    """The rows without measurements of the machine and notes of sharing."""
    rows = without_machine_fields(Run.read(run).rows)
    for row in rows:
        row["extra"] = {key: value for key, value in row["extra"].items() if key != "shared_with"}
    return rows


def test_side_by_side_a_shared_training_waits_for_its_source(launcher):
    for name in ("sm", "ens"):
        (launcher.folder / f"{name}.yaml").write_text(f"learner: {name}\nout: {name}\n")
    launcher.run_words("ens.yaml", "sm.yaml", "--stream", "stream", "--jobs", "3", *FLAGS)
    assert [row["t"] for row in Run.read(launcher.folder / "sm").rows] == [0, 1, 2, 3, 4]
    assert all("shared_with" in row["extra"] for row in Run.read(launcher.folder / "sm").rows[1:])


def test_on_slurm_a_shared_training_is_one_small_job_after_its_source(capsys):
    run_plans = share(plans("sm --out A", "ens --members 2 --out B", megabatches=1))
    show_jobs(run_plans, Resources(), verbose=True)
    _, trained, shared, *_ = capsys.readouterr().out.split("# <")[1:]
    assert "B stage 0, member 1 of 2" in shared.splitlines()[0]
    number = trained.partition(">")[0]
    assert f"--dependency='afterok:<{number}>_0'" in shared
    assert "B stage 0, member 2 of 2" in trained.splitlines()[0]
    assert "--gpus-per-node=8" in trained
    assert "--gpus-per-node=1" in shared


@pytest.mark.parametrize("links", [True, False])
def test_an_interrupted_take_over_is_completed(tmp_path, monkeypatch, links):
    """By links, or where these are impossible, by copies."""
    if not links:
        monkeypatch.setattr(
            "slurm.lm.sharing.os.link", Mock(side_effect=OSError("Invalid cross-device link"))
        )
    source = tmp_path / "source"
    directory = tmp_path / "directory"
    for path in (source, directory):
        path.mkdir()
    (source / "checkpoint_last.pt").write_text("whole")
    (directory / "checkpoint_last.pt.part").write_text("half")
    with pytest.raises(UserError, match="the training that .* shares is gone: launch again"):
        take_over(source, directory)
    (source / "trained.json").write_text('{"checkpoint": "checkpoint_last.pt"}')
    take_over(source, directory)
    assert sorted(path.name for path in directory.iterdir()) == [
        "checkpoint_last.pt",
        "trained.json",
    ]
    assert (directory / "checkpoint_last.pt").read_text() == "whole"
    assert (directory / "checkpoint_last.pt").samefile(source / "checkpoint_last.pt") == links
