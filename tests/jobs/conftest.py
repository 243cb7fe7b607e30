"""Fixtures for the tests of the jobs package."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.jobs.checkout import Checkout, project_checkout
from tests.jobs.harness import umask
from tests.jobs.results_folder import ResultsFolder


@pytest.fixture
def folder(tmp_path: Path) -> ResultsFolder:
    """A results folder without submissions."""
    return ResultsFolder(tmp_path / "out")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    """A checkout of this project. Tests commit to it, but leave no changes."""
    return project_checkout(tmp_path_factory.mktemp("project") / "sweeps")


@pytest.fixture
def folder_of_all() -> Iterator[Path]:
    """A folder whose contents other users can read, unlike tmp_path, for `run_as_nobody`."""
    if os.getuid() != 0:
        pytest.skip("needs root, to become another user")
    with tempfile.TemporaryDirectory() as folder:
        if not all(parent.stat().st_mode & 0o001 for parent in Path(folder).resolve().parents):
            pytest.skip(f"needs a folder that another user can read, unlike {folder}")
        os.chmod(folder, 0o755)
        with umask(0o022):
            yield Path(folder)
