"""A stream that grows: its evaluation matrix is that of the stream made in one go, cell by cell.

Trainings and evaluations are the trainer of this module, in this process: milliseconds each. A
model is the list of what it was trained on, and its loss on a document follows from both.
"""

import hashlib
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from launcher import call

from alma.records import Run
from alma.trainer import StageTask
from slurm import arrivals
from slurm.engine import children
from slurm.launch import main
from tests.growing import GrowingStream, assert_same

MEGABATCHES = 6


class Killed(BaseException):
    """The launcher is killed at a write."""


def answer(task: StageTask) -> None:
    """The trainer: write a model, or losses that follow from the models and the documents."""
    if task.action == "train":
        before = Path(task.checkpoint).read_text() if task.checkpoint else ""
        names = " ".join(part.name for part in (*task.earlier, *task.train))
        text = f"{before}\n{task.seeds} {task.replay_share}: {names}"
        Path(task.out, "model.txt").write_text(text)
        task.finish(parameters=10, updates=3, tokens=300, seconds=1.0, checkpoint="model.txt")
        return
    models = [Path(model).read_text() for model in task.members] or [str(task.seeds)]
    losses, documents = {}, {}
    for part in task.evaluate:
        digest = hashlib.sha256("|".join([*models, part.name]).encode()).digest()
        nll = np.random.default_rng(list(digest)).gamma(2, size=part.tokens)
        documents[part.name] = part.document_losses(nll)
        losses[part.name] = nll.mean(), part.tokens
    task.finish(losses, documents, parameters=10 * len(models))


@pytest.fixture
def growing(monthly_stream, tmp_path, monkeypatch) -> GrowingStream:
    """A growing stream in the current folder, and the trainer in this process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("slurm.lm.launcher.signal.signal", lambda *_: None)
    monkeypatch.setattr(children, "run", run_here)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # most of the time
    return GrowingStream(monthly_stream, Path("stream"))


@pytest.fixture
def launch(growing, monkeypatch) -> Callable[..., int]:
    """`launch(*words)`: the exit code of `alma train` on the growing stream."""
    trainer = f"{sys.executable} trainer.py"
    return lambda *words: call(main, monkeypatch, "stream", *words, "--trainer", trainer)


def run_here(command, log, name, watch=None, environment=None) -> None:
    """As `children.run`, in this process."""
    log.touch()
    answer(StageTask.read(command[-1]))


LEARNERS = ("sm", "ens", "gens")
REPLAYS = ((), ("--replay",), ("--replay-share", ".5"))


def chosen(chance: random.Random) -> tuple[list[str], int]:
    """Words of a run, and its waiting time."""
    waiting_time = chance.choice((1, 2, 3))
    words = ["--learner", chance.choice(LEARNERS), "--waiting-time", str(waiting_time)]
    return [*words, *chance.choice(REPLAYS)], waiting_time


def ends(chance: random.Random, waiting_time: int) -> list[int]:
    """Lengths of the stream, of which the last is that of the whole one."""
    possible = range(waiting_time, MEGABATCHES, waiting_time)
    count = chance.randint(1, len(possible)) if possible else 0
    return [*sorted(chance.sample(possible, count)), MEGABATCHES]


@pytest.mark.parametrize("seed", range(5))
def test_a_grown_stream_has_the_matrix_of_one_made_in_one_go(growing, launch, seed):
    chance = random.Random(seed)
    words, waiting_time = chosen(chance)
    for megabatches in ends(chance, waiting_time):
        growing.has(megabatches)
        assert launch(*words, "--out", "grown") == 0
    assert launch(*words, "--out", "at_once") == 0
    assert_same("grown", "at_once")


def alma_test(monkeypatch, capsys, *words: object, code: int = 0) -> str:
    """What `alma test` prints."""
    capsys.readouterr()
    found = call(arrivals.main, monkeypatch, *words)
    said = capsys.readouterr()
    assert found == code, said.err
    return said.out + said.err


def test_alma_test_trains_nothing_and_says_what_is_new(growing, launch, monkeypatch, capsys):
    growing.has(2)
    assert launch("--learner", "sm", "--out", "run") == 0
    assert "nothing new" in alma_test(monkeypatch, capsys, "run")
    growing.has(4)
    before = sorted(Path("run").rglob("*"))
    said = alma_test(monkeypatch, capsys, "run", "--dry-run")
    assert "first 3 models are tested on mega-batches that came later: 6 evaluations" in said
    assert sorted(Path("run").rglob("*")) == before
    said = alma_test(monkeypatch, capsys, "run")
    assert "perplexity of    2024-03  2024-04" in said
    assert "untrained model" in said
    assert "ask with: alma due run" in said
    rows = Run.read("run").rows
    assert [len(row["extra"]["matrix"]) for row in rows] == [4, 4, 4]
    assert not Path("run/stage_02").exists()
    assert "nothing new" in alma_test(monkeypatch, capsys, "run")
    growing.has(6)
    assert launch("--learner", "sm", "--out", "run") == 0
    assert launch("--learner", "sm", "--out", "at_once") == 0
    assert_same("run", "at_once")
