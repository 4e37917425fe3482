"""The launcher over fake children that are killed, interrupted or fail: reruns give the same
rows."""

import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from launcher import ESTIMATE, ended, wait_for

from alma.records import Run

MOMENTS: dict[str, Callable[[Path], bool]] = {
    "start": lambda out: (out / "run.json").exists(),
    "untrained": lambda out: (out / "untrained.json").exists(),
    "training": lambda out: (out / "stage_00/checkpoint_last.pt").exists(),
    "evaluating": lambda out: (out / "stage_01/eval.log").exists(),
    "measured": lambda out: (out / "stage_01/result.json").exists(),
    "later": lambda out: (out / "stage_02/checkpoint_last.pt").exists(),
}


def test_kills_at_any_moment_leave_the_rows_unchanged(launcher, expected):
    launcher.learner = "gmoe"
    launcher.environment["FAKE_SLEEP"] = "0.1"
    for moment in MOMENTS.values():
        process = launcher.start()
        wait_for(lambda moment=moment: moment(launcher.out))
        process.kill()
        process.wait()
        last = launcher.pids.read_text().split()[-1:] if launcher.pids.exists() else []
        wait_for(lambda last=last: all(ended(int(pid)) for pid in last))
    launcher.run()
    assert launcher.rows == expected
    assert (launcher.out / "stage_00/train.log").read_text().count("$ ") == 2


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupt_stops_the_child_and_says_how_to_resume(launcher, how):
    launcher.environment["FAKE_SLEEP"] = "0.5"
    process = launcher.start()
    wait_for((launcher.out / "stage_00/checkpoint_last.pt").exists)
    process.send_signal(how)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + how
    assert err.splitlines()[-1] == "interrupted; rerun the same command to resume"
    assert ended(int(launcher.pids.read_text()))


def test_nohup_is_respected(launcher):
    launcher.environment["FAKE_SLEEP"] = "0.5"
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup starts a command
    try:
        process = launcher.start()
    finally:
        signal.signal(signal.SIGHUP, before)
    wait_for((launcher.out / "stage_00/checkpoint_last.pt").exists)
    process.send_signal(signal.SIGHUP)
    process.communicate(timeout=120)
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("how", "code", "message"),
    [
        ("user", 2, "error: stream/train.bin: truncated; copy it again"),
        (
            "python",
            1,
            "error: training of stage 0: exit code 1: RuntimeError: CUDA error: out of luck; "
            "log: run/stage_00/train.log",
        ),
    ],
)
def test_a_failing_child_is_one_line(launcher, how, code, message):
    launcher.environment["FAKE_CRASH"] = f"0:1:{how}"
    _, err = launcher.run(code=code)
    assert err.splitlines()[-1] == message
    assert err.splitlines()[ESTIMATE:-1][-1] == "run stage 0: started"


def test_a_second_launcher_on_the_same_run_is_refused(launcher):
    launcher.environment["FAKE_SLEEP"] = "60"
    first = launcher.start()
    wait_for((launcher.out / "stage_00/train.log").exists)
    _, err = launcher.run(code=2)
    last = (
        f"error: run: another process is at work here (pid {first.pid} on {socket.gethostname()}); "
    )
    assert err.splitlines()[ESTIMATE:] == [f"{last}wait for it or choose another --out"]
    first.terminate()
    first.communicate(timeout=60)


@pytest.mark.parametrize("crash", [{"FAKE_UNTRAINED": "user"}, {"FAKE_CRASH": "0:0:user"}])
def test_a_corrected_command_starts_anew_if_nothing_was_trained(launcher, crash):
    launcher.environment.update(crash)
    launcher.run(code=2)
    launcher.environment.clear()
    launcher.run("--seed", "3", "--stages", "1")
    assert Run.read(launcher.out).config["seed"] == 3
    assert [row["t"] for row in launcher.rows] == [0, 1]
