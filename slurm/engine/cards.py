"""Check, without importing torch, whether the installed torch supports the GPUs."""

import importlib.util
import re
from pathlib import Path

from slurm.engine.machine import Machine

_FIRST_OF_CUDA_13 = 7.5
"""Compute capability of Turing. CUDA 13 has no code for older GPUs, such as V100 (7.0)."""
REMEDY = "install another torch by `make TORCH=2.7.1` (docs/install.md)"


def misfit(machine: Machine) -> str | None:
    """The reason why the torch installed here cannot use the GPUs of `machine`.

    None if it can, or if the GPUs or torch's CUDA version are unknown.
    """
    lowest = machine.capability
    cuda = cuda_of_torch()
    if lowest is None or cuda is None or cuda < 13 or lowest >= _FIRST_OF_CUDA_13:
        return None
    cards = f"cards of compute capability {lowest:g}"
    if lowest == 7.0:
        cards = "V100 cards (compute capability 7.0)"
    needs = f"needs {_FIRST_OF_CUDA_13:g} or newer"
    return f"{cards}, but the torch installed here is for CUDA {cuda:g}, which {needs}: {REMEDY}"


def cuda_of_torch() -> float | None:
    """The CUDA version that the installed torch is built for; None: no torch, or a build without
    CUDA."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.origin:
        return None
    file = Path(spec.origin).with_name("version.py")
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    version = re.search(r"^cuda\b.*=\s*['\"](\d+\.\d+)", text, re.MULTILINE)
    return float(version[1]) if version else None
