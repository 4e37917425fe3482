"""Rows of a stage, the progress of a training, and child processes."""

import json
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
from launcher import FLAGS, SMALL, ended, read_requests, wait_for

from alma.errors import UserError
from alma.files import LOCK, locked
from alma.records import Run, check_row
from slurm.engine import children
from slurm.lm.plan import make_plan
from slurm.lm.record import measured_fields, waiting_fields
from slurm.lm.stage import jobs_of

SPENT = {"updates": 9, "tokens": 90, "flops": 100.0, "growth_flops": 5.0, "validation_flops": 3.0}
RESULT = {
    "nll": 3.0,
    "perplexity": 20.5,
    "bits_per_byte": None,
    "valid": {"loss": 2.9, "perplexity": 18.2},
    "parameters": 60,
    "eval_flops_per_example": 2.0,
    "experts": {"1": {"share": [0.5, 0.5], "loss": [3.0, 3.0]}},
    "expert_count": 2,
    "training": [SPENT | {"seconds": 7.0, "peak_memory_bytes": 8}],
}
PREVIOUS = {
    "t": 2,
    "stage": 0,
    "trained_on": [1, 2],
    "metric": "perplexity",
    "value": 30.0,
    "parameters": 40,
}
PREVIOUS |= {
    "train_flops": 50.0,
    "eval_flops_per_example": 1.0,
    "seconds": 3.0,
    "peak_memory_bytes": 4,
}
PREVIOUS["extra"] = {
    "experts": 1,
    "valid": {"loss": 3.0},
    "validation": 7.0,
    "training": [{"updates": 9}],
}


def python(code: str, log: Path, watch=None, environment=None) -> None:
    children.run([sys.executable, "-c", code], log, "training of stage 3", watch, environment)


def test_rows_keep_the_unchanged_model_while_waiting_then_take_the_new_one():
    waited = waiting_fields(PREVIOUS)
    last = measured_fields(RESULT, [True])
    check_row(waited, 4)
    check_row({"t": 4, "stage": 1, "trained_on": [3, 4], **last}, 4)
    unchanged = {"train_flops": 0, "seconds": 0, "peak_memory_bytes": 0}
    assert waited == PREVIOUS | unchanged | {"extra": {"experts": 1, "valid": {"loss": 3.0}}}
    assert (last["value"], last["parameters"], last["train_flops"]) == (20.5, 60, 105.0)
    assert (last["seconds"], last["peak_memory_bytes"]) == (7.0, 8)
    assert last["extra"] == {
        "nll": 3.0,
        "bits_per_byte": None,
        "experts": 2,
        "expert_layers": RESULT["experts"],
        "valid": {"loss": 2.9, "perplexity": 18.2},
        "validation": 3.0,
        "training": [SPENT],
    }


@pytest.mark.parametrize(
    ("cutoff", "seen"), [("2021", 2), ("2020-12-31", 1), ("2022-01", 3), ("1999", 0)]
)
def test_a_row_counts_the_periods_that_begin_until_the_cutoff(cutoff, seen):
    periods = {"matrix": [9.0] * 3, "matrix_periods": ["2020-Q1", "2021-Q4", "2022-Q1"]}
    row = measured_fields(RESULT | periods, [True], cutoff)
    check_row({"t": 1, "stage": 0, "trained_on": [1], **row}, 3)
    assert row["extra"]["matrix_seen"] == seen


def test_a_row_counts_the_trainings_of_its_stage_only():
    (training,) = RESULT["training"]
    result = RESULT | {
        "training": [training | {"flops": 1.0}, training, training | {"seconds": 1.0}]
    }
    row = measured_fields(result, [False, True, True])
    assert (row["train_flops"], row["seconds"], row["peak_memory_bytes"]) == (210.0, 8.0, 8)
    assert [training["flops"] for training in row["extra"]["training"]] == [100.0, 100.0]
    assert row["extra"]["validation"] == 6.0


@pytest.mark.parametrize("kind", ["train", "evaluate"])
def test_a_job_waits_for_one_that_slurm_declared_dead_too_early(tmp_path, monkeypatch, kind):
    """Two processes would write the same checkpoints."""
    words = ["stream", "--learner", "sm", "--out", str(tmp_path / "run"), "--", *SMALL]
    (request,) = read_requests([*words, "--max-update", "4"])
    job = next(job for job in jobs_of(make_plan(request, 1)) if job.kind == kind)
    job.directory.mkdir(parents=True)
    environment = Mock(num_tasks=1, num_nodes=1, global_rank=0, raw_job_id="7")
    monkeypatch.setattr("submitit.JobEnvironment", lambda: environment)
    monkeypatch.setattr("alma.files._WAIT_SECONDS", 0)
    started: list[str] = []
    monkeypatch.setattr(children, "run", lambda *arguments: started.append(arguments[2]))
    lock = LOCK if kind == "train" else f".{kind}.lock"
    with locked(job.directory, lock), pytest.raises(UserError, match="another process is at work"):
        job.work()
    assert not started


def test_all_output_is_logged_and_watched_and_logs_are_appended(tmp_path):
    seen: list[str] = []
    for _ in range(2):
        code = "import os; print(os.environ['RANK'], 'tw\\u00f6', sep='\\n', end='')"
        python(code, tmp_path / "log", seen.append, {"RANK": "1"})
    assert sorted(seen) == ["1", "1", "twö", "twö"]
    first, again = (tmp_path / "log").read_text().split("\n$ ")[1:]
    assert first == again
    assert first.endswith("\n1\ntwö")


@pytest.mark.parametrize(
    ("code", "kind", "message"),
    [
        ("import sys; print('error: mend it'); sys.exit(2)", UserError, "^mend it$"),
        (
            "import sys; print('train.py: error: no such flag'); sys.exit(2)",
            UserError,
            "^no such flag$",
        ),
        (
            "import sys; sys.exit(2)",
            children.StageFailed,
            "training of stage 3: exit code 2; log: .*/log",
        ),
        (
            "import sys; print('no such file: evl.py\\n'); sys.exit(2)",
            children.StageFailed,
            "exit code 2: no such file: evl.py; log",
        ),
        (
            "import sys; print('error: late'); sys.exit(3)",
            children.StageFailed,
            "exit code 3: late; log",
        ),
        ("raise ValueError('bad')", children.StageFailed, "exit code 1: ValueError: bad; log"),
        ("import os; os.kill(os.getpid(), 9)", children.StageFailed, r"signal 9 \(Killed\); log"),
    ],
)
def test_failures_are_one_clear_line(tmp_path, code, kind, message):
    with pytest.raises(kind, match=message):
        python(code, tmp_path / "log")


def test_an_interrupt_ends_the_child_and_its_workers(tmp_path, monkeypatch):
    """Also a child that ignores SIGTERM."""
    monkeypatch.setattr(children, "GRACE_SECONDS", 0.2)
    code = (
        "import signal, subprocess, sys, time\n"
        "signal.signal(15, signal.SIG_IGN)\n"
        "worker = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(worker.pid, flush=True)\n"
        "time.sleep(60)"
    )

    def interrupt(line: str) -> None:
        pids.append(int(line))
        raise KeyboardInterrupt

    pids: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        python(code, tmp_path / "log", interrupt)
    wait_for(lambda: ended(pids[0]))


@pytest.mark.parametrize("handler", ["signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))", ""])
def test_save_ends_a_child_which_is_to_be_run_again(tmp_path, handler):
    """With its signal handler, or before it has installed one."""
    code = f"import signal, sys, time\n{handler}\nprint('ready', flush=True)\ntime.sleep(60)"
    began = time.monotonic()
    with pytest.raises(children.Saved, match="training of stage 3: stopped by a signal"):
        python(code, tmp_path / "log", lambda line: children.save(5) if line == "ready" else None)
    assert time.monotonic() - began < 20
    children.save(5)  # no child is running


@pytest.mark.parametrize("gone", ["checkpoint_best.pt", "trained.json"])
def test_a_stage_whose_model_is_gone_is_not_continued_from_another(launcher, gone):
    """checkpoint_last.pt is there, but the best checkpoint was measured."""
    launcher.run("--stages", "1")
    rows = launcher.rows
    (launcher.out / "stage_00" / gone).unlink()
    _, err = launcher.run("--stages", "2", code=2)
    assert (
        f"stage_00/{gone}: missing, and a later job needs this training: restore it, or delete "
        in err
    )
    assert launcher.rows == rows
    assert not list((launcher.out / "stage_01").glob("*.pt"))


def test_a_marker_names_the_checkpoint_of_its_schedule(launcher):
    for words, name in (((), "best"), (("--schedule", "continuous"), "last")):
        launcher.run_words(
            "stream", "--learner", "sm", "--out", name, "--stages", "2", *words, "--", *FLAGS
        )
        for stage in (0, 1):
            marker = launcher.folder / name / f"stage_0{stage}/trained.json"
            assert json.loads(marker.read_text()) == {"checkpoint": f"checkpoint_{name}.pt"}


def test_run_json_says_that_a_training_had_tf32(launcher):
    """Also if the first stages had none."""
    launcher.run("--stages", "1")
    assert "tf32" not in Run.read(launcher.out).info
    launcher.environment["FAKE_TF32"] = "1"
    launcher.run("--stages", "2")
    run = Run.read(launcher.out)
    assert run.info["tf32"] is True
    trainings = [row["extra"].get("training", [{}])[0] for row in run.rows]
    assert [training.get("tf32") for training in trainings] == [None, None, True]
