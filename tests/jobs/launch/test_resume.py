"""Repeated submissions and `retry`: which runs they execute, and what they print."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs.provenance import cpu_device
from tests.jobs.harness import call, records, write_sweep
from tests.jobs.results_folder import H200, TOY, ResultsFolder, failed, ok


def test_what_failed_before_is_no_success_the_second_time(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path, [{"what": "ok"}, {"what": "raises", "tag": 1}])
    out = tmp_path / "out"
    done = call("jobs.submit", sweep, "--local", "--out", out)
    assert done.returncode == 1 and "1 ok" in done.stdout and "1 error" in done.stdout
    again = call("jobs.submit", sweep, "--local", "--out", out)
    assert again.returncode == 1 and len(records(out)) == 2
    assert "skipping 1 run that failed before (1 error); --retry-failed" in again.stdout
    plan = call("jobs.submit", sweep, "--local", "--out", out, "--dry-run")
    assert "0 (1 done, 1 failed before: 1 error; --retry-failed" in plan.stdout


@pytest.mark.slow
def test_retry_repeats_the_failed_runs_of_all_submissions(folder: ResultsFolder) -> None:
    """Runs that are ok are left out, even if their result comes from another device."""
    here = cpu_device()
    outcomes = ((1, failed("error"), here), (2, failed("oom"), here), (3, ok(1.0), H200))
    for size, outcome, device in outcomes:
        folder.submit(TOY + f"fixed: {{size: {size}}}\n", outcome, device)
    done = call("jobs", "retry", folder.path)
    assert done.returncode == 0, done.stdout
    for state in ("oom", "error"):
        assert f"retrying 1 run of {folder.path} (1 {state}), from submission" in done.stdout
    assert [record.params["size"] for record in records(folder.path)[3:]] == [2, 1]
    assert "nothing to retry in" in call("jobs", "retry", folder.path).stdout
