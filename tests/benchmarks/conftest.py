"""Fixtures of the commands for a GPU."""

import contextlib
import os
from pathlib import Path

import pytest

from slurm.engine.forks import ForkServer

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def server():
    """Forks the processes of the steps: one import of fairseq for all."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))  # an installed package is called `benchmarks`, too
        patch.setenv("OMP_NUM_THREADS", "1")
        fork_server = ForkServer(
            ["fairseq_cli.train", "fairseq_alma.preloaded", "benchmarks.gpu.ladder"]
        )
    yield fork_server
    fork_server.stop()


@pytest.fixture
def forked(benchmark, server, monkeypatch):
    """A block in which processes of steps are forks; gives their module."""
    process = benchmark("gpu.process")

    def start(words, **options):
        reader, writer = os.pipe()
        with open(os.devnull) as nothing:
            files = [nothing.fileno(), writer, writer]
            fork = server.start(words[2:], files, options["env"])
        os.close(writer)
        fork.send_signal = lambda number: os.kill(fork.pid, number)
        fork.stdout = open(reader, "rb")  # noqa: SIM115 - closed with the test
        return fork

    @contextlib.contextmanager
    def block():
        with monkeypatch.context() as patch:
            patch.setattr(process, "Popen", start)
            yield process

    return block
