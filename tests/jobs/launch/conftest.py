"""Fixture for the tests that submit to Slurm."""

from __future__ import annotations

import pytest

from tests.jobs.launch.slurm_cluster import SlurmCluster
from tests.jobs.launch.slurm_scenario import Scenarios


@pytest.fixture(scope="module")
def scenarios(slurm_cluster: SlurmCluster, tmp_path_factory: pytest.TempPathFactory) -> Scenarios:
    return Scenarios(slurm_cluster, tmp_path_factory.mktemp("scenarios"))
