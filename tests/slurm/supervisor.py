"""Ancestor of all daemons and jobs of a test cluster;
ends them when told to, or after the test process."""

import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

_CHILD_SUBREAPER = 36  # linux/prctl.h


def parent_ids() -> dict[int, int]:
    """Parent of each process, by process id."""
    processes = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = path.read_text(errors="replace")
        except OSError:
            continue  # just ended
        processes[int(path.parent.name)] = int(text.rpartition(")")[2].split()[1])
    return processes


def descendants(pid: int) -> list[int]:
    """Children, their children and so on."""
    parents = parent_ids()
    family = [pid]
    for ancestor in family:  # grows as it is read
        family += [child for child, parent in parents.items() if parent == ancestor]
    return family[1:]


def read_proc(pid: int, name: str) -> str:
    """Content of a file of /proc/PID; empty once the process has ended."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def supervise(parent: int, root: str) -> None:
    """Start daemons as stdin orders until its end, the parent's or SIGTERM;
    then kill all descendants."""
    # Orphans become children of this process: slurmstepds, and processes that jobs leave behind.
    ctypes.CDLL(None).prctl(_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    daemons = []
    try:
        # The end of stdin is not enough: forks of the parent may hold it open.
        while os.getppid() == parent:
            if select.select([sys.stdin], [], [], 0.1)[0]:
                line = sys.stdin.readline()
                if not line:
                    break
                order = json.loads(line)
                with open(order["log"], "ab") as log:
                    daemons.append(
                        subprocess.Popen(
                            order["argv"],
                            stdin=subprocess.DEVNULL,
                            stdout=log,
                            stderr=log,
                            env=order["environment"],
                            cwd=root,
                        )
                    )
                print(daemons[-1].pid, flush=True)
            _reap()
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        deadline = time.monotonic() + 10
        while _reap() and time.monotonic() < deadline:
            for pid in descendants(os.getpid()):
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        shutil.rmtree(root, ignore_errors=True)


def _reap() -> bool:
    """Reap ended children; return whether others are left."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


if __name__ == "__main__":
    supervise(int(sys.argv[1]), sys.argv[2])
