"""Private SLURM clusters, one of each kind per test process."""

from collections.abc import Iterator

import pytest

from tests.slurm.cluster import Cluster, missing


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Two nodes of eight GPUs; preemption sends SIGTERM, SLURM's default."""
    yield from _started(preempt_signal=False)


@pytest.fixture(scope="session")
def cluster_with_signal() -> Iterator[Cluster]:
    """The same, but preemption sends the signal that a job has asked for by --signal."""
    yield from _started(preempt_signal=True)


def _started(preempt_signal: bool) -> Iterator[Cluster]:
    if name := missing():
        pytest.skip(f"{name} is not installed")
    with Cluster(preempt_signal=preempt_signal) as started:
        yield started
