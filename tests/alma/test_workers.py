"""The pool of worker processes: errors, killed workers, interrupts."""

import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from alma.errors import UserError
from alma.workers import Workers


def square(number: int) -> int:
    if number < 0:
        raise ValueError(f"{number} is negative")
    return number * number


def process_id() -> int:
    return os.getpid()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def set_variable(number: int) -> None:
    os.environ["PREPARED"] = str(number)


def variable() -> str | None:
    return os.environ.get("PREPARED")


@pytest.mark.parametrize("count", [1, 2])
def test_an_error_fails_its_own_task(count):
    with Workers(count) as workers:
        results = dict(workers.run(square, [(3,), (-1,), (5,)]))
        assert (results[0](), results[2]()) == (9, 25)
        with pytest.raises(ValueError, match="-1 is negative"):
            results[1]()


def test_results_in_the_order_of_the_tasks():
    with Workers(2) as workers:
        arguments = [(n,) for n in range(9)]
        results = [(number, result()) for number, result in workers.run(square, arguments, True)]
        slept = workers.run(time.sleep, [(0.5,), (0,), (60,)], in_order=True)
        # while the last one sleeps
        assert [number for number, _ in itertools.islice(slept, 2)] == [0, 1]
    assert results == [(n, n * n) for n in range(9)]


def test_one_worker_needs_no_process_unless_it_is_to_be_set_up():
    with Workers(1) as workers:
        assert {result() for _, result in workers.run(process_id, [(), ()])} == {os.getpid()}
    with Workers(2) as workers:  # Ctrl-C ends a single task too, though it may be at work in C++
        assert {result() for _, result in workers.run(process_id, [()])} != {os.getpid()}
    with Workers(1, set_variable) as workers:
        ((_, result),) = workers.run(variable, [()])
        assert result() == "0"
    assert variable() is None


def test_every_process_is_set_up_with_its_number():
    with Workers(3, set_variable) as workers:
        numbers = [result() for _, result in workers.run(variable, [()] * 3)]
        assert sorted(numbers) == ["0", "1", "2"]


def test_a_killed_worker_is_one_clear_line():
    with (
        Workers(2, flag="--jobs") as workers,
        pytest.raises(
            UserError, match=r"^a worker was killed \(out of memory\?\); rerun with fewer --jobs$"
        ),
    ):
        list(workers.run(die, [(), ()]))


def test_results_that_nobody_takes_do_not_get_into_the_next_run():
    with Workers(2) as workers:
        next(workers.run(square, [(n,) for n in range(9)]))
        assert sorted(result() for _, result in workers.run(square, [(10,), (20,)])) == [100, 400]


INTERRUPTED = """
import signal, sys, time
from pathlib import Path
from alma.workers import Workers
def sleep(path, seconds):
    Path(path + ".started").touch()
    time.sleep(seconds)
    Path(path + ".done").touch()
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    tasks = [(f"{sys.argv[1]}/{n}", 60 * bool(n)) for n in range(9)]
    with Workers(2) as workers:
        for _, result in workers.run(sleep, tasks):
            result()
"""


def test_ctrl_c_ends_the_pool_and_its_tasks_and_only_the_parent_says_so(tmp_path):
    script = tmp_path / "script.py"
    tasks = tmp_path / "tasks"
    script.write_text(INTERRUPTED)
    tasks.mkdir()
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, script, tasks]
    process = subprocess.Popen(
        command, start_new_session=True, stderr=subprocess.PIPE, env=environment
    )
    deadline = time.monotonic() + 60
    while len(list(tasks.glob("*.started"))) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=40)  # shorter than a task
    assert err.splitlines()[-1] == b"KeyboardInterrupt"
    assert err.count(b"Traceback") == 1
    assert [path.name for path in tasks.glob("*.done")] == ["0.done"]
