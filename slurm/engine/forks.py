"""Commands `python -P -m MODULE …` as forks of one process that has imported their libraries.

An import of torch and fairseq takes seconds, a fork milliseconds. Every command is still a process
of its own, with its arguments, environment, output, signals and exit code. (The forkserver of
multiprocessing does not end when its client is killed while a fork runs.)

    launcher ── server ── waiter ── command
                        ╰ waiter ── command

The server imports the libraries and forks a waiter for each request. The waiter forks the command,
sends its process id to the launcher, waits for its end, and sends the exit code. Each process is
killed when the one to its left dies.
"""

import contextlib
import ctypes
import gc
import importlib
import json
import logging
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence

from alma.processes import PR_SET_PDEATHSIG


def dies_with_parent() -> Callable[[], None]:
    """A function that a child calls first, so that the kernel kills it when this process ends.

    If the launcher is killed (SIGKILL, out of memory), its lock is released and another launcher
    may start the same stage. An orphaned training would then write the same checkpoints.
    """
    # prctl is looked up before the fork: few calls are safe between fork and exec.
    prctl = ctypes.CDLL(None).prctl
    parent = os.getpid()

    def first() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent died before the call above
            os._exit(1)

    return first


class ForkServer:
    """Imports `modules` in another process, in the background, and starts commands as its forks."""

    def __init__(self, modules: Sequence[str]):
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._server = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, *modules],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                process_group=0,  # Ctrl-C is for the launcher
                preexec_fn=dies_with_parent(),
            )

    def start(
        self, words: Sequence[str], files: Sequence[int], environment: Mapping[str, str]
    ) -> "Fork":
        """Run `python -P -m` with `words`; `files` are its stdin, stdout and stderr.

        ConnectionError: the server was killed.
        """
        reader, writer = os.pipe()
        try:
            # In a file, because a message over the socket may have at most 208 kB.
            with tempfile.TemporaryFile("w+") as file:
                json.dump(
                    {"words": words, "environment": dict(environment), "directory": os.getcwd()},
                    file,
                )
                file.seek(0)
                socket.send_fds(self._socket, [b"\n"], [*files, writer, file.fileno()])
        finally:
            os.close(writer)
        return Fork(words, reader)

    def stop(self) -> None:
        self._server.kill()
        self._server.wait()
        self._socket.close()


class Fork:
    """A command that `ForkServer` runs, with the part of subprocess.Popen that children.py uses."""

    def __init__(self, words: Sequence[str], status: int):
        self.args = words
        self.returncode: int | None = None
        self._status = open(status)  # noqa: SIM115 - closed with the exit code
        pid = self._status.readline()
        if not pid:
            raise ConnectionError
        self.pid = int(pid)

    def poll(self) -> int | None:
        """The exit code, or None while the command runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit code. subprocess.TimeoutExpired: still none after `timeout` seconds."""
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            line = self._status.readline()  # "" if the waiter was killed
            self.returncode = int(line or -signal.SIGKILL)
            self._status.close()
        return self.returncode


def main() -> None:
    """The server: fork for each request on stdin, until the launcher has closed its end."""
    for name in sys.argv[1:]:
        with contextlib.suppress(ImportError):  # a command that needs the module will say so
            importlib.import_module(name)
    gc.freeze()  # otherwise a garbage collection in a fork would copy all shared pages
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # waiters that end leave no zombies
    requests = socket.socket(fileno=os.dup(0))
    while True:
        message, files, *_ = socket.recv_fds(requests, 1, 5)
        if not message:
            return
        dies_first = dies_with_parent()
        if not os.fork():
            dies_first()
            requests.close()
            _wait_for_command(files)
            return  # reached only in the fork that runs the command
        for file in files:
            os.close(file)


def _wait_for_command(files: list[int]) -> None:
    """Run as a waiter: fork the command, report its process id and exit code, then exit.

    Only the command returns from this function, and runs its module.
    """
    *standard, status, request = files
    with open(request) as content:
        command = json.load(content)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    dies_first = dies_with_parent()
    pid = os.fork()
    if pid:
        with contextlib.suppress(OSError):  # both parent and command set the group: no race
            os.setpgid(pid, 0)
        os.write(status, b"%d\n" % pid)
        os.write(status, b"%d\n" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        os._exit(0)
    dies_first()
    os.setpgid(0, 0)
    for number, file in enumerate(standard):
        os.dup2(file, number)
        os.close(file)
    os.close(status)
    os.chdir(command["directory"])
    os.environ.clear()
    os.environ.update(command["environment"])
    logging.root.handlers.clear()  # set by the imports; the command sets its own
    sys.argv = command["words"]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
