"""Two of the same job at once, as after SLURM declared one dead; launches check before all else."""

import pickle
import random
import sys
import threading
import time
from pathlib import Path

import pytest
from launcher import call
from month import Queue, run_here

from alma.evaluations import EVALUATIONS
from alma.files import LOCK, locked
from data_prep.__main__ import main as alma_data
from slurm.arrivals import main as alma_test
from slurm.engine import children
from slurm.launch import main as alma_train
from slurm.vision import arrivals
from slurm.vision.__main__ import main as alma_images
from slurm.vision.part import PartJob
from tests.vision.conftest import command as images_here
from tests.vision.test_grown import forget
from tests.vision.test_weeks import arrive

SLURM = ("--cluster", "slurm", "--timeout-min", "30")


class Counted:
    """`children.run` that counts; its child is `run`."""

    def __init__(self, monkeypatch, run=run_here):
        self.count = 0
        self.run = run
        monkeypatch.setattr(children, "run", self)

    def __call__(self, command, log, name, watch=None, environment=None) -> None:
        self.count += 1
        self.run(command, log, name)


def waits_for(job, lock: str, started: Counted, marker: str) -> None:
    """Start a job while another one of its kind holds the lock, which then writes the marker."""
    folder = job.marker.parent if lock.endswith("part.lock") else job.directory
    before = started.count
    thread = threading.Thread(target=job.work)
    with locked(folder, lock):
        thread.start()
        time.sleep(0.5)
        assert started.count == before, "it started beside the other one"
        job.marker.write_text(marker)
    thread.join(30)
    assert not thread.is_alive()


@pytest.mark.parametrize(
    ("name", "lock"),
    [
        ("untrained", ".untrained.lock"),
        ("stage 1", LOCK),
        ("evaluation of stage 1", ".evaluate.lock"),
        ("test of stage 0 on 2024-03", LOCK),
    ],
)
def test_a_job_of_text_waits_for_its_double_and_does_nothing_twice(
    growing, launch, monkeypatch, name, lock
):
    slurm = Queue(monkeypatch, random.Random(0))
    started = Counted(monkeypatch)
    words = ("--learner", "sm", "--out", "run", "--cluster", "slurm")
    growing.has(2)
    launch(*words)
    jobs = [pickle.loads(text) for text in slurm.jobs.values()]
    slurm.run(10)
    growing.has(3)
    launch(*words)
    jobs += [pickle.loads(text) for text in slurm.jobs.values()]
    slurm.run(10)
    (job,) = [job for job in jobs if job.name == name]
    marker = job.marker.read_text()
    job.marker.unlink()
    Path("run", EVALUATIONS).unlink()  # where a test would find what its double has measured
    before = started.count
    waits_for(job, lock, started, marker)
    assert started.count == before, "the other one had done it"


@pytest.mark.parametrize("kind", ["sweep", "test"])
def test_a_job_of_images_waits_for_its_double(monkeypatch, tmp_path, kind):
    """Then its command finds nothing to do."""
    started = Counted(monkeypatch, lambda *_: None)
    common = {"run": tmp_path, "directory": tmp_path, "marker": tmp_path / "part.json", "cpus": 1}
    names = {"name": kind, "array": "alma-x"}
    if kind == "sweep":
        job = PartJob(flags=(), part="1/1", runs=("gone",), **common, **names)
    else:
        job = arrivals.TestJob(words=("run",), **common, **names)
    waits_for(job, ".part.lock", started, "{}")


LAUNCHES = {
    "train": (alma_train, "stream --learner sm --out run --trainer", ["python trainer.py"]),
    "test of text": (alma_test, "trained", []),
    "images": (alma_images, "--hidden 2 --megabatches 2 --out run", []),
    "test of images": (alma_test, "weeks", []),
    "data": (
        alma_data,
        "corpus.txt --mega-batches 2 --words 9 --valid-words 9 --vocab-size 99 --out run",
        [],
    ),
}


def written() -> dict[Path, int]:
    """The files and folders here, but those of the stand-ins, with the times of their writes."""
    paths = [path for path in Path().rglob("*") if path.parts[0] != "bin"]
    return {path: path.stat().st_mtime_ns for path in paths}


@pytest.mark.parametrize("name", LAUNCHES)
def test_every_launch_asks_sbatch_before_it_writes(
    growing, launch, slurm, monkeypatch, capsys, name
):
    main, words, last = LAUNCHES[name]
    growing.has(2)
    Path("corpus.txt").write_text("word " * 99)
    if name == "test of text":
        launch("--learner", "sm", "--out", "trained")
        growing.has(3)
    if name == "test of images":
        arrive("shop", 1, 2)
        flags = "--data-root shop --by week --arch mlp --hidden 2 --epochs 1 --no-augment "
        forget()
        images_here(monkeypatch, *f"{flags} --batch-size 8 --out weeks".split())
        arrive("shop", 3)
        forget()
    monkeypatch.setenv("PATH", f"{slurm.folder}:{Path(sys.executable).parent}")
    slurm.has(sinfo="", scontrol="")
    slurm.fails(sbatch="allocation failure: Invalid account")
    before = written()
    capsys.readouterr()
    assert call(main, monkeypatch, *words.split(), *last, *SLURM) == 2
    assert "sbatch would refuse the" in capsys.readouterr().err.splitlines()[-1]
    assert all("--test-only" in words for words in slurm.calls("sbatch"))
    assert written() == before
