"""Worker processes: one pool for the corpus pipeline, its inspection and sweeps of image runs."""

import functools
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from alma.errors import UserError

_GRACE = 5.0
"""Seconds for idle workers to end."""

Result = TypeVar("Result")


class Workers:
    """A pool of spawned processes, which end when their parent dies and ignore Ctrl-C.

    Leaving the context cancels the tasks that wait. Running tasks finish, or, with `terminate`, are stopped
    by SIGTERM if the block raised. `setup` runs once in every process. Without it, one worker or a single
    task needs no process: it runs in this one.
    """

    def __init__(
        self,
        count: int,
        setup: Callable[[], None] | None = None,
        terminate: bool = False,
        flag: str = "--workers",
    ) -> None:
        """`flag`: the option to lower when the system kills a worker."""
        self._count, self._setup, self._terminate, self._flag = count, setup, terminate, flag
        self._pool: ProcessPoolExecutor | None = None
        self._futures: Collection[Future] = ()

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if self._pool is None:
            return
        # `shutdown` asks the workers to end through a queue, and waits. One that is killed just now may hold
        # the lock of the queue for good; the others are then terminated.
        ending = threading.Thread(target=self._pool.shutdown, kwargs={"cancel_futures": True})
        ending.start()
        if not (error and self._terminate):
            for future in self._futures:
                with suppress(CancelledError):
                    future.exception()  # waits for a running task
            ending.join(_GRACE)
        for process in multiprocessing.active_children():
            process.terminate()
        ending.join()

    def run(
        self, function: Callable[..., Result], tasks: Sequence[tuple[Any, ...]], in_order: bool = False
    ) -> Iterator[tuple[int, Callable[[], Result]]]:
        """Run `function(*task)` for every task; yield (number, result) as they complete, or in order.

        `result()` returns what the task returned or raises its error; the other tasks go on. Without
        processes it is the call itself. UserError: the system killed a worker.
        """
        if not self._setup and (self._count == 1 or len(tasks) == 1):
            for number, task in enumerate(tasks):
                yield number, functools.partial(function, *task)
            return
        if self._pool is None:
            # A forked process would inherit the parent's threads and CUDA state, and could hang.
            spawn = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(self._count, spawn, _start, (self._setup,))
        killed = UserError(f"a worker was killed (out of memory?); rerun with fewer {self._flag}")
        try:
            with _interrupts_blocked():  # in the processes that start here too, until they ignore them
                numbers = {self._pool.submit(function, *task): number for number, task in enumerate(tasks)}
        except BrokenProcessPool:
            raise killed from None
        self._futures = numbers
        for future in numbers if in_order else as_completed(numbers):
            if isinstance(future.exception(), BrokenProcessPool):
                raise killed
            yield numbers[future], future.result


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Hold Ctrl-C back. A process inherits this; without it, its imports would end in a traceback."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start(setup: Callable[[], None] | None) -> None:
    """Prepare a worker process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if setup:
        setup()


def _end_with_parent() -> None:
    if parent := multiprocessing.parent_process():
        parent.join()
    os._exit(1)
