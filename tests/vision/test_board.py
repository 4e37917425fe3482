"""TensorBoard shows one curve over all stages of a run, interrupted or not."""

import pytest

from tests.events import points
from tests.vision.conftest import numbers
from vision import MegaBatchStream, run
from vision.experiment import _Trainer

STREAM = MegaBatchStream("digits", 4)
OPTIONS = {"epochs": 3, "hidden": 4, "waiting_time": 2}


def test_one_curve_over_all_stages(tmp_path):
    record = run(STREAM, "gmoe", tmp_path / "run", tensorboard_logdir=tmp_path / "log", **OPTIONS)
    plain = run(STREAM, "gmoe", tmp_path / "plain", **OPTIONS)
    assert numbers(record) == numbers(plain)
    found = points(tmp_path / "log")
    assert [step for step, _ in found["epoch/valid_loss"]] == [1, 2, 3, 4, 5, 6]
    assert found["epoch/lr"] == [(step, 1.0) for step in range(1, 7)]
    errors = [record.rows[t]["value"] for t in (0, 2, 4)]
    assert found["stage/test_error"] == [(3 * i, pytest.approx(error)) for i, error in enumerate(errors)]
    assert found["stage/experts"] == [(0, 1), (3, 1), (6, 2)]
    assert found["stage/valid_error"][-1] == (6, pytest.approx(record.rows[4]["extra"]["valid"]["error"]))
    (text,) = [tag for tag in found if tag.startswith("stage/text")]
    assert found[text] == [(1, "stage 0: mega-batches 1 to 2"), (4, "stage 1: mega-batches 3 to 4")]


@pytest.mark.parametrize("epoch", [1, 3])
def test_an_interrupted_run_logs_nothing_twice(tmp_path, monkeypatch, epoch):
    run(STREAM, "sm", tmp_path / "whole", tensorboard_logdir=tmp_path / "expected", **OPTIONS)
    words = {"tensorboard_logdir": tmp_path / "log", "save_interval": 0, **OPTIONS}
    save = _Trainer.save

    def save_and_stop(trainer, progress=None):
        save(trainer, progress)
        if trainer.done == 1 and progress and progress.epoch == epoch:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(_Trainer, "save", save_and_stop)
        with pytest.raises(KeyboardInterrupt):
            run(STREAM, "sm", tmp_path / "run", **words)
    for _ in range(2):  # the second finds nothing to do
        run(STREAM, "sm", tmp_path / "run", **words)
    found, expected = points(tmp_path / "log"), points(tmp_path / "expected")
    assert found.keys() == expected.keys()
    for tag in found:
        steps = [step for step, _ in found[tag]]
        lost = {6} if epoch == 3 and tag.startswith("epoch") else set()
        assert steps == [step for step, _ in expected[tag] if step not in lost]
