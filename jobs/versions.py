"""The versions of torch and Triton with which this project is tested.

pyproject.toml has the oldest versions, and no newest ones: another version may be used. Records,
tables and `python -m jobs check` then name it as untested.
"""

from __future__ import annotations

from collections.abc import Mapping

# Releases of torch, and the release of Triton that each needs. scripts/test_versions.py tests them.
TESTED = {"2.11": "3.6", "2.12": "3.7", "2.13": "3.7", "2.14": "3.8"}


def untested(versions: Mapping[str, str | None]) -> list[str]:
    """Return the versions that are not tested, such as ["torch 2.15.0+cu130"].

    Args:
        versions: versions by the names of packages. None: not installed.
    """
    tested = {"torch": set(TESTED), "triton": set(TESTED.values())}
    installed = {name: version for name in tested if (version := versions.get(name))}
    return [
        f"{name} {version}"
        for name, version in installed.items()
        if ".".join(version.split(".")[:2]) not in tested[name]
    ]
