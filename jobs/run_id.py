"""The run id, which identifies a run in records, submissions and commands."""

from __future__ import annotations

import hashlib
import json
from typing import Any


def run_id(benchmark: str, version: int, params: dict[str, Any], defaults: dict[str, Any]) -> str:
    """Return the id of a run, 16 hexadecimal digits: a hash of benchmark, version and parameters.

    Parameters equal to their default are not hashed, so adding a parameter with a default to a
    benchmark does not change existing ids. The id does not depend on the order of the keys, the
    sweep file, the executor or the partition. Parameters and defaults are JSON values.
    """
    missing = object()
    # Compare by repr, because 1, 1.0 and True are equal in Python.
    unlike = {k: v for k, v in params.items() if repr(defaults.get(k, missing)) != repr(v)}
    text = json.dumps([benchmark, version, unlike], sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
