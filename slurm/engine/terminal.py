"""The terminal: messages beside progress bars, and whether a child process is attached to it."""

import sys

from tqdm import tqdm

tqdm.monitor_interval = 0  # no helper thread: forking a process that has threads is unsafe

attached = False
"""Whether children are attached to the terminal: they read from it, and their output is copied to it."""


def say(message: str) -> None:
    """Print one line to stderr, above any progress bar."""
    tqdm.write(message, file=sys.stderr)
    sys.stderr.flush()
