"""A command under faults: its processes, the moment of a fault, and the faults themselves."""

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from tests.broken_input.judge import main_of
from tests.chaos.workloads import Difference
from tests.slurm.supervisor import descendants, read_proc

FORKED = "images"  # starts in no time as a fork; in data_prep, the workers' modules do not survive one
SECONDS = 300  # until a command counts as hanging
_ROOT = Path(__file__).parents[2]
_CLOCK = Path(__file__).parent / "clock"
_PR_SET_CHILD_SUBREAPER = 36
_SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)
_AIMS = ("process", "group", "child")
SIGNALS = tuple(f"{number.name} to {aim}" for number in _SIGNALS for aim in _AIMS)
FAULTS = (*SIGNALS, "disk full", "no permission", "file truncated", "clock jumps", "second launch")


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
        """Unmount it."""
        if self.mounted:
            subprocess.run(["umount", "--lazy", str(self.folder)], check=True)

    def sizes(self) -> dict[str, int]:
        """Sizes of all files by name; changes of it are events."""
        found: dict[str, int] = {}
        folders = [str(self.work)]
        while folders:
            with contextlib.suppress(OSError), os.scandir(folders.pop()) as entries:
                for entry in entries:
                    with contextlib.suppress(OSError):
                        if entry.is_dir(follow_symlinks=False):
                            folders.append(entry.path)
                        else:
                            found[entry.path] = entry.stat(follow_symlinks=False).st_size
        return found

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

    @contextlib.contextmanager
    def unwritable(self) -> Iterator[None]:
        """Take the permission to write in the folders that the command made."""
        folders = [Path(folder) for folder, *_ in os.walk(self.work)]  # also while some disappear
        self._allow(folders, 0o555)
        try:
            yield
        finally:
            self._allow(folders, 0o755)

    @staticmethod
    def _allow(folders: Sequence[Path], mode: int) -> None:
        for path in folders:
            with contextlib.suppress(FileNotFoundError):
                path.chmod(mode)


@dataclass(frozen=True)
class Moment:
    """After so many changes of files, and then so many seconds."""

    events: int
    seconds: float


class RunningCommand:
    """A command of `alma`, running in its place; a context that leaves no process behind.

    It is a new interpreter, or unless `fresh` a fork of this process, which has imported the modules of
    `FORKED`. This process must be a subreaper: see `adopt`.
    """

    def __init__(self, place: Place, words: str, fault: str = "", fresh: bool = False) -> None:
        """`fault`: one that changes how the command starts."""
        self.place = place
        self.began, self.events = time.monotonic(), 0
        self._code: int | None = None
        self.log = place.folder.with_name(f"log.{time.monotonic_ns()}")  # not on the disk that may be full
        self._sizes = place.sizes()
        program = [sys.executable, "-m", "alma", *words.split()]
        added = {"TMPDIR": str(place.folder / "tmp"), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(_ROOT)}
        added["PYTHONFAULTHANDLER"] = "1"  # see `_look`
        if fault == "clock jumps":
            added |= {"PYTHONPATH": f"{_CLOCK}:{_ROOT}"}
        if fault == "no permission" and not os.geteuid():  # root may write anywhere otherwise
            program = ["setpriv", "--bounding-set=-all", "--inh-caps=-all", *program]
        sys.stdout.flush()
        self.pid = os.fork()
        if not self.pid:
            fresh = fresh or not words.startswith(FORKED) or fault in ("clock jumps", "no permission")
            self._become(program, added, None if fresh else words)

    def _become(self, program: Sequence[str], added: Mapping[str, str], words: str | None) -> None:
        """In the child: be the command."""
        code = 1
        try:
            os.setsid()
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # until the command itself runs
            os.chdir(self.place.work)
            os.environ |= added
            log = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            for number, descriptor in enumerate((os.open(os.devnull, os.O_RDONLY), log, log)):
                os.dup2(descriptor, number)
            if words is None:
                signal.signal(signal.SIGINT, signal.SIG_DFL)
                os.execvpe(program[0], list(program), os.environ)
            sys.stdin = os.fdopen(0, closefd=False)
            sys.stdout, sys.stderr = (os.fdopen(n, "w", buffering=1, closefd=False) for n in (1, 2))
            tempfile.tempdir = added["TMPDIR"]
            main = main_of(words.split())
            signal.signal(signal.SIGINT, signal.default_int_handler)
            main()
            code = 0
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)

    def __enter__(self) -> "RunningCommand":
        return self

    def __exit__(self, *_: object) -> None:
        for pid in (self.pid, *running(self.pid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        while not self.ended:
            time.sleep(0.003)
        self.log.unlink(missing_ok=True)

    @property
    def ended(self) -> bool:
        """Whether the process has ended."""
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code is not None

    def reach(self, moment: Moment) -> bool:
        """Wait for a moment; False: the command has ended before."""
        while not self.ended and self.events < moment.events:
            self._look()
        deadline = time.monotonic() + moment.seconds
        while not self.ended and time.monotonic() < deadline:
            self._look()
        return not self.ended

    def _look(self) -> None:
        time.sleep(0.003)
        sizes = self.place.sizes()
        self.events += sizes != self._sizes
        self._sizes = sizes
        if time.monotonic() - self.began > SECONDS:
            for pid in (self.pid, *running(self.pid)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGABRT)  # each process prints where its threads are
            time.sleep(1)
            raise Difference(f"no end after {SECONDS} s:\n{self.log.read_text(errors='replace')[-9000:]}")

    def end(self, alone: bool = True) -> "EndOfCommand":
        """Wait for the end of the command, and up to 15 s for that of its processes, if it is `alone`."""
        self.reach(Moment(sys.maxsize, 0))
        seconds = time.monotonic() - self.began
        deadline = time.monotonic() + 15
        while (left := running(os.getpid()) if alone else []) and time.monotonic() < deadline:
            time.sleep(0.01)
        names = [_title(pid) for pid in left]
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        if alone:
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:  # of orphans that this process adopted
                    pass
        assert self._code is not None
        return EndOfCommand(
            self._code, self.log.read_text("utf-8", errors="replace"), seconds, self.events, names
        )

    def send(self, fault: str, rng: Random) -> None:
        """A signal, such as "SIGTERM to group"."""
        name, _, aim = fault.split(" ")
        number = signal.Signals[name]
        others = running(self.pid)
        with contextlib.suppress(ProcessLookupError):
            if aim == "group":
                os.killpg(self.pid, number)
            else:
                os.kill(rng.choice(others) if aim == "child" and others else self.pid, number)


def adopt() -> None:
    """Become the parent of orphans among the descendants, so that none is overlooked."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def running(ancestor: int) -> list[int]:
    """Its descendants, without zombies."""
    states = {pid: read_proc(pid, "stat").rpartition(")")[2].split() for pid in descendants(ancestor)}
    return sorted(pid for pid, fields in states.items() if fields and fields[0] not in "ZX")


@dataclass(frozen=True)
class EndOfCommand:
    """How a command ended."""

    code: int
    text: str
    """What it printed."""
    seconds: float
    events: int
    left: Sequence[str]
    """Its processes that did not end."""


def _title(pid: int) -> str:
    return f"{pid} {read_proc(pid, 'cmdline').replace(chr(0), ' ')[:100]}"


def truncate(place: Place, rng: Random) -> tuple[Path, bytes] | None:
    """Cut a file that the command made; its path and what it held."""
    inputs = place.folder / "inputs"
    files = [Path(name) for name, size in sorted(place.sizes().items()) if size]
    files = [path for path in files if not (inputs / path.relative_to(place.work)).exists()]
    if not files:
        return None
    path = rng.choice(files)
    content = path.read_bytes()
    with path.open("r+b") as file:
        file.truncate(rng.choice([0, len(content) // 2, len(content) - 1]))
    return path, content
