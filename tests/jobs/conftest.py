"""Fixtures for the tests of the jobs package."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.jobs.results_folder import ResultsFolder


@pytest.fixture
def folder(tmp_path: Path) -> ResultsFolder:
    """A results folder without submissions."""
    return ResultsFolder(tmp_path / "out")
