"""Fixtures: private SLURM clusters, stand-ins for SLURM, a submitted run, a launcher."""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from launcher import call, make
from month import run_here
from stand_ins import Slurm, entry, write

from slurm.engine import children
from slurm.launch import main
from tests.growing import GrowingStream
from tests.slurm.cluster import Cluster, missing


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Two nodes of eight GPUs; preemption sends SIGTERM, the default of SLURM."""
    if name := missing():
        pytest.skip(f"{name} is not installed")
    with Cluster() as started:
        yield started


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    programs = Slurm(tmp_path / "bin")
    programs.folder.mkdir()
    programs.has(squeue="", scancel="")
    monkeypatch.setenv("PATH", str(programs.folder))  # no real SLURM
    return programs


@pytest.fixture
def run(tmp_path, monkeypatch) -> Path:
    """Two members, two stages: untrained, stages 0 (array 7) and 1 (array 8),
    evaluations 20 and 21."""
    monkeypatch.chdir(tmp_path)
    entries = [entry("untrained", "untrained.json", "5")]
    for stage in (0, 1):
        models = [f"stage_0{stage}/member_{member}/trained.json" for member in (0, 1)]
        for member, marker in enumerate(models):
            needs = [f"stage_00/member_{member}/trained.json"] if stage else []
            name = f"stage {stage}, member {member + 1} of 2"
            entries.append(entry(name, marker, f"{7 + stage}_{member}", *needs))
        result = f"stage_0{stage}/result.json"
        entries.append(entry(f"evaluation of stage {stage}", result, str(20 + stage), *models))
    write(Path("run"), *entries)
    return Path("run")


@pytest.fixture
def launcher(tmp_path):
    return make(tmp_path)


@pytest.fixture(scope="session")
def expected(tmp_path_factory) -> list[dict]:
    """Rows of an uninterrupted gmoe run, w = 1."""
    uninterrupted = make(tmp_path_factory.mktemp("uninterrupted") / "x", learner="gmoe")
    uninterrupted.run()
    return uninterrupted.rows


@pytest.fixture
def growing(monthly_stream, tmp_path, monkeypatch) -> GrowingStream:
    """A growing stream in the current folder, and the trainer in this process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("slurm.lm.launcher.signal.signal", lambda *_: None)
    monkeypatch.setattr(children, "run", run_here)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # most of the time
    return GrowingStream(monthly_stream, Path("stream"))


@pytest.fixture
def launch(growing, monkeypatch) -> Callable[..., int]:
    """`launch(*words)`: the exit code of `alma train` on the growing stream."""
    trainer = f"{sys.executable} trainer.py"

    def run(*words: object) -> int:
        stream = [] if "--stream" in words else ["stream"]
        return call(main, monkeypatch, *stream, *words, "--trainer", trainer)

    return run
