"""The Slurm cluster that tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.jobs.launch.slurm_cluster import SlurmCluster, unsupported_reason


@pytest.fixture(scope="session")
def slurm_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """A real cluster of three emulated nodes; skips where none can be started.

    REQUIRE_SLURM=1 in the environment makes that a failure.
    """
    reason = unsupported_reason()
    if reason is not None:
        if os.environ.get("REQUIRE_SLURM") == "1":
            pytest.fail(f"REQUIRE_SLURM=1, but no cluster can be started: {reason}")
        pytest.skip(reason)
    with SlurmCluster(tmp_path_factory.mktemp("slurm"), max_array_size=10) as cluster:
        yield cluster
