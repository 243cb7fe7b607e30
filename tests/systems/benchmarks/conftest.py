"""Fixtures of the tests of benchmarks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.systems.parallel.ranks import Ranks


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """A process group of a test file's own: benchmarks change settings of their processes."""
    from tests.systems.parallel.ranks import (
        world,
    )  # imports torch, for which some tests have no use

    with world(*request.param) as ranks:
        yield ranks
