"""The disk that a run needs, as the plan tells it."""

from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

from slurm.lm import announce

Usage = namedtuple("Usage", ["free"])


def plan(out: Path) -> SimpleNamespace:
    """A plan of two stages with a model of 1 GB each."""
    settings = {"model_bytes": 10**9, "checkpoint_bytes": 4 * 10**9, "checkpoints": 2}
    stages = []
    for number in range(2):
        training = SimpleNamespace(directory=out / f"stage_0{number}", source=None)
        stages.append(SimpleNamespace(trainings=[training]))
    return SimpleNamespace(out=out, request=SimpleNamespace(settings=settings), stages=stages)


def test_the_disk_is_told_and_a_small_one_warned_of(tmp_path, monkeypatch):
    plans = [plan(tmp_path / "runs/a"), plan(tmp_path / "runs/b")]
    free = 12 * 10**9
    monkeypatch.setattr(announce.shutil, "disk_usage", lambda _: Usage(free))
    line = "disk: 2 models, 2.0 GB; 8.0 GB more during a training, 2 checkpoints of 4.0 GB"
    expected = [f"{plan.out}: {line}" for plan in plans]
    assert announce.disk_lines(plans) == expected
    free -= 1
    *lines, warning = announce.disk_lines(plans)
    assert lines == expected
    assert warning.startswith("warning: the disk has 12.0 GB free, and 12.0 GB are needed")
    for number in range(2):  # what is trained needs no more
        folder = tmp_path / f"runs/a/stage_0{number}"
        folder.mkdir(parents=True)
        (folder / "trained.json").touch()
    assert announce.disk_lines(plans) == expected
    plans[1].stages[0].trainings[0].source = tmp_path / "runs/a/stage_00"  # links need none
    assert "disk: 1 models, 1.0 GB" in announce.disk_lines(plans)[1]


def test_other_engines_tell_no_disk(tmp_path):
    other = plan(tmp_path)
    other.request.settings.clear()
    assert announce.disk_lines([other]) == []
