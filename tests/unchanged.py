"""Skips expensive tests whose code has not changed since they last passed.

A test marked `depends()` checks nothing but the modules that its file and its `conftest.py` import,
and what these import; `depends("docs/verdicts.md")` names other files that it reads. The test is
skipped as long as the text of all of them, without comments and docstrings, and the versions of
torch and Triton have the digest in `unchanged.json`. After a change, CI runs it.
`make test-exhaustive` runs all of these tests and writes the digests of the files whose tests
passed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from jobs.code.sources import SourceTree
from systems.attentions import ATTENTIONS

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests"
PASSED = Path(__file__).with_suffix(".json")
OPTION = "--depends"
FLASH = "systems.kernels.flash_attention"


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


def sources(file: Path) -> frozenset[Path]:
    """Return the files of this project that a test file uses, with itself.

    Of tests/conftest.py, only its own text counts: it imports what selects tests, no fixture.
    """
    folders = [folder for folder in file.parents if folder.is_relative_to(TESTS)]
    conftests = [folder / "conftest.py" for folder in folders if folder != TESTS]
    paths = (file, *filter(Path.exists, conftests))
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths]
    files = {TESTS / "conftest.py"}.union(*map(_files, names))
    if ROOT / f"{FLASH.replace('.', '/')}/implementations.py" in files:
        # It imports the modules of the implementations by their names.
        files = files.union(*(_files(f"{FLASH}.{names[0]}") for names in ATTENTIONS.values()))
    return frozenset(files)


def _files(module: str) -> frozenset[Path]:
    found = _tree().files(module)
    assert found is not None
    return found


@cache
def _digest(file: Path, read: tuple[str, ...]) -> str:
    parts = [_tree().hash_of(sources(file)), *map(_version, ("torch", "triton"))]
    parts += [hashlib.sha256((ROOT / name).read_bytes()).hexdigest() for name in read]
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:16]


def _version(package: str) -> str:
    try:
        return version(package).partition("+")[0]
    except PackageNotFoundError:  # Triton on other systems than Linux
        return "none"


def skip_unchanged(config: pytest.Config, items: Iterable[pytest.Item]) -> None:
    """Skip tests whose code is that with which they passed."""
    passed = _passed()
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


def _passed() -> dict[str, str]:
    return json.loads(PASSED.read_text()) if PASSED.exists() else {}


def _file(nodeid: str) -> str:
    return nodeid.partition("::")[0]


class Recorder:
    """Writes the digests of the files whose marked tests all passed, and removes the others."""

    def __init__(self) -> None:
        self.digests: dict[str, str] = {}
        self.failed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = _file(report.nodeid)
        if report.failed:  # the report of a test that ended its process has no properties
            self.failed.add(file)
        for name, digest in report.user_properties:
            if name == "depends":
                self.digests[file] = str(digest)
                if report.skipped:
                    self.failed.add(file)

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        complete = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
        asked = session.config.getoption
        some = asked("keyword") or asked("deselect") or "::" in " ".join(session.config.args)
        if not complete or session.shouldstop or some or "depends" not in asked("markexpr"):
            return
        known = _passed() | self.digests
        names = (name for name in sorted(known) if name not in self.failed)
        kept = {name: known[name] for name in names if (ROOT / name).exists()}
        PASSED.write_text(json.dumps(kept, indent=1) + "\n")
