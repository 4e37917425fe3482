"""Where a result comes from: package versions, the project's commit, the machine."""

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "torchvision", "numpy", "fairseq", "fairseq-fixed")


def versions() -> dict[str, str]:
    """Version of Python and of each installed package of PACKAGES; imports none of them."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """Git commit of this project, with `-dirty` when files differ from it; None outside its checkout."""
    here = Path(__file__)
    # Installed inside somebody else's repository, this file is not one of theirs.
    if _output("git", "-C", str(here.parent), "ls-files", "--error-unmatch", here.name) is None:
        return None
    return _output(
        "git", "-C", str(here.parent), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"
    )


def machine() -> dict[str, Any]:
    """Host name, CPU model, cores this process may use, memory in bytes, GPU names."""
    gpus = _output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
    return {
        "hostname": platform.node(),
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpus": gpus.splitlines() if gpus else [],
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.machine())


def _output(*command: str) -> str | None:
    """What a command prints, or None when it is missing, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
