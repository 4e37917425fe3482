"""The terminal: messages, and whether a child process is attached to it."""

import sys

attached = False
"""Whether children are attached to the terminal: they read from it, and their output is copied to it."""


def say(message: str) -> None:
    """Print one line to stderr."""
    print(message, file=sys.stderr, flush=True)
