"""A stream that grows: its evaluation matrix is that of the stream made in one go, cell by cell.

Trainings and evaluations are the trainer of this module, in this process: milliseconds each. A
model is the list of what it was trained on, and its loss on a document follows from both.
"""

import dataclasses
import hashlib
import math
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from launcher import call

from alma import json_lines, records
from alma.evaluations import HELD_OUT
from alma.records import MACHINE_FIELDS, Run
from alma.stream import Stream
from alma.trainer import StageTask
from slurm.engine import children
from slurm.launch import main

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


@pytest.fixture(scope="module")
def whole(text, tmp_path_factory) -> Path:
    """An ordered stream of six mega-batches with periods."""
    from data_prep.__main__ import main as data_prep

    out = tmp_path_factory.mktemp("whole") / "stream"
    lines = (text / "help.txt").read_text().split("\n\n")
    sources = []
    for number in range(MEGABATCHES):
        source = out.with_name(f"s{number}.txt")
        source.write_text("\n\n".join(lines[number::MEGABATCHES]) + "\n")
        sources.append(f"s{number}={source}")
    sizes = "--words 900 --eval-words 300 --valid-words 200 --vocab-size 300"
    words = [*sources, "--ordered", "--out", str(out), *sizes.split()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["data", *words, "--max-document-words", "40"])
        data_prep()
    stream = Stream.load(out)
    dated = {}
    for name in ("megabatches", "held_out", "held_out_valid"):
        parts = enumerate(getattr(stream, name), start=1)
        dated[name] = tuple(dataclasses.replace(part, period=f"2024-{t:02d}") for t, part in parts)
    dataclasses.replace(stream, **dated).write()
    return out


@dataclass
class Growing:
    """A stream with the first mega-batches of the whole one, and launches on it."""

    whole: Stream
    folder: Path
    launch: Callable[..., int]

    def has(self, megabatches: int) -> None:
        """Let the stream have so many mega-batches, as `alma data --append` does."""
        parts = {}
        for name in ("megabatches", "held_out", "held_out_valid"):
            parts[name] = getattr(self.whole, name)[:megabatches]
        dataclasses.replace(self.whole, directory=self.folder, **parts).write()


@pytest.fixture
def growing(whole, tmp_path, monkeypatch) -> Growing:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "stream"
    shutil.copytree(whole, folder)
    monkeypatch.setattr("slurm.lm.launcher.signal.signal", lambda *_: None)
    monkeypatch.setattr(children, "run", run_here)

    def launch(*words: object) -> int:
        trainer = f"{sys.executable} trainer.py"
        return call(main, monkeypatch, "stream", *words, "--trainer", trainer)

    return Growing(Stream.load(folder), folder, launch)


def run_here(command, log, name, watch=None, environment=None) -> None:
    """As `children.run`, in this process."""
    log.touch()
    answer(StageTask.read(command[-1]))


def record_of(run: str) -> tuple[list[dict], dict[str, np.ndarray]]:
    """The rows without what measures the machine, and the losses of single documents."""
    rows = []
    for row in Run.read(run).rows:
        rows.append({key: row[key] for key in row if key not in MACHINE_FIELDS})
    files = sorted(Path(run, HELD_OUT).glob("*.npy"))
    return rows, {file.name: np.load(file) for file in files}


def assert_same(run: str, other: str) -> None:
    """The records of two runs are the same, cell by cell and document by document."""
    rows, documents = record_of(run)
    other_rows, other_documents = record_of(other)
    for row, other_row in zip(rows, other_rows, strict=True):
        assert row == other_row
        assert not any(map(math.isnan, row["extra"]["matrix"]))
        assert len(row["extra"]["matrix"]) == MEGABATCHES
    assert documents.keys() == other_documents.keys()
    for name, losses in documents.items():
        assert np.array_equal(losses, other_documents[name])


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
def test_a_grown_stream_has_the_matrix_of_one_made_in_one_go(growing, seed):
    chance = random.Random(seed)
    words, waiting_time = chosen(chance)
    for megabatches in ends(chance, waiting_time):
        growing.has(megabatches)
        assert growing.launch(*words, "--out", "grown") == 0
    assert growing.launch(*words, "--out", "at_once") == 0
    assert_same("grown", "at_once")
