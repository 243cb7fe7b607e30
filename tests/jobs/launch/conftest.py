"""Fixture for the tests that submit to Slurm."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.jobs.launch.slurm_cluster import SlurmCluster
from tests.jobs.launch.slurm_scenario import Scenarios


@pytest.fixture
def scenarios(slurm_cluster: SlurmCluster, tmp_path: Path) -> Scenarios:
    return Scenarios(slurm_cluster, tmp_path)
