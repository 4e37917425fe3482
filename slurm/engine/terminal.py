"""The terminal: messages beside progress bars."""

import sys

from tqdm import tqdm

from alma import escape

tqdm.monitor_interval = 0  # no helper thread: forking a process that has threads is unsafe


def say(message: str) -> None:
    """Print one line to stderr, above any progress bar."""
    tqdm.write(escape.lines(message), file=sys.stderr)
    sys.stderr.flush()
