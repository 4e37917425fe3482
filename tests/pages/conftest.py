"""Fixture: a private SLURM with the partitions of the pages."""

from collections.abc import Iterator

import pytest

from tests.slurm.cluster import Cluster


@pytest.fixture(scope="session")
def cluster_of_pages() -> Iterator[Cluster]:
    """Two nodes of eight fake GPUs; partitions `learn` and `cpu`."""
    with Cluster() as started:
        nodes = ",".join(started.nodes)
        for name in ("learn", "cpu"):
            started.run("scontrol", "create", f"PartitionName={name}", f"Nodes={nodes}")
        yield started
