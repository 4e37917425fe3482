"""A dry run says in one line that the installed torch cannot use the GPUs."""

import os
from pathlib import Path

import pytest
from launcher import SMALL

from slurm.engine import cards
from slurm.engine.machine import Machine

ON_SLURM = ("--cluster", "slurm", "--dry-run")
LINE = (
    "warning: V100 cards (compute capability 7.0), but the torch installed here is for CUDA 13, "
    "which needs 7.5 or newer: install another torch by `make TORCH=2.7.1` (docs/install.md)"
)


@pytest.fixture
def torch(monkeypatch):
    """`torch(13.0)`: the CUDA version of the installed torch."""
    return lambda cuda: monkeypatch.setattr(cards, "cuda_of_torch", lambda: cuda)


def warnings(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("warning: ")]


@pytest.mark.parametrize(
    ("words", "cuda", "lines"),
    [
        (["--sbatch", "constraint=v100"], 13.0, [LINE]),
        (["--sbatch", "constraint=V100-32GB&ib"], 13.0, [LINE]),
        (["--sbatch", "constraint=Volta"], 13.0, [LINE]),
        (["--sbatch", "gres=gpu:v100"], 13.0, [LINE]),
        (["--sbatch", "constraint=v100"], 12.6, []),
        (["--sbatch", "constraint=v100"], None, []),
        (["--sbatch", "constraint=a100"], 13.0, []),
        ([], 13.0, []),
    ],
)
def test_cards_asked_of_slurm(launcher, torch, words, cuda, lines):
    torch(cuda)
    assert warnings(launcher.run(*ON_SLURM, *words, flags=SMALL)[1]) == lines


def test_not_on_a_cpu(launcher, torch):
    torch(13.0)
    words = (*ON_SLURM, "--sbatch", "constraint=v100")
    assert warnings(launcher.run(*words, flags=(*SMALL, "--cpu"))[1]) == []


@pytest.mark.parametrize(
    ("capability", "lines"),
    [
        ("7.0", [LINE]),
        (
            "6.1",
            [
                LINE.replace(
                    "V100 cards (compute capability 7.0)", "cards of compute capability 6.1"
                )
            ],
        ),
        ("9.0", []),
        ("[N/A]", []),
    ],
)
def test_cards_of_this_machine(launcher, torch, tmp_path, monkeypatch, capability, lines):
    torch(13.0)
    tool = tmp_path / "bin/nvidia-smi"
    tool.parent.mkdir()
    answers = f"case $1 in *compute_cap) echo '{capability}';; *) echo 32768;; esac"
    tool.write_text(f"#!/bin/sh\n{answers}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    expected = None if capability == "[N/A]" else float(capability)
    assert Machine.here().slot(1, on_cpu=False).capability == expected
    assert warnings(launcher.run("--dry-run", flags=SMALL)[1]) == lines


def test_the_cuda_version_is_read_without_importing_torch(tmp_path, monkeypatch):
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('imported')\n")
    version = package / "version.py"
    monkeypatch.setattr(cards.importlib.util, "find_spec", lambda _: spec_of(package))
    assert cards.cuda_of_torch() is None
    version.write_text("__version__ = '2.13.0+cu130'\ncuda: Optional[str] = '13.0'\n")
    assert cards.cuda_of_torch() == 13.0
    version.write_text("__version__ = '2.7.1+cu126'\ncuda: Optional[str] = '12.6'\n")
    assert cards.cuda_of_torch() == 12.6
    version.write_text("__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\n")
    assert cards.cuda_of_torch() is None
    monkeypatch.setattr(cards.importlib.util, "find_spec", lambda _: None)
    assert cards.cuda_of_torch() is None


def spec_of(package: Path):
    from importlib.machinery import ModuleSpec

    return ModuleSpec("torch", None, origin=str(package / "__init__.py"))


def test_it_is_the_version_of_the_installed_torch():
    import torch

    installed = torch.version.cuda
    assert cards.cuda_of_torch() == (None if installed is None else float(installed))
