"""For tests of a stream that grows: a trainer in this process, a killer, a queue of SLURM."""

import hashlib
import os
import pickle
import pwd
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from launcher import call

from alma import records
from alma.records import Run
from alma.trainer import StageTask
from slurm import arrivals
from slurm.engine import queue, submission
from slurm.engine.squeue import JobState

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
    losses = {}
    documents = {}
    for part in task.evaluate:
        digest = hashlib.sha256("|".join([*models, part.name]).encode()).digest()
        nll = np.random.default_rng(list(digest)).gamma(2, size=part.tokens)
        documents[part.name] = part.document_losses(nll)
        losses[part.name] = nll.mean(), part.tokens
    task.finish(losses, documents, parameters=10 * len(models))


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


def alma_test(monkeypatch, capsys, *words: object, code: int = 0) -> str:
    """What `alma test` prints."""
    capsys.readouterr()
    exit_code = call(arrivals.main, monkeypatch, *words)
    streams = capsys.readouterr()
    assert exit_code == code, streams.err
    return streams.out + streams.err


def matrix(run: str) -> dict[int | None, list[float]]:
    """The evaluation matrix of a run, by stage."""
    return {row["stage"]: row["extra"]["matrix"] for row in Run.read(run).rows}


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
