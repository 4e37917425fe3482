"""Commands as forks: like new processes in all but the time that imports take."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from launcher import ended, wait_for

from slurm.engine import children
from slurm.engine.children import StageFailed
from slurm.engine.forks import Fork, ForkServer

LIBRARY = "open('imported', 'a').write('x')"
COMMAND = """
import os, subprocess, sys, time
import library
print(sys.argv[1:], os.environ["COLOUR"], os.getcwd(), sys.stdin.read(), __name__, flush=True)
print("problem", file=sys.stderr)
for what in sys.argv[1:]:
    match what:
        case "refuse": sys.exit(2)
        case "raise": raise RuntimeError("out of luck")
        case "sleep":
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
            open(f"{os.getpid()}.pids", "w").write(f"{os.getpid()} {child.pid}")
            time.sleep(100)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The modules `library` and `command`, in the working directory."""
    (tmp_path / "library.py").write_text(LIBRARY)
    (tmp_path / "command.py").write_text(COMMAND)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("COLOUR", "blue")
    return tmp_path


@pytest.fixture
def server(folder) -> Iterator[ForkServer]:
    """A server that has imported `library`."""
    fork_server = ForkServer(["library", "no_such_module"])
    yield fork_server
    fork_server.stop()


def start(server: ForkServer, *words: str, name: str = "x", **variables: str) -> Fork:
    """Start `command` with its input and output in files."""
    Path(f"{name}.in").write_text("given")
    with (
        open(f"{name}.in") as stdin,
        open(f"{name}.out", "w") as out,
        open(f"{name}.err", "w") as err,
    ):
        files = [stdin.fileno(), out.fileno(), err.fileno()]
        return server.start(
            ["command", *words], files, {**os.environ, "COLOUR": "red", **variables}
        )


def pids(folder: Path) -> list[int]:
    """The processes of all commands that sleep."""
    return [int(pid) for path in folder.glob("*.pids") for pid in path.read_text().split()]


def test_command(server, folder):
    """A fork has the arguments, environment, directory and files that it was given,
    and an exit code.

    The environment may be larger than a message of a socket.
    The library is imported once, by the server.
    """
    many = {f"NAME{k}": "x" * 1000 for k in range(400)}
    assert start(server, "a", "b c", **many).wait() == 0
    assert Path("x.out").read_text() == f"['a', 'b c'] red {folder} given __main__\n"
    assert Path("x.err").read_text() == "problem\n"
    assert start(server, "refuse").wait() == 2
    assert start(server, "raise").wait() == 1
    assert "RuntimeError: out of luck" in Path("x.err").read_text()
    assert Path("imported").read_text() == "x"


def test_signals_and_side_by_side(server, folder):
    """Two forks run at the same time, each in a process group of its own."""
    both = [start(server, "sleep", name=name) for name in "xy"]
    wait_for(lambda: len(pids(folder)) == 4)
    with pytest.raises(subprocess.TimeoutExpired):
        both[0].wait(0.01)
    os.killpg(both[0].pid, signal.SIGTERM)
    assert both[0].wait() == -signal.SIGTERM
    wait_for(lambda: sum(map(ended, pids(folder))) == 2)
    os.kill(both[1].pid, signal.SIGKILL)
    assert both[1].wait() == both[1].poll() == -signal.SIGKILL


def test_killed_server(server, folder):
    """Its commands die with it; the next one fails with one line."""
    fork = start(server, "sleep")
    wait_for(lambda: pids(folder))
    server._server.kill()
    assert fork.wait() == -signal.SIGKILL
    wait_for(lambda: ended(fork.pid))
    with pytest.raises(ConnectionError):
        start(server)


def test_killed_launcher(folder):
    """No command outlives the launcher."""
    code = "import sys, os; from slurm.engine.forks import *\n"
    code += "s = ForkServer([]); f = os.open('log', 65)\n"
    code += "s.start(['command', 'sleep'], [0, f, f], os.environ).wait()"
    root = Path(__file__).parents[2]
    launcher = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{folder}"},
    )
    wait_for(lambda: pids(folder))
    launcher.kill()
    launcher.wait()
    command = int(next(folder.glob("*.pids")).stem)
    wait_for(lambda: ended(command))


def test_children_as_forks(folder):
    """`children.run` and `children.ask` start what they can as forks, with the same results."""
    command = [sys.executable, "-m", "command"]
    with children.preloaded(["library"]):
        assert "given __main__" in children.ask(command, "asking", "given")
        with pytest.raises(StageFailed, match=r"running: exit code 1: RuntimeError: out of luck"):
            children.run([*command, "raise"], folder / "log", "running")
        assert Path("imported").read_text() == "x"
        children._forks._server.kill()
        children._forks._server.wait()
        with pytest.raises(StageFailed, match="was killed; rerun the command to resume"):
            children.run(command, folder / "log", "running")


def test_peak_memory_of_a_fork_is_that_of_a_new_process(folder):
    """Though a new process has all pages of the files that its imports map,
    and a fork only what it uses."""
    Path("mapped").write_bytes(bytes(64_000_000))
    Path("library.py").write_text(
        "import mmap\nfile = open('mapped', 'rb')\n"
        "mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)\n"
        "mapped.find(b'x')\nkept = bytearray(b'x') * 8_000_000"
    )
    Path("command.py").write_text(
        "import library\nfrom alma.processes import peak_memory\nused = b'x' * 32_000_000\n"
        "print(peak_memory(), open('/proc/self/status').read().split('VmHWM:')[1].split()[0])"
    )
    server = ForkServer(["library"])
    assert start(server).wait() == 0
    server.stop()
    output = subprocess.check_output([sys.executable, "-m", "command"], text=True)
    (fork, of_fork), (new, of_new) = (
        map(int, text.split()) for text in (Path("x.out").read_text(), output)
    )
    assert 1024 * (of_new - of_fork) > 50_000_000
    assert abs(new - fork) < 5_000_000
    assert fork > 40_000_000
