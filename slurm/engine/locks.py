"""Locks that wait for their holder."""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

from alma.errors import UserError
from alma.files import LOCK, locked

_WAIT_SECONDS = 120


@contextlib.contextmanager
def patiently_locked(directory: Path, name: str = LOCK) -> Iterator[None]:
    """Hold `alma.files.locked`, waiting up to two minutes for another holder; then raise its UserError."""
    deadline = time.monotonic() + _WAIT_SECONDS
    with contextlib.ExitStack() as stack:
        while True:
            try:
                stack.enter_context(locked(directory, name))
                break
            except UserError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)
        yield
