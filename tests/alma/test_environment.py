"""Algorithm 1: training, tests and rows at each t, for any waiting time."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alma import environment, metrics
from alma.records import Run
from alma.stages import stages


class Fake:
    """A learner whose error falls with each stage, and that records its calls."""

    def __init__(self, done: int = 0):
        self.trained = []
        self.tested = 0
        self.done = done

    def train(self, stage):
        self.trained.append(stage)
        self.done += 1
        return {"forward": 10.0, "growth": 1.0, "validation": 5.0}

    def test(self):
        self.tested += 1
        return 1 / (1 + self.done), 7.0

    parameters = property(lambda self: 100 * (1 + self.done))
    eval_flops_per_example = 3.0
    peak_memory_bytes = 5
    valid = property(
        lambda self: {"loss": 1.0, "error": 1 / (1 + self.done)} if self.done else None
    )
    details = property(lambda self: {"experts": self.done})


def start(directory, megabatches, waiting_time=1, replay=False):
    config = {
        "learner": "sm",
        "megabatches": megabatches,
        "waiting_time": waiting_time,
        "replay": replay,
    }
    return Run.open(directory, config | {"seed": 0}), stages(megabatches, waiting_time, replay)


@given(st.data())
@settings(max_examples=30, deadline=None)  # fsync takes as long as the disk needs
def test_one_row_per_megabatch_and_one_test_per_model(tmp_path_factory, data):
    megabatches = data.draw(st.integers(1, 12))
    waiting_time = data.draw(st.integers(1, megabatches))
    replay = data.draw(st.booleans())
    run, schedule = start(tmp_path_factory.mktemp("run"), megabatches, waiting_time, replay)
    learner = Fake()
    environment.play(run, learner, schedule, learner.test)
    rows = run.rows
    assert [row["t"] for row in rows] == list(range(megabatches + 1))
    assert learner.tested == len(schedule) + 1
    assert learner.trained == schedule
    for row in rows:
        stage = max((s for s in schedule if s.last <= row["t"]), key=lambda s: s.last, default=None)
        assert row["stage"] == (stage.index if stage else None)
        assert row["trained_on"] == (list(stage.train_on) if stage else [])
        assert row["value"] == (1 / (2 + stage.index) if stage else 1.0)
        completes = stage is not None and stage.last == row["t"]
        assert row["train_flops"] == (11.0 if completes else 0)
        assert row["extra"]["flops"].get("validation", 0) == (
            5.0 if completes else 0
        )  # not in Comp
        valid = {"loss": 1.0, "error": 1 / (2 + stage.index)} if stage else None
        assert row["extra"]["valid"] == valid  # in waiting rows too
        assert row["extra"]["test_flops"] == (7.0 if completes or row["t"] == 0 else 0)
    comp = metrics.cumulative_compute({row["t"]: row["train_flops"] for row in rows})
    assert comp == 11 * len(schedule)


@pytest.mark.parametrize("rows_kept", [4, 5, 6])
def test_a_resumed_learner_completes_the_rows(tmp_path, rows_kept):
    """Existing rows, up to any t at or after the checkpoint's stage, are kept;
    the others are appended."""
    undisturbed, schedule = start(tmp_path / "whole", 7, 2)
    learner = Fake()
    environment.play(undisturbed, learner, schedule, learner.test)
    part, _ = start(tmp_path / "part", 7, 2)
    for row in undisturbed.rows[: rows_kept + 1]:
        part.append(row)
    content = part.results.read_bytes()
    learner = Fake(done=2)  # t = 4
    environment.play(part, learner, schedule, learner.test, stages_done=2)
    assert part.results.read_bytes().startswith(content)
    assert [stage.index for stage in learner.trained] == [2, 3]

    def numbers(run):
        return [{key: value for key, value in row.items() if key != "seconds"} for row in run.rows]

    assert numbers(part) == numbers(undisturbed)


def test_seconds_before_an_interruption_count_in_the_row_of_their_stage(tmp_path):
    run, schedule = start(tmp_path, 4, 2)
    learner = Fake()
    environment.play(run, learner, schedule, learner.test, seconds=1000.0)
    assert [row["seconds"] >= 1000 for row in run.rows] == [False, False, True, False, False]


def test_a_failure_in_training_leaves_the_rows_before_it(tmp_path, monkeypatch):
    run, schedule = start(tmp_path, 3)
    learner = Fake()
    train = Fake.train
    monkeypatch.setattr(
        Fake, "train", lambda self, stage: train(self, stage) if stage.index < 1 else 1 / 0
    )
    with pytest.raises(ZeroDivisionError):
        environment.play(run, learner, schedule, learner.test)
    assert [row["t"] for row in run.rows] == [0, 1]
