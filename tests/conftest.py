"""Fixtures that several test files share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.slurm_cluster import SlurmCluster, why_not

pytest.register_assert_rewrite("tests.adamw_cases")


@pytest.fixture(scope="session")
def slurm_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """A real cluster of three emulated nodes; skips where none can be started.

    REQUIRE_SLURM=1 in the environment makes that a failure.
    """
    reason = why_not()
    if reason is not None:
        if os.environ.get("REQUIRE_SLURM") == "1":
            pytest.fail(f"REQUIRE_SLURM=1, but no cluster can be started: {reason}")
        pytest.skip(reason)
    with SlurmCluster(tmp_path_factory.mktemp("slurm"), max_array_size=10) as cluster:
        yield cluster
