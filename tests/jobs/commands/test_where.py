"""The option --where of `status`, `retry` and `cancel`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.jobs.harness import call
from tests.jobs.results_folder import ResultsFolder, failed, load, ok

MIXED = """
name: mixed
benchmark: tests.benchmarks.toy
repeats: 2
runs_per_job: 100
cases:
- grid: {size: [1, 2], mode: [fast, exact]}
- benchmark: tests.benchmarks.counter
  fixed: {size: 2, depth: 3}
"""


@pytest.fixture
def mixed(tmp_path: Path, folder: ResultsFolder) -> Path:
    """A folder with 10 tasks: size 2 failed, and the second repeat of size 1 has no record."""
    folder.submit(
        load(tmp_path, MIXED),
        lambda params, repeat: (
            failed("error") if params["size"] == 2 else None if repeat else ok(1.0)
        ),
    )
    return folder.path


@pytest.mark.parametrize(
    ("where", "count", "code"),
    [
        ("size == 1", 4, 1),
        ("status == ok", 2, 0),
        ("status in [error, missing] and repeat == 0", 3, 1),
        ("size == 2 and mode == exact", 2, 1),
        ("depth > 2", 2, 1),
        ("benchmark == 'tests.benchmarks.counter'", 2, 1),
        ("size > 9", 0, 0),
    ],
)
def test_status_shows_and_counts_only_matching_runs(
    mixed: Path, where: str, count: int, code: int
) -> None:
    done = call("jobs", "status", mixed, "--where", where)
    assert done.returncode == code and f"sweep mixed, {count} of 10 runs" in done.stdout
    seen = json.loads(call("jobs", "status", mixed, "--where", where, "--json").stdout)
    assert len(seen["tasks"]) == sum(seen["counts"].values()) == count


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("sise == 1", "'sise' is not a parameter; did you mean 'size'?"),
        ("size > ", "is not a comparison; expected for example"),
        ("mode == fats", "did you mean 'fast'?"),
        ("status == eror", "status: got 'eror'; did you mean 'error'?"),
        ("benchmark == counter", "benchmark: got 'counter'"),
        ("status < 3", "which have no order"),
    ],
)
@pytest.mark.parametrize("command", ["status"])
def test_a_wrong_condition_is_one_line(mixed: Path, command: str, where: str, words: str) -> None:
    done = call("jobs", command, mixed, "--where", where)
    assert done.returncode == 2 and done.stdout.count("\n") == 1, done.stdout
    assert done.stdout.startswith("--where: ") and words in done.stdout


def test_a_benchmark_that_no_longer_imports_has_conditions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: ResultsFolder
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "vanishing").mkdir()
    toy = Path("tests/benchmarks/toy.py").read_text()
    (tmp_path / "vanishing" / "toy.py").write_text(toy)
    folder.submit(
        load(tmp_path, "{name: a, benchmark: vanishing.toy, grid: {size: [1, 2]}}"),
        lambda *_: ok(1.0),
    )
    (tmp_path / "vanishing" / "toy.py").write_text("1 / 0")
    monkeypatch.delitem(__import__("sys").modules, "vanishing.toy")
    done = call("jobs", "status", folder.path, "--where", "size == 2 and status == ok")
    assert done.returncode == 0 and "1 of 2 runs" in done.stdout
