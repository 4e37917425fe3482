"""The pool of worker processes: errors, killed workers, interrupts."""

import multiprocessing
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


def write_late(path: Path, seconds: float) -> None:
    path.with_suffix(".started").touch()
    time.sleep(seconds)
    path.touch()


def set_variable() -> None:
    os.environ["PREPARED"] = "yes"


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
        found = [(number, result()) for number, result in workers.run(square, [(n,) for n in range(9)], True)]
    assert found == [(n, n * n) for n in range(9)]


def test_one_worker_or_one_task_needs_no_process_unless_it_is_to_be_set_up():
    for count, tasks in ((1, [(), ()]), (2, [()])):
        with Workers(count) as workers:
            assert {result() for _, result in workers.run(process_id, tasks)} == {os.getpid()}
    with Workers(1, set_variable) as workers:
        ((_, result),) = workers.run(variable, [()])
        assert result() == "yes"
    assert variable() is None


def results_of(function, tasks, **options) -> list:
    with Workers(2, **options) as workers:
        return [result() for _, result in workers.run(function, tasks)]


def test_a_killed_worker_is_one_clear_line():
    with pytest.raises(
        UserError, match=r"^a worker was killed \(out of memory\?\); rerun with fewer --jobs$"
    ):
        results_of(die, [(), ()], flag="--jobs")


def run_again_and_again(workers: Workers) -> None:
    for _ in range(1000):  # a pool notices after a moment that a worker is gone
        list(workers.run(square, [(1,), (2,)]))


def test_a_worker_that_is_killed_between_tasks_is_the_same_line():
    with Workers(2, flag="--jobs") as workers:
        list(workers.run(square, [(1,), (2,)]))
        for process in multiprocessing.active_children():
            process.kill()
            process.join()
        with pytest.raises(UserError, match=r"^a worker was killed"):
            run_again_and_again(workers)


def interrupt_after_the_first(paths: list[Path], terminate: bool) -> None:
    """Raise while two tasks run."""
    with Workers(2, terminate=terminate) as workers:
        results = workers.run(write_late, [(path, 2 * bool(n)) for n, path in enumerate(paths)])
        next(results)[1]()
        wait_for(paths[0].parent, 3)
        raise KeyboardInterrupt


def wait_for(folder: Path, started: int) -> None:
    deadline = time.monotonic() + 60
    while len(list(folder.glob("*.started"))) < started:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_running_tasks_finish_when_the_block_raises(tmp_path):
    paths = [tmp_path / f"{n}.done" for n in range(9)]
    with pytest.raises(KeyboardInterrupt):
        interrupt_after_the_first(paths, terminate=False)
    assert len(list(tmp_path.glob("*.started"))) == len(list(tmp_path.glob("*.done"))) < 9


def test_running_tasks_are_terminated_if_so_chosen(tmp_path):
    paths = [tmp_path / f"{n}.done" for n in range(9)]
    with pytest.raises(KeyboardInterrupt):
        interrupt_after_the_first(paths, terminate=True)
    time.sleep(2.5)
    assert [path.name for path in tmp_path.glob("*.done")] == ["0.done"]


INTERRUPTED = """
import os, signal, sys, time
from pathlib import Path
from alma.workers import Workers
def sleep(path):
    Path(path + ".started").touch()
    time.sleep(2)
    Path(path).touch()
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with Workers(2) as workers:
        for _, result in workers.run(sleep, [(f"{sys.argv[1]}/{n}",) for n in range(2)]):
            result()
"""


def test_workers_ignore_ctrl_c_and_finish_their_task(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(INTERRUPTED)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, script, tmp_path]
    process = subprocess.Popen(command, start_new_session=True, stderr=subprocess.PIPE, env=environment)
    wait_for(tmp_path, 2)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert err.splitlines()[-1] == b"KeyboardInterrupt"
    assert {path.name for path in tmp_path.iterdir()} >= {"0", "1"}


KILLED_LAST = """
import time
from concurrent.futures import process
from pathlib import Path
from alma import workers
join = process._ExecutorManagerThread.join_executor_internals
def kill_and_join(self):
    for worker in self.processes.values():
        if "pipe" in Path(f"/proc/{worker.pid}/wchan").read_text():  # it waits for a task: it has the lock
            worker.kill()
            worker.join()
    join(self)
process._ExecutorManagerThread.join_executor_internals = kill_and_join
workers._GRACE = 0.5
if __name__ == "__main__":
    with workers.Workers(2) as pool:
        list(pool.run(abs, [(1,), (2,)]))
        time.sleep(0.3)
"""


def test_a_worker_that_is_killed_at_the_end_holds_nobody_up(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(KILLED_LAST)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    subprocess.run([sys.executable, script], check=True, timeout=60, env=environment)
