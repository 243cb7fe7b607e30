"""Fixtures of the tests of systems."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.systems.parallel.ranks import Ranks


@pytest.fixture
def artifacts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which a benchmark that is run here leaves its files."""
    monkeypatch.setenv("RUN_ARTIFACTS", str(tmp_path / "artifacts"))
    return tmp_path / "artifacts"


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For tiny matrices: threads that wait for one another would take most of the time."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(
    scope="session",
    params=[
        pytest.param(("gloo", 2), id="2_ranks"),
        pytest.param(("gloo", 4), id="4_ranks"),
        pytest.param(("nccl", 2), id="2_gpus", marks=pytest.mark.gpu),
    ],
)
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """A process group; its processes serve all tests of the world size."""
    from tests.systems.parallel.ranks import (
        world,
    )  # imports torch, for which most tests have no use

    with world(*request.param) as ranks:
        yield ranks
