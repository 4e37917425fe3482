"""The rows of a stage, what is shown of its progress, and how a child ends."""

import json
import sys
import time
from pathlib import Path

import pytest

from alma.errors import UserError
from alma.records import check_row
from alma.stages import Stage
from slurm import child, progress
from slurm.stage import checkpoint, rows

RESULT = {
    "nll": 3.0,
    "perplexity": 20.5,
    "bits_per_byte": None,
    "parameters": 60,
    "eval_flops_per_example": 2.0,
    "experts": {"1": {"share": [0.5, 0.5], "loss": [3.0, 3.0]}},
    "expert_count": 2,
    "training": [
        {
            "updates": 9,
            "tokens": 90,
            "flops": 100.0,
            "growth_flops": 5.0,
            "seconds": 7.0,
            "peak_memory_bytes": 8,
        }
    ],
}
PREVIOUS = {
    "t": 2,
    "stage": 0,
    "trained_on": [1, 2],
    "metric": "perplexity",
    "value": 30.0,
    "parameters": 40,
    "train_flops": 50.0,
    "eval_flops_per_example": 1.0,
    "seconds": 3.0,
    "peak_memory_bytes": 4,
    "extra": {"experts": 1, "training": [{"updates": 9}]},
}


def python(code: str, log: Path, watch=None) -> None:
    child.run([sys.executable, "-c", code], log, "training of stage 3", watch)


def test_rows_keep_the_unchanged_model_while_waiting_then_take_the_new_one():
    waited, last = rows(Stage(1, 3, 4, (3, 4)), RESULT, PREVIOUS, [True])
    for row in (waited, last):
        check_row(row, 4)
    unchanged = {"t": 3, "train_flops": 0, "seconds": 0, "peak_memory_bytes": 0, "extra": {"experts": 1}}
    assert waited == PREVIOUS | unchanged
    assert (last["t"], last["stage"], last["trained_on"]) == (4, 1, [3, 4])
    assert (last["value"], last["parameters"], last["train_flops"]) == (20.5, 60, 105.0)
    assert (last["seconds"], last["peak_memory_bytes"]) == (7.0, 8)
    assert last["extra"] == {
        "nll": 3.0,
        "bits_per_byte": None,
        "experts": 2,
        "expert_layers": RESULT["experts"],
        "training": [{"updates": 9, "tokens": 90, "flops": 100.0, "growth_flops": 5.0}],
    }


def test_a_row_counts_what_its_stage_has_trained_and_not_frozen_members():
    (one,) = RESULT["training"]
    result = RESULT | {"training": [one | {"flops": 1.0}, one, one | {"seconds": 1.0}]}
    (row,) = rows(Stage(1, 3, 3, (3,)), result, PREVIOUS, [False, True, True])
    assert (row["train_flops"], row["seconds"], row["peak_memory_bytes"]) == (210.0, 8.0, 8)
    assert [each["flops"] for each in row["extra"]["training"]] == [100.0, 100.0]


def test_the_best_checkpoint_is_handed_on_where_there_is_one(tmp_path):
    assert checkpoint(tmp_path).name == "checkpoint_last.pt"
    (tmp_path / "checkpoint_best.pt").touch()
    assert checkpoint(tmp_path).name == "checkpoint_best.pt"


def test_all_output_is_logged_and_watched_and_logs_are_appended(tmp_path):
    seen: list[str] = []
    for _ in range(2):
        python("print(1, 'tw\\u00f6', sep='\\n', end='')", tmp_path / "log", seen.append)
    assert sorted(seen) == ["1", "1", "twö", "twö"]
    first, again = (tmp_path / "log").read_text().split("\n$ ")[1:]
    assert first == again
    assert first.endswith("\n1\ntwö")


@pytest.mark.parametrize(
    ("code", "kind", "message"),
    [
        ("import sys; print('error: mend it'); sys.exit(2)", UserError, "^mend it$"),
        ("import sys; print('train.py: error: no such flag'); sys.exit(2)", UserError, "^no such flag$"),
        ("import sys; sys.exit(2)", child.StageFailed, "training of stage 3: exit code 2; log: .*/log"),
        ("import sys; print('error: late'); sys.exit(3)", child.StageFailed, "exit code 3: late; log"),
        ("raise ValueError('bad')", child.StageFailed, "exit code 1: ValueError: bad; log"),
        ("import os; os.kill(os.getpid(), 9)", child.StageFailed, r"signal 9 \(Killed\); log"),
    ],
)
def test_failures_are_one_clear_line(tmp_path, code, kind, message):
    with pytest.raises(kind, match=message):
        python(code, tmp_path / "log")


def test_an_interrupt_ends_the_child_and_its_workers(tmp_path):
    code = (
        "import subprocess, sys, time\n"
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
    deadline = time.monotonic() + 5
    while running(pids[0]):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_child_that_ignores_sigterm_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(child, "GRACE_SECONDS", 0.2)
    code = (
        "import signal, time; signal.signal(15, signal.SIG_IGN); print('ready', flush=True); time.sleep(60)"
    )

    def interrupt(line: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        python(code, tmp_path / "log", interrupt)


def test_progress_reads_fairseq_json_and_passes_over_the_rest(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with progress.Progress("stage 0", 400) as shown:
        for line in ('2026 | INFO | train_inner | {"lo', "2026 | INFO | valid | {}", "loss 3", ""):
            shown.read(line)
        assert shown.bar.n == 0
        stats = {"loss": "8.9", "ppl": "478", "wps": "3100", "num_updates": "100"}
        shown.read(f"2026-11-21 07:00:00 | INFO | train_inner | {json.dumps(stats)}")
        assert (shown.bar.n, shown.bar.initial) == (100, 100)  # resumed: not counted as speed
        shown.read(f"2026-11-21 07:00:09 | INFO | train_inner | {json.dumps(stats | {'num_updates': '250'})}")
        assert (shown.bar.n, shown.bar.initial) == (250, 100)
        assert shown.bar.postfix == "loss 8.9, ppl 478, wps 3100"
    assert "250/400" in capsys.readouterr().err


def test_without_a_terminal_there_is_a_line_at_start_and_end(capsys):
    with progress.Progress("stage 0", None) as shown:
        shown.done("perplexity 9.00")
    assert capsys.readouterr().err == "stage 0: training\nstage 0: done in 0 s, perplexity 9.00\n"


def running(pid: int) -> bool:
    """Whether a process runs (a zombie, which nobody here may reap, does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("handler", ["signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))", ""])
def test_asked_to_save_a_child_ends_and_is_to_be_run_again(tmp_path, handler):
    """With its handler, or before it has one."""
    code = f"import signal, sys, time\n{handler}\nprint('ready', flush=True)\ntime.sleep(60)"
    began = time.monotonic()
    with pytest.raises(child.Saved, match="training of stage 3: stopped by a signal"):
        python(code, tmp_path / "log", lambda line: child.save(5) if line == "ready" else None)
    assert time.monotonic() - began < 20
    child.save(5)  # nothing runs


def test_what_a_machine_adds_to_the_environment(tmp_path):
    code = "import os; print(os.environ['RANK'], 'HOME' in os.environ)"
    seen: list[str] = []
    child.run([sys.executable, "-c", code], tmp_path / "log", "it", seen.append, {"RANK": "3"})
    assert seen == ["3 True"]
