"""A learner of one's own: one class, and one line in the registry."""

import sys
from dataclasses import dataclass

import pytest

from alma.errors import UserError
from alma.options import option
from alma.records import Run
from vision import MegaBatchStream, run
from vision.learners import LEARNERS
from vision.learners.base import Learner
from vision.presets import Settings
from vision.run import main


@dataclass(frozen=True)
class RestartSettings(Settings):
    """Settings of `Restart`."""

    restart_every: int = option(1, "draw new weights before every K-th stage", at_least=1)


class Restart(Learner):
    """One network that forgets: it is trained from scratch."""

    settings_class = RestartSettings
    settings: RestartSettings

    def build(self, structure):
        return self.backbone()

    def prepare(self, index, data):
        if index % self.settings.restart_every == 0:
            self.reset(index)
        return {}


@pytest.fixture
def restart(monkeypatch):
    monkeypatch.setitem(LEARNERS, "restart", Restart)


STREAM = MegaBatchStream("digits", 4)
TINY = {"epochs": 3, "hidden": 4, "batch_size": 64}


def values(record):
    return [(row["value"], row["train_flops"], row["parameters"]) for row in record.rows]


def test_it_runs_with_its_settings(tmp_path, restart):
    """Always restarting equals sm from scratch; restarting at the first stage alone equals sm."""
    for options, peer in (({}, {"from_scratch": True}), ({"restart_every": 9}, {})):
        found = run(STREAM, "restart", tmp_path / f"restart{options}", **TINY, **options)
        expected = run(STREAM, "sm", tmp_path / f"sm{peer}", **TINY, **peer)
        assert values(found) == values(expected)
        assert found.config["restart_every"] == options.get("restart_every", 1)
    with pytest.raises(UserError, match="--restart-every 0: at least 1"):
        run(STREAM, "restart", tmp_path / "out", restart_every=0)
    with pytest.raises(UserError, match="--restart-every does not apply to sm: it is a setting of restart"):
        run(STREAM, "sm", tmp_path / "out", restart_every=2)


def test_it_is_on_the_command_line(tmp_path, restart, monkeypatch, capsys):
    words = "--learner sm,restart --restart-every 2 --megabatches 3 --epochs 1 --hidden 3 --part 2/2"
    monkeypatch.setattr(sys, "argv", ["run.py", *words.split(), "--out", str(tmp_path)])
    main()
    assert Run.read(tmp_path / "restart_w1_h3_s0").config["restart_every"] == 2
    monkeypatch.setattr(sys, "argv", ["run.py", "--help"])
    with pytest.raises(SystemExit):
        main()
    shown = capsys.readouterr().out
    assert "restart One network that forgets" in shown
    assert "every K-th stage (restart)" in " ".join(shown.split())
