"""The machine that stages run on: its GPUs and its free memory, asked without torch."""

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Machine:
    """Where the stages run: bytes of each GPU, and of the memory that is free (None: not known)."""

    gpus: tuple[int, ...]
    memory: int | None

    @classmethod
    def here(cls) -> "Machine":
        """This machine, as nvidia-smi, CUDA_VISIBLE_DEVICES and /proc/meminfo tell."""
        return cls(_gpus(), _free_memory())


def _gpus() -> tuple[int, ...]:
    """Bytes of each GPU; of those in CUDA_VISIBLE_DEVICES, which are taken to be alike, where it is set."""
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    gpus = tuple(int(line) * 2**20 for line in answer.split() if line.isdecimal())
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return gpus
    return gpus[: len([name for name in visible.split(",") if name.strip() not in ("", "-1")])]


def _free_memory() -> int | None:
    """Bytes that new processes may take (MemAvailable); None where there is no /proc."""
    try:
        found = re.search(r"^MemAvailable: +(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None
