"""A stream that grows while jobs are in SLURM's queue: the matrix of a stream made in one go."""

import random
from functools import partial
from pathlib import Path

import pytest
from launcher import call
from month import SEEDS, Queue, chosen, ends, matrix, run_here

from alma.errors import UserError
from alma.records import Run
from slurm import arrivals, cancel, status
from slurm.engine import children
from tests.growing import assert_same
from tests.machine_fields import without_machine_fields


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
    words = ("--learner", "sm", "--out", "run", "--cluster", "slurm", "--dry-run")
    capsys.readouterr()
    launch(*words)
    array = capsys.readouterr().out.splitlines()[0]
    assert array.startswith("# <1> ")
    assert array.count("run test of ") == 3
    test_on_slurm = partial(call, arrivals.main, monkeypatch, "run", "--cluster", "slurm")
    for _ in range(2):  # the second time they are in the queue
        assert test_on_slurm() == 0
        assert len(slurm.jobs) == 3
    capsys.readouterr()
    assert call(status.main, monkeypatch, "run") == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "test of stage 1 on 2024-03 queued" in output
    assert "evaluation of stage 1 done" in output
    assert call(cancel.main, monkeypatch, "run") == 0
    assert "cancelled 3 jobs" in capsys.readouterr().out
    assert not slurm.jobs
    assert test_on_slurm() == 0
    slurm.run(3)
    assert call(status.main, monkeypatch, "run") == 0
    assert [len(values) for values in matrix("run").values()] == [3, 3, 3]


def test_lost_rows_are_written_again_by_a_launch_that_does_not_wait(growing, launch, monkeypatch):
    """From the measurements of each stage; one of those that is lost is measured again."""
    slurm = Queue(monkeypatch, random.Random(0))
    growing.has(3)
    words = ("--learner", "sm", "--out", "run", "--cluster", "slurm")
    launch(*words)
    slurm.run(10)
    results = Path("run/results.jsonl")
    complete = results.read_bytes()
    before = without_machine_fields(Run.read("run").rows)
    for rest in (b"", complete[: len(complete) // 2]):  # in the middle of a row
        results.write_bytes(rest)
        launch(*words)
        assert results.read_bytes() == complete
        assert not slurm.jobs
    results.unlink()
    Path("run/stage_01/result.json").unlink()
    launch(*words)
    assert len(slurm.jobs) == 1
    slurm.run(1)
    assert without_machine_fields(Run.read("run").rows) == before
