"""Atomic files and locks."""

import errno
import fcntl
import json
import os
import signal
import socket
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from alma.errors import UserError
from alma.files import atomic_write, filled, holder, locked, write_json_atomic


@pytest.mark.parametrize(
    ("mode", "old", "new"), [("w", "old", "nëw\n"), ("wb", b"old", b"\x00new")]
)
def test_a_file_changes_only_if_the_block_succeeds(tmp_path, mode, old, new):
    path = tmp_path / "file"
    with atomic_write(path, mode) as file:
        file.write(old)
        assert not path.exists()
    before = path.read_bytes()
    with pytest.raises(ZeroDivisionError), atomic_write(path, mode) as file:  # noqa: PT012
        file.write(new)
        file.flush()
        raise ZeroDivisionError
    assert path.read_bytes() == before
    with atomic_write(path, mode) as file:
        file.write(new)
    assert path.read_bytes() == (new if isinstance(new, bytes) else new.encode())
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_is_on_the_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    """After a power failure the path has the old bytes or the new ones, never an empty file."""
    steps = []
    fsync = os.fsync
    replace = os.replace

    def recorded_fsync(descriptor):
        is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        steps.append("fsync of the folder" if is_folder else "fsync of the file")
        fsync(descriptor)

    def recorded_replace(source, target):
        steps.append(f"rename to {Path(target).name}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "replace", recorded_replace)
    with atomic_write(tmp_path / "file") as file:
        file.write("new")
    assert steps == ["fsync of the file", "rename to file", "fsync of the folder"]


def test_the_file_that_marks_a_whole_folder_comes_last(tmp_path, monkeypatch):
    """Killed in between, the folder has no mark, so that nobody takes it for a whole one."""
    arrived = []
    replace = os.replace

    def recorded(source, target):
        arrived.append(Path(target).name)
        replace(source, target)

    monkeypatch.setattr(os, "replace", recorded)
    with filled(tmp_path / "out", "config.json", (OSError,)) as folder:
        for name in ("config.json", "weights.bin", "a.txt"):
            (folder / name).write_text(name)
    assert sorted(arrived) == ["a.txt", "config.json", "weights.bin"]
    assert arrived[-1] == "config.json"


def test_a_write_takes_over_what_a_killed_process_left(tmp_path):
    path = tmp_path / "file"
    code = (
        "import os, signal, sys; from alma.files import atomic_write\n"
        "with atomic_write(sys.argv[1]) as file:\n"
        "    file.write('a long text'); file.flush(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", code, path]).returncode == -signal.SIGKILL
    assert [path.name for path in tmp_path.iterdir()] == [".file.tmp"]
    with atomic_write(path) as file:
        file.write("new")
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_writers_of_one_file_do_not_mix(tmp_path):
    path = tmp_path / "file"
    with atomic_write(path) as first, atomic_write(path) as second:
        first.write("first" * 1000)
        second.write("second")
    assert path.read_text() == "first" * 1000  # renamed last

    def write(number):
        for _ in range(50):
            with atomic_write(path) as file:
                file.write(str(number) * 5000)

    with ThreadPoolExecutor(4) as pool:
        tasks = [pool.submit(write, number) for number in range(4)]
        while not all(task.done() for task in tasks):
            text = path.read_text()
            assert len(set(text)) == 1 or text.startswith("first")
        assert [task.result() for task in tasks] == [None] * 4
    assert list(tmp_path.iterdir()) == [path]


def test_a_json_file_is_valid_with_the_default_permissions(tmp_path):
    (tmp_path / "plain").touch()
    path = tmp_path / "a.json"
    write_json_atomic(path, {"ä": [1, 0.1, None]})
    with pytest.raises(ValueError, match="JSON"):
        write_json_atomic(path, {"x": float("nan")})
    assert json.loads(path.read_text()) == {"ä": [1, 0.1, None]}
    assert path.stat().st_mode == (tmp_path / "plain").stat().st_mode


HOLD = "import sys; from pathlib import Path; from alma.files import locked\n"
HOLD += "with locked(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"


def hold(directory: Path) -> subprocess.Popen[str]:
    """Start a process that locks the directory until its stdin is closed;
    returns once it holds the lock."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout
    if process.stdout.readline() != "held\n":
        raise RuntimeError(process.communicate()[1])
    return process


def test_a_lock_is_held_until_its_process_ends_or_dies(tmp_path):
    process = hold(tmp_path)
    who = f"pid {process.pid} on {socket.gethostname()}"
    for _ in range(2):  # neither an attempt nor reading the holder releases the lock
        with (
            pytest.raises(UserError, match=rf"another process is at work here \({who}\)"),
            locked(tmp_path),
        ):
            pass
        assert holder(tmp_path) == who
    process.kill()
    process.communicate()
    assert holder(tmp_path) is None
    with locked(tmp_path), pytest.raises(RuntimeError, match=f"pid {os.getpid()} on"):
        hold(tmp_path)
    hold(tmp_path).communicate()
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_the_lock_is_posix_as_nfs_needs(tmp_path):
    script = (
        "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'r+'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    )
    command = [sys.executable, "-c", script, str(tmp_path / ".lock")]
    with locked(tmp_path):
        assert "BlockingIOError" in subprocess.run(command, capture_output=True, text=True).stderr
    assert subprocess.run(command).returncode == 0


def test_a_fork_does_not_keep_the_lock(tmp_path):
    reader, writer = os.pipe()
    with locked(tmp_path):
        child = os.fork()
        if child == 0:
            os.close(writer)
            os.read(reader, 1)  # until the parent has closed its end
            os._exit(0)
        with pytest.raises(RuntimeError, match=f"pid {os.getpid()}"):
            hold(tmp_path)
    hold(tmp_path).communicate()
    os.close(writer)
    assert os.waitpid(child, 0)[1] == 0


def test_a_file_system_without_locks_causes_a_warning(tmp_path, monkeypatch, capsys):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "fcntl", no_locks)
    with locked(tmp_path):
        assert "no locks here" in capsys.readouterr().err
