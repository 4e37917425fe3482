"""Concurrent jobs on one machine: rows, failures, and each job's share of GPUs and memory."""

import os
import re
import signal
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from launcher import ended, make, wait_for

from slurm.engine.machine import Machine, devices
from slurm.lm import local


@pytest.fixture
def gpus(tmp_path, monkeypatch):
    """Folder with an nvidia-smi for `count` GPUs of 32 GiB; CUDA_VISIBLE_DEVICES is unset."""

    def has(count: int) -> str:
        tool = tmp_path / "bin" / "nvidia-smi"
        tool.parent.mkdir(exist_ok=True)
        tool.write_text("#!/bin/sh\n" + "echo 32768\n" * count)
        tool.chmod(0o755)
        return str(tool.parent)

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return has


@pytest.mark.parametrize(
    ("count", "jobs", "visible", "expected"),
    [
        (4, 2, None, ["0,1", "2,3"]),
        (4, 1, None, ["0,1,2,3"]),
        (5, 2, None, ["0,1", "2,3"]),
        (8, 2, "6,3", ["6", "3"]),
        (8, 2, "GPU-8a,GPU-9b, GPU-7c,GPU-6d", ["GPU-8a,GPU-9b", "GPU-7c,GPU-6d"]),
        (8, 2, "1,2,-1,3,4", ["1", "2"]),
        (1, 2, None, [None, None]),
        (4, 2, "", [None, None]),
        (0, 2, None, [None, None]),
    ],
)
def test_slots_share_the_visible_gpus_evenly(gpus, monkeypatch, count, jobs, visible, expected):
    monkeypatch.setenv("PATH", gpus(count))
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert devices(jobs) == expected
    share = len((expected[0] or "").split(",")) if expected[0] else 0
    assert Machine.here().slot(jobs, on_cpu=True).gpus == (2**35,) * share


def test_each_training_sees_the_gpus_of_its_slot_alone(gpus, tmp_path, monkeypatch):
    run = make(tmp_path / "x", learner="ens", environment={"FAKE_SLEEP": "0.3"})
    monkeypatch.setenv("PATH", gpus(4), prepend=":")
    run.run("--jobs", "2", "--stages", "1")
    logs = [(run.out / f"stage_00/member_{k}/train.log").read_text() for k in (0, 1)]
    assert sorted(re.findall("GPUs: (.*)", "".join(logs))) == ["0,1", "2,3"]


@pytest.mark.parametrize(("jobs", "variables"), [(1, None), (2, None), (2, "3")])
def test_trainings_side_by_side_share_the_cores(tmp_path, monkeypatch, jobs, variables):
    """Unless the user gives the number of threads. Idle ones spin: too many take ten times as
    long."""
    run = make(tmp_path / "x")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if variables:
        monkeypatch.setenv("OMP_NUM_THREADS", variables)
    run.run("--jobs", str(jobs), "--stages", "1")
    (threads,) = re.findall("threads: (.*)", (run.out / "stage_00/train.log").read_text())
    share = str(max(1, len(os.sched_getaffinity(0)) // jobs))
    assert threads == (variables or (share if jobs > 1 else "None"))


def test_progress_counts_updates_of_this_launch_over_all_trainings(tmp_path, monkeypatch, capsys):
    """A resumed training's earlier updates count as done, but not for the time left."""
    first, second = (
        SimpleNamespace(
            marker=name, directory=tmp_path / name, training=SimpleNamespace(updates=40, earlier=e)
        )
        for name, e in (("a", 0), ("b", 40))
    )
    monkeypatch.setattr(local, "TrainJob", SimpleNamespace)
    monkeypatch.setattr(local, "LINE_SECONDS", -1)
    (tmp_path / "b").mkdir()
    (tmp_path / "b/checkpoint_last.pt").touch()
    line = 'time | INFO | train_inner | {{"loss": "5.1", "num_updates": "{}"}}'
    with local.TrainingProgress([first, second]) as progress:
        progress.count(first, 40, skipped=True)
        assert progress.left == ""
        read = progress.watch(second)
        read("time | INFO | something else")
        read('time | INFO | train_inner | {"lo')  # mixed lines of several processes
        read(line.format(50))  # resumed at update 10 of 40
        monkeypatch.setattr(local, "LINE_SECONDS", 60)
        read(line.format(55))
        monkeypatch.setattr(local, "LINE_SECONDS", -1)
        progress.began = time.monotonic() - 60
        read(line.format(60))
    endings = [text.rpartition("updates, ")[2] for text in capsys.readouterr().err.splitlines()]
    assert endings == ["loss 5.1", "loss 5.1; about 02:00 left"]  # 10 updates a minute, 20 to come
    assert (progress.skipped, sum(progress.updates.values()), progress.total) == (50, 60, 80)


def test_jobs_side_by_side_give_the_same_rows(tmp_path, expected):
    """Two seeds at a time; a second launch finds everything done."""
    both = make(tmp_path / "x", learner="gmoe", environment={"FAKE_SLEEP": "0.05"})
    both.run("--jobs", "3", "--seeds", "0-1")
    first, second = (replace(both, run_name=f"run_s{seed}").rows for seed in (0, 1))
    assert first == expected
    assert [row["value"] for row in first] != [row["value"] for row in second]
    trained = len(both.pids.read_text().split())
    assert trained == 8
    _, err = both.run("--jobs", "3", "--seeds", "0-1")
    assert err.count("was complete") == 2 * 9
    assert len(both.pids.read_text().split()) == trained


def test_side_by_side_a_failure_stops_its_dependents_only(tmp_path):
    both = make(tmp_path / "x", learner="ens", environment={"FAKE_CRASH": "1:1:python"})
    _, err = both.run("--jobs", "2", "--stages", "2", code=1)
    assert "CUDA error: out of luck" in err.splitlines()[-1]
    assert [row["t"] for row in both.rows] == [0, 1]
    assert not (both.out / "stage_01" / "result.json").exists()
    both.environment.pop("FAKE_CRASH")
    both.run("--jobs", "2", "--stages", "2")
    assert [row["t"] for row in both.rows] == [0, 1, 2]


def test_side_by_side_ctrl_c_ends_all_children(tmp_path):
    both = make(tmp_path / "x", learner="ens", environment={"FAKE_SLEEP": "60"})
    process = both.start("--jobs", "2")
    wait_for(lambda: both.pids.exists() and len(both.pids.read_text().split()) == 2)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    for pid in both.pids.read_text().split():
        wait_for(lambda pid=int(pid): ended(pid))


def test_side_by_side_rows_lost_to_a_kill_are_appended_later(tmp_path, expected):
    run = make(tmp_path / "x", learner="gmoe")
    run.run()
    path = run.out / "results.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:2]))
    run.run("--jobs", "2")
    assert run.rows == expected
