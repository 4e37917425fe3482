"""GPUs and free memory of this machine, without torch."""

import os
import re
import subprocess
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from alma.errors import UserError


@dataclass(frozen=True)
class Machine:
    """What trainings may use: bytes of each GPU, and bytes of free memory (None: unknown)."""

    gpus: tuple[int, ...]
    memory: int | None
    tasks: int | None = None  # of the SLURM job; None: this machine

    @classmethod
    def here(cls) -> "Machine":
        """This machine, from nvidia-smi, CUDA_VISIBLE_DEVICES and MemAvailable of /proc/meminfo."""
        meminfo = Path("/proc/meminfo")
        text = meminfo.read_text() if meminfo.exists() else ""
        available = re.search(r"^MemAvailable: +(\d+) kB$", text, re.MULTILINE)
        return cls(_gpus(), int(available[1]) * 1024 if available else None)

    def slot(self, jobs: int, on_cpu: bool) -> "Machine":
        """The equal share of each of `jobs` concurrent trainings. Raises UserError if GPUs are too few."""
        if 0 < (gpus := len(self.gpus)) < jobs and not on_cpu:
            need = f"GPUs on this machine: {gpus}, and each training needs at least one of its own"
            raise UserError(f"--jobs {jobs}: {need}: give --jobs {gpus} or fewer, or --cpu after the `--`")
        return Machine(self.gpus[: gpus // jobs], None if self.memory is None else self.memory // jobs)


def devices(jobs: int) -> list[str | None]:
    """CUDA_VISIBLE_DEVICES of each of `jobs` concurrent trainings; None if there are fewer GPUs."""
    gpus = len(_gpus())
    names = (_visible() or [str(index) for index in range(gpus)])[:gpus]
    share = gpus // jobs
    return [",".join(names[index * share :][:share]) or None for index in range(jobs)]


def _gpus() -> tuple[int, ...]:
    """Bytes of each visible GPU; with CUDA_VISIBLE_DEVICES all GPUs are taken to be alike."""
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    gpus = tuple(int(line) * 2**20 for line in answer.split() if line.isdecimal())
    visible = _visible()
    return gpus if visible is None else gpus[: len(visible)]


def _visible() -> list[str] | None:
    """Indices or UUIDs in CUDA_VISIBLE_DEVICES up to the first invalid one, as CUDA reads it; None: unset."""
    text = os.environ.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return None
    return list(takewhile(lambda name: name not in ("", "-1"), map(str.strip, text.split(","))))
