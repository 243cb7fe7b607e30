"""Fixtures of the tests of jobs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.jobs.results_folder import ResultsFolder


@pytest.fixture
def folder(tmp_path: Path) -> ResultsFolder:
    """A results folder to which nothing was submitted yet."""
    return ResultsFolder(tmp_path / "out")
