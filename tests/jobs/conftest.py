"""Fixtures for the tests of the jobs package."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.jobs.harness import ROOT
from tests.jobs.results_folder import ResultsFolder


@pytest.fixture
def folder(tmp_path: Path) -> ResultsFolder:
    """A results folder without submissions."""
    return ResultsFolder(tmp_path / "out")


@pytest.fixture
def folder_of_all() -> Iterator[Path]:
    """A folder whose contents other users can read, unlike tmp_path, for `run_as_nobody`."""
    if os.getuid() != 0:
        pytest.skip("needs root, to become another user")
    for path in (ROOT, ROOT / "aggregate.py", Path(sys.prefix), Path(sys.base_prefix)):
        open_to_all = all(os.stat(folder).st_mode & 0o001 for folder in path.resolve().parents)
        if not (open_to_all and os.stat(path).st_mode & 0o004):
            pytest.skip(f"needs files that another user can read, unlike {path}")
    with tempfile.TemporaryDirectory() as folder:
        if not os.stat(Path(folder).parent).st_mode & 0o001:
            pytest.skip(f"needs a folder that another user can read, unlike {folder}")
        os.chmod(folder, 0o755)
        previous = os.umask(0o022)
        yield Path(folder)
        os.umask(previous)
