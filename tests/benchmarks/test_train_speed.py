"""Processes halted between turns, with a script instead of fairseq-train."""

import os
import sys
import time
from pathlib import Path

import pytest

from alma.errors import UserError

SCRIPT = """
import sys, time
for update in range(1, int(sys.argv[1])):
    time.sleep(float(sys.argv[2]))
    print('time | INFO | train_inner | {"wpb": "2048"}', flush=True)
sys.exit("RuntimeError: no more")
"""


@pytest.fixture
def speed(benchmark):
    """The module."""
    return benchmark("train_speed")


def state(pid: int) -> str:
    """`T` if halted."""
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


def wait_for_halt(pid: int) -> None:
    """A signal takes effect a little later."""
    deadline = time.monotonic() + 60
    while state(pid) != "T":
        assert time.monotonic() < deadline
        time.sleep(0.001)


def command(updates: int, seconds: float) -> list[str]:
    return [sys.executable, "-c", SCRIPT, str(updates), str(seconds)]


def test_a_turn_is_one_update_and_halted_time_does_not_count(speed):
    with speed.PausedTraining(command(100, 0.2)) as training:
        training.run(speed.WARM_UP)
        wait_for_halt(training.process.pid)
        time.sleep(1)  # five updates if it were not halted
        assert training.run(1) > 2048 / 0.9
        assert sum("train_inner" in line for line in training.log) == speed.WARM_UP + 1
        assert 10**6 < speed.resident_memory(training.process.pid, peak=True) < 10**9
        wait_for_halt(training.process.pid)
    assert training.process.returncode == -15
    with pytest.raises(ProcessLookupError):
        os.kill(training.process.pid, 0)


def test_turns_are_in_the_order_of_the_models_whoever_goes_first(speed):
    with speed.PausedTraining(command(100, 0.01)) as fast, speed.PausedTraining(command(100, 0.2)) as slow:
        for training in (fast, slow):
            training.run(1)
        measured = speed.turns([slow, fast], repeats=3)
    assert len(measured) == 3
    assert all(a < b for a, b in measured)


def test_a_process_that_dies_is_an_error_with_the_end_of_its_log(speed):
    with (
        speed.PausedTraining(command(2, 0)) as training,
        pytest.raises(UserError, match=r"(?s)code 1: .*no more"),
    ):
        training.run(2)


def test_active_parameters_are_the_dense_model_and_a_row_of_each_router(speed):
    one = speed.replace(speed.SWITCH, experts=1)
    assert one.parameters == speed.DENSE.parameters + speed.SWITCH.switch_layers * speed.SWITCH.dim
    assert speed.SWITCH.parameters - one.parameters == (speed.SWITCH.experts - 1) * speed.SWITCH.per_expert
