"""Sets the options of a round of a block, as the launcher does."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from typing import Any

from systems.benchmark import ROUND


@contextlib.contextmanager
def in_round(**options: Any) -> Iterator[None]:
    """Run the `with` block with these `RoundOptions`. Other tests of the process have none."""
    os.environ[ROUND] = json.dumps(options)
    try:
        yield
    finally:
        del os.environ[ROUND]
