"""Run child processes: output goes to a log, no child outlives the launcher, and a failure is
reported in one line."""

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from alma.errors import UserError
from alma.escape import terminal
from alma.files import open_for_writing
from slurm.engine.forks import Fork, ForkServer, dies_with_parent

Environment = Mapping[str, str] | None  # variables added to those of this process for a child
Watch = Callable[[str], None] | None  # called with each line of a child's output
OWN_MODULES = {"PYTHONSAFEPATH": "1"}
"""Added to the environment of every child. Otherwise `python -m` would look for modules in the
current folder first, where a user may have a slurm.py."""
GRACE_SECONDS = 10  # between SIGTERM and SIGKILL
_SHOWN = 300  # most characters of a last line of output
_running: set[int] = set()  # process ids of the children that `run` waits for
_forks: ForkServer | None = None
_USER_ERROR = re.compile(r"(?:\S+: )?error: (.+)")
"""Pattern of an error line, as alma.errors prints it, or argparse after its program's name."""
_EXCEPTION = re.compile(r"([\w.]+(?:Error|Exception|Interrupt)\b.*)")


class StageFailed(Exception):
    """A child failed for a reason other than user input; the message is one line."""


class Saved(StageFailed):
    """A signal stopped a training, which saved a checkpoint if it had started; run it again."""


@contextlib.contextmanager
def failures_in_one_line() -> Iterator[None]:
    """Print StageFailed as `error: ...` and exit with code 1."""
    try:
        yield
    except StageFailed as failed:
        print(f"error: {terminal(str(failed))}", file=sys.stderr)
        sys.exit(1)


@contextlib.contextmanager
def preloaded(modules: Sequence[str]) -> Iterator[None]:
    """Start children `python -m …` as forks of a process that has imported `modules`."""
    global _forks
    _forks = ForkServer(modules)
    try:
        yield
    finally:
        _forks.stop()
        _forks = None


def run(
    command: Sequence[str],
    log: Path,
    name: str,
    watch: Watch = None,
    environment: Environment = None,
) -> None:
    """Run `command` to its end; append its output to `log` and pass each line to `watch`.

    `environment` extends this process's environment. An exception, such as KeyboardInterrupt, first
    ends the child and its workers.

    Raises UserError for exit code 2 with an `error: ...` line, Saved after a stop by `save`, and
    StageFailed, which has `name`, for every other failure.
    """
    problem: re.Match[str] | None = None
    last_line = ""
    # A log rather than a pipe: it stays complete if the launcher dies, and a worker that keeps a
    # pipe open cannot block the launcher.
    with appending(log) as output, log.open("rb") as appended, open(os.devnull) as nothing:
        output.write(f"\n$ {shlex.join(command)}\n".encode())
        output.flush()
        appended.seek(0, os.SEEK_END)
        process = _start(command, (nothing, output, output), environment or {})
        _running.add(process.pid)
        rest = b""  # the beginning of a line that is not complete yet
        ended = False
        try:
            while not ended:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=0.1)
                # Determined before the last read, so that the read misses no output.
                ended = process.returncode is not None
                *lines, rest = (rest + appended.read()).split(b"\n")
                for line in filter(None, [*lines, rest] if ended else lines):
                    text = line.decode(errors="replace")
                    problem = last_problem(text) or problem
                    last_line = text.strip() or last_line
                    if watch:
                        watch(text)
        finally:
            _running.discard(process.pid)
            _stop(process)
    if process.returncode in (os.EX_TEMPFAIL, -signal.SIGUSR1, -signal.SIGUSR2):
        raise Saved(f"{name}: stopped by a signal; rerun the command to resume; log: {log}")
    if process.returncode:
        error = failure(name, process.returncode, problem, f"log: {log}", last_line)
        if process.returncode < 0:  # a killed process logs nothing itself
            with appending(log) as output:
                output.write(f"error: {error}\n".encode())
        raise error


def appending(log: Path) -> IO[bytes]:
    """Open a log to append to it. UserError: as `alma.files.open_for_writing`, such as a link."""
    return open(open_for_writing(log, os.O_APPEND), "ab")


def ask(command: Sequence[str], name: str, text: str | None = None) -> str:
    """Return the output of a short `command` with `text` as its input. Raises as `run` does."""
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(3)]
        stdin, output, errors = files
        stdin.write(text or "")
        stdin.seek(0)
        process = _start(command, (stdin, output, errors), {})
        stack.callback(_stop, process)
        process.wait()
        output.seek(0)
        errors.seek(0)
        if process.returncode:
            where = f"command: {shlex.join(command)}"
            raise failure(name, process.returncode, last_problem(errors.read()), where)
        return output.read()


def _start(
    command: Sequence[str], files: tuple[IO, IO, IO], environment: Mapping[str, str]
) -> subprocess.Popen | Fork:
    """Start a child with its stdin, stdout and stderr."""
    stdin, output, errors = files
    everything = {**os.environ, **OWN_MODULES, **environment}
    if _forks and tuple(command[:2]) == (sys.executable, "-m"):
        try:
            return _forks.start(command[2:], [file.fileno() for file in files], everything)
        except ConnectionError as error:
            killed = "the process that starts the commands of a stage was killed"
            raise StageFailed(f"{killed}; rerun the command to resume") from error
    return subprocess.Popen(
        command,
        stdin=stdin,
        stdout=output,
        stderr=errors,
        process_group=0,  # so that Ctrl-C reaches the launcher only
        preexec_fn=dies_with_parent(),
        env=everything,
    )


def save(seconds: float = 0) -> None:
    """Signal running trainings to save and exit; wait up to `seconds`.

    Safe to call from a signal handler.
    """
    pids = list(_running)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGUSR1)
    deadline = time.monotonic() + seconds
    # Not Popen.wait: it holds a lock, and a handler that interrupts it would deadlock.
    while any(_alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)


def end_all() -> None:
    """Terminate the children that other threads wait for in `run`."""
    for pid in list(_running):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGTERM)


def _alive(pid: int) -> bool:
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:  # it has ended, or it is a fork, which is no child of this process
        return Path(f"/proc/{pid}").exists()


def failure(
    name: str, code: int, problem: re.Match[str] | None, where: str, last_line: str = ""
) -> Exception:
    """The exception for a child that ended with `code`.

    problem: `last_problem` of its output. where: its log or its command. last_line: of its output,
    shown if no line reports an error and no signal ended it.
    """
    if code == 2 and problem and problem.re is _USER_ERROR:
        return UserError(problem[1])
    if code > 0:
        parts = [name, f"exit code {code}", problem[1] if problem else last_line[:_SHOWN]]
    else:
        parts = [name, f"signal {-code} ({signal.strsignal(-code)})", problem[1] if problem else ""]
    return StageFailed(f"{': '.join(filter(None, parts))}; {where}")


def last_problem(output: str) -> re.Match[str] | None:
    """The match of the last line that reports an error, with the message in group 1, or None."""
    for line in reversed(output.splitlines()):
        problem = _USER_ERROR.match(line) or _EXCEPTION.match(line)
        if problem:
            return problem
    return None


def _stop(process: subprocess.Popen | Fork) -> None:
    """End the child if it is running, and workers that outlived it."""
    with contextlib.suppress(ProcessLookupError):
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_SECONDS)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
