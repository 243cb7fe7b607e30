"""The id of a run: what a record is known by, whatever submits, executes or shows it."""

from __future__ import annotations

import hashlib
import json
from typing import Any


def run_id(benchmark: str, version: int, params: dict[str, Any], defaults: dict[str, Any]) -> str:
    """Sixteen hex digits that stand for a benchmark, its version, and what is unlike the defaults.

    So an id does not depend on the order of keys, the executor, the partition or the file, and a
    new parameter with a default leaves old ids as they are.
    """
    missing = object()
    # By repr, because to Python 1, 1.0 and True are equal.
    unlike = {k: v for k, v in params.items() if repr(defaults.get(k, missing)) != repr(v)}
    text = json.dumps([benchmark, version, unlike], sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
