"""Fixtures for the benchmark tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.systems.parallel.ranks import Ranks


@pytest.fixture(scope="package")
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """Process group for this folder, because benchmarks change settings of their process."""
    from tests.systems.parallel.ranks import world  # imports torch, which some tests do not need

    with world(*request.param) as ranks:
        yield ranks
