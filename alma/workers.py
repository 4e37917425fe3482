"""Worker processes: one pool for the corpus pipeline, its inspection and sweeps of image runs."""

import functools
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing import connection, resource_tracker
from typing import Any, TypeVar, cast

from alma.errors import UserError

Result = TypeVar("Result")


class Workers:
    """A pool of spawned processes, which end when their parent dies and ignore Ctrl-C.

    Leaving the context ends them: idle ones normally, busy ones and, if the block raised, all by
    SIGKILL. Tasks must therefore write atomically. `setup` runs once in every process, with its
    number from 0. Without it, a single worker needs no process: it is this one.
    """

    # Not a ProcessPoolExecutor, whose processes share locks: after an interrupt or a kill one may
    # stay locked, and shutdown waits forever. Here each worker has a pipe of its own.

    def __init__(
        self, count: int, setup: Callable[[int], None] | None = None, flag: str = "--workers"
    ) -> None:
        """`flag`: the option to lower when the system kills a worker."""
        self._count = count
        self._setup = setup
        self._flag = flag
        self._processes: dict[Any, Any] = {}  # connection -> process
        self._idle: list[Any] = []

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        for pipe, process in self._processes.items():
            if error or pipe not in self._idle:
                process.kill()
            pipe.close()  # tells an idle worker to end
        deadline = time.monotonic() + 5  # for idle workers to end
        for process in self._processes.values():
            process.join(max(0.0, deadline - time.monotonic()))
            process.kill()
            process.join()

    def run(
        self,
        function: Callable[..., Result],
        tasks: Sequence[tuple[Any, ...]],
        in_order: bool = False,
    ) -> Iterator[tuple[int, Callable[[], Result]]]:
        """Run `function(*task)` for each task; yield (number, result) on completion, or in order.

        `result()` returns what the task returned or raises its error; the other tasks go on.
        Without processes it is the call itself. UserError: the system killed a worker.
        """
        if self._setup or self._count > 1:
            completed = self._completed(function, tasks)
        else:
            completed = enumerate(functools.partial(function, *task) for task in tasks)
        if not in_order:
            yield from completed
            return
        early: dict[int, Callable[[], Result]] = {}  # results before their turn
        for number in range(len(tasks)):
            while number not in early:
                completed_number, result = next(completed)
                early[completed_number] = result
            yield number, early.pop(number)

    def _completed(
        self, function: Callable[..., Result], tasks: Sequence[tuple[Any, ...]]
    ) -> Iterator[tuple[int, Callable[[], Result]]]:
        """Give each worker one task at a time; yield (number, result) as they complete."""
        while len(self._idle) < min(self._count, len(tasks)):
            self._start()
        waiting = list(enumerate(tasks))[::-1]
        busy: dict[Any, int] = {}

        def give() -> None:
            while waiting and self._idle:
                number, task = waiting.pop()
                pipe = self._idle.pop()
                busy[pipe] = number
                pipe.send((function, task))

        try:
            give()
            while busy:
                for pipe in cast(Any, connection.wait(list(busy))):
                    number = busy.pop(pipe)
                    outcome = pipe.recv()
                    self._idle.append(pipe)
                    give()
                    yield number, functools.partial(_result, *outcome)
        except (EOFError, ConnectionError):
            raise UserError(
                f"a worker was killed (out of memory?); rerun with fewer {self._flag}"
            ) from None

    def _start(self) -> None:
        # A forked process would inherit the parent's threads and CUDA state, and could hang.
        spawn = multiprocessing.get_context("spawn")
        pipe, its_end = spawn.Pipe()
        setup = None
        if self._setup:
            setup = functools.partial(self._setup, len(self._processes))
        process = spawn.Process(target=_serve, args=(its_end, setup), daemon=True)
        resource_tracker.ensure_running()  # before Ctrl-C is blocked: it unblocks it
        # The process inherits the block; without it, its imports would end in a traceback.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            process.start()
            self._processes[pipe] = process
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        its_end.close()
        self._idle.append(pipe)


def _result(value: Any, error: Exception | None) -> Any:
    if error:
        raise error
    return value


def _serve(pipe: Any, setup: Callable[[], None] | None) -> None:
    """In a worker: run the tasks that come, until the parent closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if setup:
        setup()
    with suppress(EOFError, ConnectionError):  # the parent has closed the pipe, or has ended
        while True:
            function, task = pipe.recv()
            outcome: tuple[Any, Exception | None]
            try:
                outcome = function(*task), None
            except Exception as error:
                error.add_note(f"In a worker:\n{traceback.format_exc()}")
                outcome = None, error
            pipe.send(outcome)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent:
        parent.join()
    os._exit(1)
