"""Memory of a process, as Linux reports it."""

import resource
from pathlib import Path


def reset_peak_memory() -> bool:
    """Restart `peak_memory` at the memory in use; False where /proc/self/clear_refs cannot be written."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def peak_memory() -> int:
    """Peak resident memory of this process in bytes, shared libraries included."""
    try:
        return resident_memory(peak=True)
    except (OSError, IndexError):  # second choice: a new process inherits ru_maxrss from its parent
        return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def resident_memory(pid: int | str = "self", peak: bool = False) -> int:
    """Resident memory of a process in bytes, now or at its peak; OSError or IndexError without /proc."""
    field = "VmHWM:" if peak else "VmRSS:"
    return 1024 * int(Path(f"/proc/{pid}/status").read_text().split(field)[1].split()[0])
