"""Fixtures for the tests of systems."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.systems.parallel.ranks import Ranks


@pytest.fixture
def artifacts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder in which a benchmark under test writes its artifacts."""
    monkeypatch.setenv("RUN_ARTIFACTS", str(tmp_path / "artifacts"))
    return tmp_path / "artifacts"


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Use one CPU thread: with tiny matrices, most time would go to thread synchronization."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def worlds() -> Iterator[Callable[[str, int], Ranks]]:
    """Return a function that returns the ranks of a backend and world_size, started once."""
    # Imported here because it imports torch, which most tests do not need.
    from tests.systems.parallel.ranks import world

    with contextlib.ExitStack() as stack:
        yield cache(lambda backend, size: stack.enter_context(world(backend, size)))


@pytest.fixture
def ranks(request: pytest.FixtureRequest, worlds: Callable[[str, int], Ranks]) -> Ranks:
    """Return the ranks of a process group, which run all tests of this world_size."""
    return worlds(*request.param)
