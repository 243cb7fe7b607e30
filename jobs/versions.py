"""The versions of torch and Triton with which this project is tested.

pyproject.toml has the oldest versions, and no newest ones: another version may be used. Records,
tables and `python -m jobs check` then name it as untested.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

# Releases of torch, and the release of Triton that each needs. scripts/test_versions.py tests them.
TESTED = {"2.11": "3.6", "2.12": "3.7", "2.13": "3.7", "2.14": "3.8"}


def untested(versions: Mapping[str, str | None]) -> list[str]:
    """Return the versions that are not tested, such as ["torch 2.15.0+cu130"].

    A Triton is tested with its torch only. Versions before a release, such as 2.14.0a0, are not
    tested.

    Args:
        versions: versions by the names of packages. None: not installed.
    """
    torch, triton = versions.get("torch"), versions.get("triton")
    needed = TESTED.get(_release(torch)) if torch else None
    found = [f"torch {torch}"] if torch and needed is None else []
    if triton and _release(triton) not in TESTED.values():
        found.append(f"triton {triton}")
    elif triton and needed and _release(triton) != needed:
        found.append(f"triton {triton} with torch {torch}")
    return found


def _release(version: str) -> str:
    """Return the release of a version, such as "2.14". Empty: it is before a release."""
    known = re.match(r"(\d+\.\d+)(\.\d+)?(\.post\d+)?(\+|$)", version)
    return known[1] if known else ""
