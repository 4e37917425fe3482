"""This process: its memory, and its end when its parent was killed."""

import multiprocessing
import os
import resource
import signal
import threading
from pathlib import Path


def end_with_parent() -> None:
    """Let a worker end when its parent was killed, and finish its unit when the user interrupts."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()

    def watch() -> None:
        if parent:
            parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def reset_peak_memory() -> bool:
    """Have `peak_memory` count from now on; whether the system can do that (Linux: /proc/self/clear_refs)."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def peak_memory() -> int:
    """Most memory that this process has had at a time, bytes, the code of its libraries included."""
    try:
        # not ru_maxrss, which a new process has from the one that started it
        return 1024 * int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
    except (OSError, IndexError):
        return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
