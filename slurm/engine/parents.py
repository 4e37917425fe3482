"""Children that end with their parent."""

import ctypes
import os
import signal
from collections.abc import Callable

PR_SET_PDEATHSIG = 1  # <sys/prctl.h>: the signal that a process gets when its parent ends


def dies_with_parent() -> Callable[[], None]:
    """A function that a child of this process calls first: the kernel then kills it when this process ends.

    If the launcher is killed (SIGKILL, out of memory), its lock is released and another launcher may start
    the same stage. An orphaned training would then write the same checkpoints.
    """
    # prctl is looked up before the fork: few calls are safe between fork and exec.
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()

    def first() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent died before the call above
            os._exit(1)

    return first
