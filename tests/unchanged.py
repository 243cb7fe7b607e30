"""Skips expensive tests whose code has not changed since they last passed.

A test marked `depends()` checks nothing but the modules that its file imports, and what these
import; `depends("systems.benchmarks.memory")` names further ones. The test is skipped as long as
the text of these files, without comments and docstrings, has the digest in `unchanged.json`. After
a change, CI runs it. `make test-exhaustive` runs all of these tests and writes the digests of the
files whose tests passed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from functools import cache
from importlib.metadata import version
from pathlib import Path

import pytest

from jobs.code.sources import SourceTree

ROOT = Path(__file__).parents[1]
PASSED = Path(__file__).with_suffix(".json")
OPTION = "--depends"


def add_option(parser: pytest.Parser) -> None:
    parser.addoption(
        OPTION,
        choices=["changed", "all", "record"],
        default="changed",
        help="which tests marked `depends` to run; record: all, and note those that passed",
    )


@cache
def _tree() -> SourceTree:
    return SourceTree()


@cache
def _digest(file: Path, modules: tuple[str, ...]) -> str:
    """Return the digest of a test's file, of what it depends on, and of the compilers."""
    name = ".".join(file.relative_to(ROOT).with_suffix("").parts)
    files = {ROOT / "tests" / "conftest.py"}  # fixtures; what it imports has no influence
    for module in (name, *modules):
        found = _tree().files(module)
        if found is None:
            raise pytest.UsageError(f"{file.name}: mark depends: no module {module!r}")
        files |= found
    versions = [version(package).partition("+")[0] for package in ("torch", "triton")]
    text = " ".join([_tree().hash_of(frozenset(files)), *versions])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def skip_unchanged(config: pytest.Config, items: Iterable[pytest.Item]) -> None:
    """Skip tests whose code is that with which they passed."""
    passed = json.loads(PASSED.read_text()) if PASSED.exists() else {}
    for item in items:
        mark = item.get_closest_marker("depends")
        if mark is None or item.get_closest_marker("gpu"):  # no record says which GPU
            continue
        digest = _digest(item.path, mark.args)
        if config.getoption(OPTION) == "changed" and passed.get(_file(item.nodeid)) == digest:
            item.add_marker(
                pytest.mark.skip(reason="passed with the present code, see unchanged.py")
            )
        item.user_properties.append(("depends", digest))


def _file(nodeid: str) -> str:
    return nodeid.partition("::")[0]


class Recorder:
    """Writes the digests of the files whose marked tests all passed; not for use with -k."""

    def __init__(self) -> None:
        self.digests: dict[str, str] = {}
        self.failed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, digest in report.user_properties:
            if name == "depends":
                self.digests[_file(report.nodeid)] = str(digest)
                if report.outcome != "passed":
                    self.failed.add(_file(report.nodeid))

    def pytest_sessionfinish(self) -> None:
        known = json.loads(PASSED.read_text()) if PASSED.exists() else {}
        known |= {file: d for file, d in self.digests.items() if file not in self.failed}
        known = {file: known[file] for file in sorted(known) if (ROOT / file).exists()}
        PASSED.write_text(json.dumps(known, indent=1) + "\n")
