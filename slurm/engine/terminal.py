"""The terminal: messages beside progress bars, and whether a child process is attached to it."""

import sys

from tqdm import tqdm

tqdm.monitor_interval = 0  # no helper thread: forking a process that has threads is unsafe

_attached = False


def say(message: str) -> None:
    """Print one line to stderr, above any progress bar."""
    tqdm.write(message, file=sys.stderr)
    sys.stderr.flush()


def attach() -> None:
    """Attach children to the terminal from now on: they read from it, and their output is copied to it."""
    global _attached
    _attached = True


def attached() -> bool:
    """Whether children are attached to the terminal."""
    return _attached
