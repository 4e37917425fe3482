"""Nodes of a job of the engine transformers: the first one answers, the others train along."""

import json
from pathlib import Path

import pytest

from alma.trainer import TRAINED, StageTask
from slurm.lm import trainer
from slurm.lm.meeting import words_of_node


def task(out: Path, t: int = 1) -> StageTask:
    return StageTask(
        action="train",
        out=str(out),
        stream="S",
        dictionary=9,
        learner="sm",
        stage=0,
        t=t,
        megabatches=1,
        waiting_time=1,
        valid=(),
        seeds=(1,),
        budget={"updates": 2},
    )


@pytest.fixture
def started(monkeypatch) -> list[list[str]]:
    """Command lines that would have been started."""
    commands: list[list[str]] = []
    monkeypatch.setattr(trainer.children, "run", lambda command, *_: commands.append(command))
    return commands


def test_words_of_a_node():
    assert words_of_node(1, 0, "7.0") == []
    words = ["--num_machines", "2", "--machine_rank", "1", "--attempt", "7.0"]
    assert words_of_node(2, 1, "7.0") == words


def test_another_node_writes_the_task_and_no_answer(started, tmp_path):
    trainer.take_part(task(tmp_path), ["engine", "stage.json"], tmp_path / "log", "training")
    assert started == [["engine", "stage.json"]]
    assert json.loads((tmp_path / "stage.json").read_text())["t"] == 1
    assert not (tmp_path / TRAINED).exists()


def test_another_node_starts_nothing_if_the_first_has_answered(started, tmp_path):
    trainer.take_part(task(tmp_path), ["engine"], tmp_path / "log", "training")
    (tmp_path / "model").mkdir()
    answer = {"parameters": 1, "updates": 2, "tokens": 3, "checkpoint": "model"}
    (tmp_path / TRAINED).write_text(json.dumps(answer))
    trainer.take_part(task(tmp_path), ["engine"], tmp_path / "log", "training")
    assert len(started) == 1
    trainer.take_part(task(tmp_path, t=2), ["engine"], tmp_path / "log", "training")
    assert len(started) == 2
