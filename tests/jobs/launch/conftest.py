"""Fixture for the Slurm cluster that the tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.jobs.launch.slurm_cluster import SlurmCluster, unsupported_reason


@pytest.fixture(scope="session")
def slurm_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """A real Slurm cluster of three emulated nodes.

    If no cluster can be started on this machine, the test is skipped, or fails if REQUIRE_SLURM=1.
    """
    reason = unsupported_reason()
    if reason is not None:
        if os.environ.get("REQUIRE_SLURM") == "1":
            pytest.fail(f"REQUIRE_SLURM=1, but no cluster can be started: {reason}")
        pytest.skip(reason)
    with SlurmCluster(tmp_path_factory.mktemp("slurm"), max_array_size=10) as cluster:
        yield cluster
