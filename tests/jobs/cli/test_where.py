"""The option --where of `status` and `retry`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.jobs.harness import ROOT, call, records, write_sweep
from tests.jobs.results_folder import TOY, ResultsFolder, failed, load, ok

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


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with 10 tasks: size 2 failed, and the second repeat of size 1 has no record."""
    path = tmp_path_factory.mktemp("mixed")
    folder = ResultsFolder(path / "out")
    folder.submit(
        load(path, MIXED),
        lambda params, repeat: (
            failed("error") if params["size"] == 2 else None if repeat else ok(1.0)
        ),
    )
    return folder.path


@pytest.mark.parametrize(
    ("where", "count", "code"),
    [
        ("status == ok", 2, 0),
        ("run.status in [error, missing] and repeat == 0", 3, 1),
        ("depth > 2 or status == ok", 4, 1),  # toy has no depth
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


def test_a_benchmark_that_no_longer_imports_has_conditions(
    monkeypatch: pytest.MonkeyPatch, folder: ResultsFolder
) -> None:
    folder.submit(TOY + "grid: {size: [1, 2]}\n", ok(1.0))
    monkeypatch.setitem(sys.modules, "tests.benchmarks.toy", None)  # its import raises an error
    done = call("jobs", "status", folder.path, "--where", "size == 2 and status == ok")
    assert done.returncode == 0 and "1 of 2 runs" in done.stdout


def test_runs_of_code_that_no_longer_exists_can_be_selected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: ResultsFolder
) -> None:
    monkeypatch.chdir(tmp_path)
    mine = tmp_path / "mine.py"
    mine.write_text("def attend(q, k, v, *, causal): ...\n")
    text = "{name: a, benchmark: attention, fixed: {seq_len: 16, head_dim: 8}, grid: "
    implementations = "{implementation: ['mine.py:attend', sdpa]}}"
    folder.submit(text + implementations, ok(1.0))
    mine.unlink()
    monkeypatch.chdir(ROOT)
    done = call("jobs", "status", folder.path, "--where", "implementation == 'mine.py:attend'")
    assert done.returncode == 0 and "1 of 2 runs" in done.stdout, done.stdout
    done = call("jobs", "status", folder.path, "--where", "implementation == 'other.py:attend'")
    assert done.returncode == 2 and "there is no file 'other.py'" in done.stdout


@pytest.mark.slow
def test_retry_of_some_runs(tmp_path: Path) -> None:
    cases = [{"what": "ok"}, *({"what": "raises", "tag": tag} for tag in (1, 2)), {"what": "nan"}]
    sweep, out = write_sweep(tmp_path, cases), tmp_path / "out"
    assert call("jobs.submit", sweep, "--local", "--out", out).returncode == 1
    count = len(records(out))
    dry = call("jobs", "retry", out, "--where", "tag == 2", "--dry-run")
    assert dry.returncode == 0 and len(records(out)) == count
    assert "to run    1 (" in dry.stdout and dry.stdout.count("what=") == 1
    done = call("jobs", "retry", out, "--where", "tag > 1")
    assert done.returncode == 1 and f"retrying 1 run of {out} (1 error), from subm" in done.stdout
    assert [r.params["tag"] for r in records(out)[count:]] == [2]
    done = call("jobs", "retry", out, "--where", "status == ok")
    assert f"nothing to retry in {out}: no run failed, is missing or is oom and" in done.stdout
    call("jobs", "retry", out)  # a full retry still finds all failed runs
    assert sorted(r.params["tag"] for r in records(out)[count + 1 :]) == [0, 1, 2]


def test_status_lists_failures_first_and_few_runs_with_the_same_reason(
    folder: ResultsFolder,
) -> None:
    sweep = TOY + f"grid: {{size: {list(range(1, 41))}}}\n"
    outcomes = {1: ok(1.0), 40: failed("error")}
    folder.submit(sweep, lambda params, repeat: outcomes.get(params["size"]))
    lines = call("jobs", "status", folder.path).stdout.splitlines()
    listed = [line.split()[0] for line in lines if "size=" in line]
    assert listed == ["error", *["missing"] * 5]
    assert "… and 33 more; --all" in lines[-1]
    assert call("jobs", "status", folder.path, "--all").stdout.count("size=") == 40
    folder.submit(sweep, lambda params, repeat: failed("error", "E" * max(10, params["size"])))
    lines = call("jobs", "status", folder.path).stdout.splitlines()
    # Of the 9 runs with the same reason 5 are listed, of the others as many as fit.
    assert sum("size=" in line for line in lines) == 30 and "… and 9 more; --all" in lines[-1]
    assert sum(" EEEEEEEEEE: " in line for line in lines) == 5
    chosen = call("jobs", "status", folder.path, "--where", "size >= 39").stdout
    assert chosen.count("size=") == 2
