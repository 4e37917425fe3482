"""Provenance of a run: package versions, git commit, machine."""

import os
import platform
import re
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "torchvision", "numpy", "fairseq", "fairseq-fixed", "transformers", "peft")
_OF_GIT = {"GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_COMMON_DIR", "GIT_OBJECT_DIRECTORY"}


def versions() -> dict[str, str]:
    """Versions of Python and of the installed PACKAGES, from metadata, without imports."""
    from importlib import metadata  # slow to import

    by_package = {"python": platform.python_version()}
    for package in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            by_package[package] = metadata.version(package)
    return by_package


def commit() -> str | None:
    """Git commit of this checkout, `-dirty` if files are modified; None for a package."""
    this_file = Path(__file__)
    git = ("git", "-C", str(this_file.parent))
    # If ALMA is installed in a virtual environment inside another project's repository, that
    # repository does not track this file.
    if _output(*git, "ls-files", "--error-unmatch", this_file.name) is None:
        return None
    return _output(*git, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


def git_environment() -> dict[str, str]:
    """The environment without git's variables, by which a git hook names its own repository."""
    return {name: value for name, value in os.environ.items() if name not in _OF_GIT}


def machine() -> dict[str, Any]:
    """Host name, CPU model, cores available to this process, memory in bytes, GPU names."""
    gpus = _output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
    cpu = platform.machine()
    with suppress(OSError):
        models = re.findall(r"^model name.*?:(.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        cpu = models[0].strip() if models else cpu
    return {
        "hostname": platform.node(),
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpus": gpus.splitlines() if gpus else [],
    }


def _output(*command: str) -> str | None:
    """Standard output of a command; None if it is missing, fails or takes 20 s."""
    try:
        env = git_environment()
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
