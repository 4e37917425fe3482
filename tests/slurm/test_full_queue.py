"""A real SLURM that lets this user have three jobs in its queue: --wait submits the rest."""

import functools
import itertools
import sys
from pathlib import Path

import pytest
from launcher import ROOT, call

from alma.records import Run
from alma.stream import Stream
from data_prep import cluster as shares
from data_prep.__main__ import main as alma_data
from slurm.arrivals import main as alma_test
from slurm.engine import queue
from slurm.launch import main as alma_train
from slurm.vision.__main__ import main as alma_images
from tests.machine_fields import without_machine_fields
from tests.slurm import accounting
from tests.slurm.cluster import FINAL, Cluster, missing
from tests.slurm.test_trainer import BESIDE, TRAINER
from tests.vision.conftest import command as images_here
from tests.vision.test_grown import forget
from tests.vision.test_weeks import arrive

pytestmark = pytest.mark.thorough
SLURM = "--cluster slurm --gpus-per-node 0 --timeout-min 30".split()


@pytest.fixture(scope="module")
def small_queue():
    if name := missing() or missing(accounting.DAEMONS):
        pytest.skip(f"{name} is not installed")
    with Cluster(1, most_jobs=3) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def here(small_queue, tmp_path, monkeypatch):
    """This process uses the cluster, empty at first, and looks at its queue more often."""
    small_queue.until(lambda: all(job["JobState"] in FINAL for job in small_queue.jobs().values()))
    for name, value in small_queue.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr("slurm.lm.launcher.signal.signal", lambda *_: None)
    monkeypatch.setattr(queue, "wait", functools.partial(queue.wait, seconds=0.5))
    monkeypatch.setattr(shares, "POLL_SECONDS", 0.5)
    monkeypatch.chdir(tmp_path)


def rows(run: Path | str) -> list[dict]:
    return without_machine_fields(Run.read(run).rows)


def test_text(stream, monkeypatch, capsys):
    """The array of a stage is parted; its followers wait for the models that they need."""
    Path("beside.py").write_text(BESIDE)
    Path("my_trainer.py").write_text(TRAINER)
    monkeypatch.setenv("SLOW", "0.1")
    trainer = f"{sys.executable} my_trainer.py"
    words = [stream, "--learner", "sm", "--seeds", "0-3", "--stages", "2", "--trainer", trainer]
    assert call(alma_train, monkeypatch, *words, "--out", "local") == 0
    on_slurm = [*words, "--out", "run", *SLURM]
    assert call(alma_train, monkeypatch, *on_slurm) == 2
    refusal = capsys.readouterr().err
    assert "3 jobs are submitted; rerun the command to submit the rest, or give --wait" in refusal
    assert call(alma_train, monkeypatch, *on_slurm, "--wait") == 0
    assert "submits the rest when jobs have ended" in capsys.readouterr().err
    for seed in range(4):
        assert rows(f"run_s{seed}") == rows(f"local_s{seed}")
        (log,) = Path(f"run_s{seed}/stage_01").rglob("train.log")
        assert log.read_text().count("$ ") == 1, "trained once"


def test_images_and_their_tests(monkeypatch):
    flags = "--data-root shop --by week --arch mlp --hidden 2 --epochs 1 --no-augment "
    flags += "--batch-size 8 --optimizer adadelta --seeds 0-4 --out"
    arrive("shop", 1, 2)
    slurm = ["--runs-per-job", "1", *SLURM, "--wait"]
    assert call(alma_images, monkeypatch, *flags.split(), "runs", *slurm) == 0
    forget()
    images_here(monkeypatch, *flags.split(), "local")
    for seed in range(5):
        assert rows(f"runs/sm_w1_h2_s{seed}") == rows(f"local/sm_w1_h2_s{seed}")
    arrive("shop", 3)
    forget()
    assert call(alma_test, monkeypatch, "runs", *SLURM, "--wait") == 0
    for run in Path("runs").glob("sm_*"):
        assert len(Run.read(run).late_evaluations) == 3


def test_data(monkeypatch):
    syllables = [first + second for first in "bdfgklmnprst" for second in "aeiou"]
    words = ["".join(pair) for pair in itertools.product(syllables, repeat=2)]
    Path("corpus").mkdir()
    for number in range(5):
        texts = [" ".join(words[start :: 50 + number]) for start in range(40)]
        Path(f"corpus/{number}.txt").write_text("\n\n".join(texts))
    flags = "corpus --mega-batches 2 --words 1500 --valid-words 300 --vocab-size 120".split()
    assert call(alma_data, monkeypatch, *flags, "--out", "local") == 0
    slurm = ["--cluster", "slurm", "--workers", "5"]
    assert call(alma_data, monkeypatch, *flags, "--out", "made", *slurm) == 0
    made, local = Stream.load("made"), Stream.load("local")
    assert [part.files for part in made.parts] == [part.files for part in local.parts]


def test_other_jobs_that_fill_the_queue(small_queue, stream, monkeypatch, capsys):
    """Are waited for; a limit that allows no job ends the command."""
    Path("beside.py").write_text(BESIDE)
    Path("my_trainer.py").write_text(TRAINER)
    monkeypatch.setattr("slurm.engine.submission._FULL_SECONDS", 0.5)
    trainer = f"{sys.executable} my_trainer.py"
    words = [stream, "--learner", "sm", "--stages", "1", "--trainer", trainer, *SLURM, "--wait"]
    others = [small_queue.submit("sleep 3") for _ in range(3)]
    assert call(alma_train, monkeypatch, *words, "--out", "run") == 0
    assert small_queue.state(others[0]) == "COMPLETED"
    accounting.limit_jobs(small_queue, 0)
    capsys.readouterr()
    assert call(alma_train, monkeypatch, *words, "--out", "none") == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert "no job of yours is in the queue, so waiting does not help: ask who set" in last
    accounting.limit_jobs(small_queue, 3)
