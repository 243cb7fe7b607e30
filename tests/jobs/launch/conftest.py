"""Fixture for the Slurm cluster that the tests share."""

from __future__ import annotations

import os

import pytest

from tests.jobs.launch.slurm_cluster import SlurmCluster, unsupported_reason

STARTED = pytest.StashKey[SlurmCluster]()


@pytest.fixture(scope="session")
def slurm_cluster(
    pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory
) -> SlurmCluster:
    """A real Slurm cluster of three emulated nodes, the same for all test files of a process.

    If no cluster can be started on this machine, the test is skipped, or fails if REQUIRE_SLURM=1.
    """
    reason = unsupported_reason()
    if reason is not None:
        if os.environ.get("REQUIRE_SLURM") == "1":
            pytest.fail(f"REQUIRE_SLURM=1, but no cluster can be started: {reason}")
        pytest.skip(reason)
    if STARTED not in pytestconfig.stash:  # a file elsewhere that imports this fixture shares it
        cluster = SlurmCluster(tmp_path_factory.mktemp("slurm"), max_array_size=3)
        pytestconfig.add_cleanup(cluster.stop)
        cluster.start()
        pytestconfig.stash[STARTED] = cluster
    return pytestconfig.stash[STARTED]
