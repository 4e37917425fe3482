"""A stream that grows: its evaluation matrix is that of the stream made in one go, cell by cell.

Trainings and evaluations are the trainer of this module, in this process: milliseconds each. A
model is the list of what it was trained on, and its loss on a document follows from both.
"""

import hashlib
import json
import os
import pickle
import pwd
import random
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from launcher import call

from alma import records
from alma.errors import UserError
from alma.records import Run
from alma.trainer import StageTask
from slurm import arrivals, cancel, status
from slurm.engine import children, queue, submission
from slurm.engine.squeue import JobState
from slurm.launch import main
from tests.growing import GrowingStream, assert_same

MEGABATCHES = 6
SEEDS = [pytest.param(seed, marks=[pytest.mark.thorough] if seed > 1 else []) for seed in range(30)]
"""Of the choice of the run and of the points at which its stream grows; few in `make test`."""


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

    def run(*words: object) -> int:
        stream = [] if "--stream" in words else ["stream"]
        return call(main, monkeypatch, *stream, *words, "--trainer", trainer)

    return run


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


@pytest.mark.parametrize("seed", SEEDS)
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


class Killer:
    """Kills the launcher before or after a write that is chosen by chance."""

    def __init__(self, monkeypatch, chance: random.Random):
        self.chance = chance
        self.writes_left = 0
        self.kills = 0
        for place, name in ((os, "replace"), (records, "append_line")):
            monkeypatch.setattr(place, name, self.around(getattr(place, name)))

    def around(self, write: Callable) -> Callable:
        """`write` that may kill before or after it."""

        def run(*arguments) -> None:
            self.writes_left -= 1
            is_last = self.writes_left == 0
            before = self.chance.random() < 0.5
            if is_last and before:
                self.kill()
            write(*arguments)
            if is_last:
                self.kill()

        return run

    def kill(self) -> None:
        self.kills += 1
        raise Killed

    def launched(self, launch: Callable[[], object], most: int) -> None:
        """Launch until that ends, and kill up to `most` times."""
        for _ in range(most):
            self.writes_left = self.chance.randint(1, 12)
            try:
                launch()
            except Killed:
                continue
            break
        self.writes_left = 0
        launch()


@pytest.mark.parametrize("seed", SEEDS)
def test_kills_between_any_two_writes_repeat_and_lose_nothing(growing, launch, monkeypatch, seed):
    chance = random.Random(seed)
    words, waiting_time = chosen(chance)
    killer = Killer(monkeypatch, chance)
    for megabatches in ends(chance, waiting_time):
        growing.has(megabatches)
        tests_first = partial(call, arrivals.main, monkeypatch, "grown")
        if Path("grown").exists() and chance.random() < 0.5:
            killer.launched(tests_first, 3)
        killer.launched(partial(launch, *words, "--out", "grown"), 6)
    assert launch(*words, "--out", "at_once") == 0
    assert_same("grown", "at_once")
    assert killer.kills


class Queue:
    """A SLURM whose jobs are pickled, and run here when `run` is called."""

    def __init__(self, monkeypatch, chance: random.Random):
        self.chance = chance
        self.jobs: dict[str, bytes] = {}  # that wait, by id
        self.count = 0
        user = pwd.getpwuid(os.getuid()).pw_name
        self.state = JobState("PENDING", user=user, name="alma-test")
        monkeypatch.setattr(queue, "ask", self.ask)
        monkeypatch.setattr(submission, "scancel", self.scancel)
        monkeypatch.setattr(submission, "to_slurm", lambda folder: self.send)
        monkeypatch.setattr(submission, "check", lambda resources: None)
        monkeypatch.setattr(submission, "largest_array", lambda: 1000)
        monkeypatch.setattr(shutil, "which", lambda name, path=None: f"/bin/{name}")
        place = SimpleNamespace(raw_job_id="1", num_nodes=1, num_tasks=1, global_rank=0)
        monkeypatch.setattr("submitit.JobEnvironment", lambda: place)

    def ask(self, ids=None) -> dict[str, JobState]:
        return {job_id: self.state for job_id in ids or self.jobs if job_id in self.jobs}

    def scancel(self, ids) -> None:
        for job_id in ids:
            self.jobs.pop(job_id, None)

    def send(self, name, jobs, resources, dependency) -> list[str]:
        ids = [str(self.count + number) for number in range(1, len(jobs) + 1)]
        self.count += len(jobs)
        self.jobs |= {job_id: pickle.dumps(job) for job_id, job in zip(ids, jobs, strict=True)}
        return ids

    def run(self, most: int) -> None:
        """Run up to so many jobs, in an order of chance that their dependencies allow."""
        for _ in range(most):
            jobs = {job_id: pickle.loads(text) for job_id, text in self.jobs.items()}
            ready = [job_id for job_id, job in jobs.items() if all(map(Path.exists, job.needs))]
            if not ready:
                return
            job_id = self.chance.choice(ready)
            jobs[job_id].work()
            del self.jobs[job_id]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_stream_that_grows_while_jobs_are_queued(growing, launch, monkeypatch, seed):
    chance = random.Random(seed)
    words, waiting_time = chosen(chance)
    lengths = ends(chance, waiting_time)
    slurm = Queue(monkeypatch, chance)

    def on_slurm() -> None:
        assert launch(*words, "--out", "grown", "--cluster", "slurm") == 0

    def run_and_grow(command, log, name, watch=None, environment=None) -> None:
        """A job during which the stream may grow, and be launched on."""
        run_here(command, log, name)
        if lengths and chance.random() < 0.1:
            growing.has(lengths.pop(0))
            if not lengths or chance.random() < 0.5:
                on_slurm()

    monkeypatch.setattr(children, "run", run_and_grow)
    while lengths:
        growing.has(lengths.pop(0))
        on_slurm()
        if chance.random() < 0.3:
            assert call(arrivals.main, monkeypatch, "grown", "--cluster", "slurm") == 0
        slurm.run(chance.randint(0, 30))
    slurm.run(100)
    assert not slurm.jobs
    assert launch(*words, "--out", "at_once") == 0
    assert_same("grown", "at_once")


def matrix(run: str) -> dict[int | None, list[float]]:
    """The evaluation matrix of a run, by stage."""
    return {row["stage"]: row["extra"]["matrix"] for row in Run.read(run).rows}


def test_a_deleted_checkpoint_is_a_named_hole(growing, launch, monkeypatch, capsys):
    growing.has(3)
    launch("--learner", "gens", "--out", "run")
    next(Path("run/stage_00").rglob("model.txt")).unlink()  # deployed after each stage
    growing.has(4)
    said = alma_test(monkeypatch, capsys, "run", "--dry-run")
    assert "run: stage 0: model.txt is deleted: not tested on 2024-04" in said
    assert "run: 3 models are deleted and cannot be tested" in said
    assert "first 1 models are tested" in said
    said = alma_test(monkeypatch, capsys, "run")
    assert "stage 2: model.txt is deleted: not tested on 2024-04" in said
    assert {stage: len(values) for stage, values in matrix("run").items()} == {
        None: 4,
        0: 3,
        1: 3,
        2: 3,
    }
    said = alma_test(monkeypatch, capsys, "run")
    assert "stage 2: model.txt is deleted" in said
    assert "nothing new" in said


def test_only_the_newest_stages_are_tested(growing, launch, monkeypatch, capsys):
    growing.has(3)
    launch("--learner", "sm", "--out", "run", "--test-past", "1")
    growing.has(4)
    launch("--learner", "sm", "--out", "run", "--test-past", "1")
    lengths = {stage: len(values) for stage, values in matrix("run").items()}
    assert lengths == {None: 3, 0: 3, 1: 3, 2: 4, 3: 4}
    growing.has(5)
    assert "nothing new" in alma_test(monkeypatch, capsys, "run", "--test-past", "0")
    alma_test(monkeypatch, capsys, "run")  # as it was launched
    assert len(matrix("run")[3]) == 5
    assert len(matrix("run")[2]) == 4
    alma_test(monkeypatch, capsys, "run", "--test-past", "9", "--jobs", "2")
    launch("--learner", "sm", "--out", "run", "--test-past", "9")
    growing.has(6)
    launch("--learner", "sm", "--out", "run")
    launch("--learner", "sm", "--out", "at_once")
    assert_same("run", "at_once")


def test_a_result_that_has_more_megabatches_than_the_run(growing, launch, monkeypatch):
    """The stream grows during the first job: the row ends with the run's mega-batches."""

    def grow(*words, **keywords) -> None:
        growing.has(5)
        run_here(*words, **keywords)

    growing.has(3)
    monkeypatch.setattr(children, "run", grow)
    launch("--learner", "sm", "--out", "run")
    assert set(map(len, matrix("run").values())) == {3}
    names = []
    monkeypatch.setattr(children, "run", lambda *words: names.append(words[2]) or run_here(*words))
    assert call(arrivals.main, monkeypatch, "run") == 0
    assert names == ["test of untrained model on 2024-04 to 2024-05"]
    assert set(map(len, matrix("run").values())) == {5}
    assert len(Run.read("run").late_evaluations) == 8


def test_what_alma_test_cannot_test_is_one_line(growing, launch, monkeypatch, capsys):
    growing.has(3)
    launch("--learner", "sm", "--out", "run")
    Path("stream").rename("moved")
    said = alma_test(monkeypatch, capsys, "run", code=2)
    assert said.startswith("error: run: no stream in stream")
    assert "give its new place as --stream STREAM" in said
    assert "nothing new" in alma_test(monkeypatch, capsys, "run", "--stream", "moved")
    info = json.loads(Path("run/run.json").read_text())
    Path("run/run.json").write_text(json.dumps(info | {"command": "true"}))
    assert "no command of `alma train`" in alma_test(monkeypatch, capsys, "run", code=2)
    assert "0 to" not in alma_test(monkeypatch, capsys, "run", "--test-past", "-1", code=2)


def test_late_evaluations_come_before_all_trainings(growing, launch, capsys):
    Path("e.yaml").write_text("learner: [sm, ens]\n")
    words = ("--stream", "stream", "--out", "runs", "e.yaml")
    growing.has(2)
    launch(*words)
    growing.has(3)
    capsys.readouterr()
    launch(*words)
    said = capsys.readouterr()
    orders = [line.partition(" ")[2] for line in (said.out + said.err).splitlines()]
    begun = [line for line in orders if line.endswith("started")]
    is_late = [line.startswith("test of") for line in begun]
    assert is_late.count(True) == 6
    assert is_late == sorted(is_late, reverse=True)


def test_a_short_last_stage_is_not_trained_once_the_stream_has_grown(
    growing, launch, monkeypatch, capsys
):
    slurm = Queue(monkeypatch, random.Random(0))
    words = ("--learner", "sm", "--waiting-time", "2", "--out", "grown")
    growing.has(3)
    launch(*words, "--cluster", "slurm")
    growing.has(4)
    with pytest.raises(UserError, match="stage 1 was planned to end with mega-batch 3; the stream"):
        slurm.run(10)
    assert not Path("grown/stage_01").exists()
    slurm.jobs.clear()  # as SLURM does with the failed job and its dependents
    launch(*words, "--cluster", "slurm")
    slurm.run(10)
    growing.has(6)
    launch(*words)
    launch(*words[:-1], "at_once")
    assert_same("grown", "at_once")


def test_status_and_cancel_know_the_jobs(growing, launch, monkeypatch, capsys):
    growing.has(2)
    launch("--learner", "sm", "--out", "run")
    growing.has(3)
    slurm = Queue(monkeypatch, random.Random(0))
    monkeypatch.setattr(cancel, "ask", slurm.ask)
    monkeypatch.setattr(cancel, "scancel", slurm.scancel)
    test_on_slurm = partial(call, arrivals.main, monkeypatch, "run", "--cluster", "slurm")
    for _ in range(2):  # the second time they are in the queue
        assert test_on_slurm() == 0
        assert len(slurm.jobs) == 3
    capsys.readouterr()
    assert call(status.main, monkeypatch, "run") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "test of stage 1 on 2024-03 queued" in said
    assert "evaluation of stage 1 done" in said
    assert call(cancel.main, monkeypatch, "run") == 0
    assert "cancelled 3 jobs" in capsys.readouterr().out
    assert not slurm.jobs
    assert test_on_slurm() == 0
    slurm.run(3)
    assert call(status.main, monkeypatch, "run") == 0
    assert [len(values) for values in matrix("run").values()] == [3, 3, 3]
