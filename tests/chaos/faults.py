"""A command under faults: its place, its processes, and the faults themselves."""

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import NamedTuple

from tests.chaos.workloads import Difference
from tests.slurm.supervisor import descendants, read_proc

SECONDS = 300  # until a command counts as hanging
GRACE = 15  # seconds from its end to that of its processes
_ROOT = Path(__file__).parents[2]
_PR_SET_CHILD_SUBREAPER = 36
_SIGNALS = ("SIGKILL", "SIGTERM", "SIGINT", "SIGUSR2")
SIGNALS = tuple(f"{name} to {aim}" for name in _SIGNALS for aim in ("process", "group", "child"))
FAULTS = (*SIGNALS, "disk full", "file truncated", "second launch")


class Place:
    """The folder of a run: a small file system of its own where the user may mount one."""

    def __init__(self, folder: Path, megabytes: int = 192) -> None:
        self.folder, self.work = folder, folder / "work"
        folder.mkdir(parents=True, exist_ok=True)
        mount = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "alma_chaos", str(folder)]
        self.mounted = not subprocess.run(mount, capture_output=True).returncode

    def clear(self) -> None:
        """Remove everything in it; make its folder for temporary files and the working folder."""
        for path in self.folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        (self.folder / "tmp").mkdir()
        self.work.mkdir()

    def close(self) -> None:
        """Unmount and remove it."""
        if self.mounted:
            subprocess.run(["umount", "--lazy", str(self.folder)], check=True)
        shutil.rmtree(self.folder)

    def sizes(self) -> dict[str, int]:
        """Sizes of all files by name; changes of it are events."""
        sizes: dict[str, int] = {}
        for folder, _, names in os.walk(self.work):
            for path in (os.path.join(folder, name) for name in names):
                with contextlib.suppress(OSError):
                    sizes[path] = os.lstat(path).st_size
        return sizes

    @contextlib.contextmanager
    def full(self, free_bytes: int) -> Iterator[None]:
        """Leave so many bytes free meanwhile."""
        filler, space = self.folder / "filler", os.statvfs(self.folder)
        size = space.f_bavail * space.f_frsize - free_bytes
        with filler.open("wb") as file:
            while size > 0:
                try:
                    os.posix_fallocate(file.fileno(), 0, size)
                    break
                except OSError:  # the command has written meanwhile
                    size -= 1 << 16
        try:
            yield
        finally:
            filler.unlink()

    def truncate(self, rng: Random) -> tuple[Path, bytes] | None:
        """Cut a file that the command made; its path and what it held."""
        files = [Path(name) for name, size in sorted(self.sizes().items()) if size]
        inputs = self.folder / "inputs"
        files = [path for path in files if not (inputs / path.relative_to(self.work)).exists()]
        if not files:
            return None
        path = rng.choice(files)
        content = path.read_bytes()
        os.truncate(path, rng.choice([0, len(content) // 2, len(content) - 1]))
        return path, content


class EndOfCommand(NamedTuple):
    """How a command ended: exit code, what it printed, its time, changes of files, processes left."""

    code: int
    text: str
    seconds: float
    events: int
    left: Sequence[str]


class RunningCommand:
    """A command of `alma`, running in its place; a context that leaves no process behind.

    This process must be a subreaper: see `adopt`.
    """

    program: Sequence[str] = (sys.executable, "-m", "alma")

    def __init__(self, place: Place, words: str) -> None:
        self.place, self.events = place, 0
        self.began, self._sizes = time.monotonic(), place.sizes()
        self.log = place.folder.with_name(f"log.{time.monotonic_ns()}")  # not on the disk that may be full
        added = {"TMPDIR": str(place.folder / "tmp"), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(_ROOT)}
        added["PYTHONFAULTHANDLER"] = "1"  # see `_look`
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*self.program, *words.split()],
                cwd=place.work,
                env=os.environ | added,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def __enter__(self) -> "RunningCommand":
        return self

    def __exit__(self, *_: object) -> None:
        self._kill(signal.SIGKILL)
        self.process.wait()
        self.log.unlink()

    def _kill(self, number: int) -> None:
        """Send a signal to all processes of the command."""
        for pid in (self.process.pid, *running(self.process.pid)) if self.process.returncode is None else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def reach(self, events: int, seconds: float) -> bool:
        """Wait for so many changes of files, then so many seconds; False: the command has ended before."""
        while self.process.poll() is None and self.events < events:
            self._look()
        deadline = time.monotonic() + seconds
        while self.process.poll() is None and time.monotonic() < deadline:
            self._look()
        return self.process.poll() is None

    def _look(self) -> None:
        time.sleep(0.003)
        sizes = self.place.sizes()
        self.events += sizes != self._sizes
        self._sizes = sizes
        if time.monotonic() - self.began > SECONDS:
            self._kill(signal.SIGABRT)  # each process prints where its threads are
            time.sleep(1)
            raise Difference(f"no end after {SECONDS} s:\n{self.log.read_text(errors='replace')[-9000:]}")

    def end(self, alone: bool = True) -> EndOfCommand:
        """Wait for the end of the command, and GRACE for that of its processes, if it is `alone`."""
        self.reach(sys.maxsize, 0)
        seconds = time.monotonic() - self.began
        deadline = time.monotonic() + GRACE
        while (left := running(os.getpid()) if alone else []) and time.monotonic() < deadline:
            time.sleep(0.01)
        names = [f"{pid} {read_proc(pid, 'cmdline').replace(chr(0), ' ')[:100]}" for pid in left]
        for pid in left:
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
        others = running(self.process.pid)
        with contextlib.suppress(ProcessLookupError):
            if aim == "group":
                os.killpg(self.process.pid, signal.Signals[name])
            else:
                pid = rng.choice(others) if aim == "child" and others else self.process.pid
                os.kill(pid, signal.Signals[name])


def adopt() -> None:
    """Become the parent of orphans among the descendants, so that none is overlooked."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # under nohup, children would ignore it


def running(ancestor: int) -> list[int]:
    """Its descendants, without zombies."""
    states = {pid: read_proc(pid, "stat").rpartition(")")[2].split() for pid in descendants(ancestor)}
    return sorted(pid for pid, fields in states.items() if fields and fields[0] not in "ZX")
