"""Child processes: all their output in a log, none outlives the launcher, a failure is one clear line."""

import contextlib
import ctypes
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from alma.errors import UserError

GRACE_SECONDS = 10
_running: set[int] = set()
"""Process ids of the children that `run` waits for."""
_lent = False  # the terminal, to the child at work
_PR_SET_PDEATHSIG = 1  # <sys/prctl.h>
_USER_ERROR = re.compile(r"(?:\S+: )?error: (.+)")  # of alma.errors, and with the program's name of argparse
_EXCEPTION = re.compile(r"([\w.]+(?:Error|Exception|Interrupt)\b.*)")


class StageFailed(Exception):
    """A child ended for a reason other than the user's input; the message is one line."""


class Saved(StageFailed):
    """A training was asked by a signal to save and did, or had nothing to save yet; it is to be run again."""


def lend_terminal() -> None:
    """From now on children, one at a time, read from the terminal, and what they print is copied to it."""
    global _lent
    _lent = True


def terminal_is_lent() -> bool:
    """Whether a child may be writing to the terminal."""
    return _lent


def run(
    command: Sequence[str],
    log: Path,
    what: str,
    watch: Callable[[str], None] | None = None,
    environment: Mapping[str, str] | None = None,
) -> None:
    """Run `command` to its end, its output appended to `log` and each line given to `watch` as it comes.

    `environment` adds to this process's. UserError when it exits with 2 and an `error: ...` line, Saved when
    it has done what `save` asked, StageFailed (which names `what`) when it fails otherwise. Whatever
    interrupts this function ends the child and its workers first.
    """
    problem: re.Match[str] | None = None
    with log.open("ab") as output, log.open("rb") as lines:
        output.write(f"\n$ {shlex.join(command)}\n".encode())
        output.flush()
        lines.seek(0, os.SEEK_END)
        process = subprocess.Popen(
            command,
            stdin=None if _lent else subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            process_group=None if _lent else 0,  # that of the launcher may read from the terminal
            preexec_fn=_dies_with_parent(),
            env={**os.environ, **({"PYTHONUNBUFFERED": "1"} if _lent else {}), **(environment or {})},
        )
        _running.add(process.pid)
        try:
            for line in _follow(lines, process):
                problem = _USER_ERROR.match(line) or _EXCEPTION.match(line) or problem
                if watch:
                    watch(line)
        finally:
            _running.discard(process.pid)
            _stop(process)
    if process.returncode in (os.EX_TEMPFAIL, -signal.SIGUSR1, -signal.SIGUSR2):
        raise Saved(f"{what}: stopped by a signal, and saved; run the same again; log: {log}")
    if process.returncode:
        error = failure(what, process.returncode, problem, f"log: {log}")
        if process.returncode < 0:  # killed: it could not say so itself
            with log.open("a") as output:
                output.write(f"error: {error}\n")
        raise error


def ask(command: Sequence[str], what: str, given: str | None = None) -> str:
    """What `command`, a short one, prints when it is `given` a text to read; failures as of `run`."""
    done = subprocess.run(
        command, input=given, stdin=None if given else subprocess.DEVNULL, capture_output=True, text=True
    )
    if done.returncode:
        raise failure(what, done.returncode, last_problem(done.stderr), f"command: {shlex.join(command)}")
    return done.stdout


def save(seconds: float = 0) -> None:
    """Ask the trainings that run for a checkpoint and their end, and wait for it, but not longer.

    What a signal handler can call while `run` waits for them.
    """
    pids = list(_running)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGUSR1)
    deadline = time.monotonic() + seconds
    # Popen's own wait would not return in a handler that interrupts it.
    while any(_alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)


def end_all() -> None:
    """End the children that other threads wait for in `run`."""
    for pid in list(_running):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGTERM)


def _alive(pid: int) -> bool:
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:
        return False


def failure(what: str, code: int, problem: re.Match[str] | None, where: str) -> Exception:
    """What to raise for a child that ended with `code`, the last `problem` in its output being this."""
    if code == 2 and problem and problem.re is _USER_ERROR:
        return UserError(problem[1])
    how = f"exit code {code}" if code > 0 else f"signal {-code} ({signal.strsignal(-code)})"
    return StageFailed(": ".join(filter(None, (what, how, problem and problem[1]))) + f"; {where}")


def last_problem(output: str) -> re.Match[str] | None:
    """The last line of `output` that says what went wrong."""
    found = (_USER_ERROR.match(line) or _EXCEPTION.match(line) for line in reversed(output.splitlines()))
    return next(filter(None, found), None)


def signal_at_parents_death(number: int) -> None:
    """Have the kernel send this process that signal when the one that started it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def _dies_with_parent() -> Callable[[], None]:
    # When the launcher is killed (SIGKILL, out of memory) the kernel releases its lock on the run, and the
    # next launcher starts the same stage: an orphan still training would write the same checkpoints. Only
    # the kernel can end it then. The call is looked up here because little is safe between fork and exec.
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()

    def before_exec() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before it could be watched
            os._exit(1)

    return before_exec


def _follow(log: BinaryIO, process: subprocess.Popen) -> Iterator[str]:
    """Lines as they are appended to `log`, until `process` has ended.

    Following the file rather than a pipe: the log is whole whatever becomes of the launcher, and a
    worker that keeps a pipe open cannot make it wait.
    """
    rest = b""
    ended = False
    while not ended:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=0.1)
        ended = process.returncode is not None  # seen before the last read: nothing it wrote is missed
        new = log.read()
        if _lent:  # not by lines: a debugger's prompt is none
            sys.stdout.buffer.write(new)
            sys.stdout.buffer.flush()
        *lines, rest = (rest + new).split(b"\n")
        yield from (line.decode(errors="replace") for line in (*lines, rest if ended else b"") if line)


def _stop(process: subprocess.Popen) -> None:
    """End the child if it still runs, and its workers if they outlived it."""

    def send(number: int) -> None:
        if _lent:  # it has no group of its own
            process.send_signal(number)
        else:
            os.killpg(process.pid, number)

    with contextlib.suppress(ProcessLookupError):
        if process.poll() is None:
            send(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_SECONDS)
        send(signal.SIGKILL)
    process.wait()
