"""Memory and parents of a process, as Linux has them."""

import re
import resource
from pathlib import Path

PR_SET_PDEATHSIG = 1  # <sys/prctl.h>: the signal that a process gets when its parent ends


def reset_peak_memory() -> bool:
    """Reset the peak to the memory in use; return False if /proc/self/clear_refs is read-only."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def peak_memory() -> int:
    """Peak resident memory of this process in bytes, without mapped files such as shared libraries.

    The same command has a lower peak as a fork than as a new process: a new process reads all pages
    of its imports, a fork only those that it uses.
    """
    try:
        fields = dict(
            re.findall(r"(VmHWM|RssFile):\s+(\d+) kB", Path("/proc/self/status").read_text())
        )
        return 1024 * (int(fields["VmHWM"]) - int(fields["RssFile"]))
    except (OSError, KeyError):  # less exact: a new process inherits ru_maxrss from its parent
        return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
