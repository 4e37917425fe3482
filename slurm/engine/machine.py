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
    """The resources of a machine: bytes of each GPU, bytes of free memory (None: unknown)."""

    gpus: tuple[int, ...]
    memory: int | None
    tasks: int | None = None  # number of tasks of the SLURM job; None: this machine
    capability: float | None = None  # compute capability of its oldest GPU; None: unknown

    @classmethod
    def here(cls) -> "Machine":
        """This machine, from nvidia-smi, CUDA_VISIBLE_DEVICES and MemAvailable of /proc/meminfo."""
        meminfo = Path("/proc/meminfo")
        text = meminfo.read_text() if meminfo.exists() else ""
        available = re.search(r"^MemAvailable: +(\d+) kB$", text, re.MULTILINE)
        memory = int(available[1]) * 1024 if available else None
        gpus = _gpus()
        return cls(gpus, memory, capability=_capability() if gpus else None)

    def slot(self, jobs: int, on_cpu: bool) -> "Machine":
        """The equal share of each of `jobs` concurrent trainings. UserError: too few GPUs."""
        gpus = len(self.gpus)
        if 0 < gpus < jobs and not on_cpu:
            need = f"GPUs on this machine: {gpus}, and each training needs at least one of its own"
            raise UserError(
                f"--jobs {jobs}: {need}: give --jobs {gpus} or fewer, or --cpu after the `--`"
            )
        memory = None if self.memory is None else self.memory // jobs
        return Machine(self.gpus[: gpus // jobs], memory, capability=self.capability)


def devices(jobs: int) -> list[str | None]:
    """CUDA_VISIBLE_DEVICES of each of `jobs` concurrent trainings; None if there are fewer GPUs."""
    gpus = len(_gpus())
    names = (_visible() or [str(index) for index in range(gpus)])[:gpus]
    share = gpus // jobs
    return [",".join(names[index * share :][:share]) or None for index in range(jobs)]


def _gpus() -> tuple[int, ...]:
    """Bytes of each visible GPU; with CUDA_VISIBLE_DEVICES all GPUs are taken to be alike."""
    gpus = tuple(int(line) * 2**20 for line in _query("memory.total") if line.isdecimal())
    visible = _visible()
    return gpus if visible is None else gpus[: len(visible)]


def _capability() -> float | None:
    """Compute capability of the oldest GPU, such as 7.0 of a V100; None: unknown."""
    numbers = [float(line) for line in _query("compute_cap") if re.fullmatch(r"\d+\.\d+", line)]
    return min(numbers, default=None)


def _query(field: str) -> list[str]:
    """The value of a field of nvidia-smi for each GPU; [] without nvidia-smi."""
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return answer.stdout.split()


def _visible() -> list[str] | None:
    """Devices in CUDA_VISIBLE_DEVICES up to the first invalid one, as CUDA does; None: unset."""
    text = os.environ.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return None
    return list(takewhile(lambda name: name not in ("", "-1"), map(str.strip, text.split(","))))
