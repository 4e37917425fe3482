"""A command under faults, its processes, and the faults themselves."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import NamedTuple

from tests.chaos.workloads import Difference
from tests.slurm.supervisor import descendants, read_proc

SECONDS = 300  # until a command counts as hanging
GRACE = 15  # seconds from its end to that of its processes
_PR_SET_CHILD_SUBREAPER = 36
_SIGNALS = ("SIGKILL", "SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2")
SIGNALS = tuple(f"{name} to {aim}" for name in _SIGNALS for aim in ("process", "group", "child"))
FAULTS = (*SIGNALS, "second launch")


class EndOfCommand(NamedTuple):
    """How a command ended: exit code, what it printed, its time, changes of files, processes
    left."""

    code: int
    text: str
    seconds: float
    events: int
    left: Sequence[str]


class RunningCommand:
    """A command of `alma`, running in `work`; a context that leaves no process behind.

    This process must be a subreaper: see `adopt`.
    """

    program: Sequence[str] = (sys.executable, "-m", "alma")

    def __init__(self, work: Path, words: str) -> None:
        self.work = work
        self.events = 0
        self.began = time.monotonic()
        self._sizes = sizes(work)
        self.log = work.with_name(f"log.{time.monotonic_ns()}")
        added = {"TMPDIR": str(work.with_name("tmp")), "OMP_NUM_THREADS": "1"}
        added |= {
            "PYTHONPATH": str(Path(__file__).parents[2]),
            "PYTHONFAULTHANDLER": "1",
        }  # see `_look`
        with self.log.open("ab") as log:
            options = {
                "stdin": subprocess.DEVNULL,
                "stdout": log,
                "stderr": log,
                "start_new_session": True,
            }
            words_of_program = [*self.program, *words.split()]
            self.process = subprocess.Popen(
                words_of_program, cwd=work, env=os.environ | added, **options
            )

    def __enter__(self) -> "RunningCommand":
        return self

    def __exit__(self, *_: object) -> None:
        self._kill(signal.SIGKILL)
        self.process.wait()
        self.log.unlink()

    def _kill(self, number: int) -> None:
        """Send a signal to all processes of the command."""
        for pid in (
            (self.process.pid, *running(self.process.pid))
            if self.process.returncode is None
            else ()
        ):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def reach(self, events: int, seconds: float) -> bool:
        """Wait for so many changes of files, then so many seconds; False:
        the command has ended before."""
        while self.process.poll() is None and self.events < events:
            self._look()
        deadline = time.monotonic() + seconds
        while self.process.poll() is None and time.monotonic() < deadline:
            self._look()
        return self.process.poll() is None

    def _look(self) -> None:
        time.sleep(0.003)
        before, self._sizes = self._sizes, sizes(self.work)
        self.events += self._sizes != before
        if time.monotonic() - self.began > SECONDS:
            self._kill(signal.SIGABRT)  # each process prints where its threads are
            time.sleep(1)
            raise Difference(
                f"no end after {SECONDS} s:\n{self.log.read_text(errors='replace')[-9000:]}"
            )

    def end(self, alone: bool = True) -> EndOfCommand:
        """Wait for the end of the command, and GRACE for that of its processes, if it is
        `alone`."""
        self.reach(sys.maxsize, 0)
        seconds = time.monotonic() - self.began
        deadline = time.monotonic() + GRACE
        while (pids := running(os.getpid()) if alone else []) and time.monotonic() < deadline:
            time.sleep(0.01)
        names = [f"{pid} {read_proc(pid, 'cmdline').replace(chr(0), ' ')[:100]}" for pid in pids]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        if alone:
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:  # of orphans that this process adopted
                    pass
        text = self.log.read_text("utf-8", errors="replace")
        return EndOfCommand(self.process.returncode, text, seconds, self.events, names)

    def send(self, fault: str, rng: Random) -> None:
        """A signal, such as "SIGTERM to group"."""
        name, _, aim = fault.split(" ")
        pids = running(self.process.pid)
        with contextlib.suppress(ProcessLookupError):
            if aim == "group":
                os.killpg(self.process.pid, signal.Signals[name])
            else:
                pid = rng.choice(pids) if aim == "child" and pids else self.process.pid
                os.kill(pid, signal.Signals[name])


def sizes(folder: Path) -> dict[str, int]:
    """Sizes of all files by name; changes of it are events."""
    paths = [os.path.join(place, name) for place, _, names in os.walk(folder) for name in names]
    processes = {}
    for path in paths:
        with contextlib.suppress(OSError):
            processes[path] = os.lstat(path).st_size
    return processes


def adopt() -> None:
    """Become the parent of orphans among the descendants, so that none is overlooked."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # under nohup, children would ignore it


def running(ancestor: int) -> list[int]:
    """Its descendants, without zombies."""
    states = {
        pid: read_proc(pid, "stat").rpartition(")")[2].split() for pid in descendants(ancestor)
    }
    return sorted(pid for pid, fields in states.items() if fields and fields[0] not in "ZX")
