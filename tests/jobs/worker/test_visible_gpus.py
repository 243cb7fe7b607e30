"""Runs that fail on a GPU: each has a record with the reason, and the next run starts clean."""

from __future__ import annotations

import pytest

from jobs.results.record import Record
from tests.jobs.harness import records, run, write_sweep

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def faults(tmp_path_factory) -> dict[str, Record]:
    """Records of one job with every GPU fault, each followed by a run that succeeds, by run."""
    folder = tmp_path_factory.mktemp("faults")
    whats = ["oom", "ok", "assert", "ok", "illegal_access", "ok", "hang", "ok"]
    cases = [{"what": what, "order": order} for order, what in enumerate(whats)]
    keys = {"benchmark": "tests.benchmarks.gpu_faults", "resources": {"gpus_per_node": 1}}
    path, out = write_sweep(folder, cases, timeout_s=30, **keys), folder / "out"
    done = run("jobs.submit", path, "--local", "--out", out)
    assert done.returncode == 1, done.stdout  # because some runs failed
    return {f"{record.params['what']}{record.params['order']}": record for record in records(out)}


def test_out_of_gpu_memory_says_how_much_was_asked_for(faults):
    record = faults["oom0"]
    assert record.status == "oom" and record.failure.memory == "gpu"
    assert record.failure.requested_bytes >= 2**50
    assert record.failure.allocated_bytes >= 2**30


@pytest.mark.parametrize(
    ("name", "status"), [("assert2", "error"), ("illegal_access4", "error"), ("hang6", "timeout")]
)
def test_a_sticky_error_or_a_hanging_kernel_says_where(faults, name, status):
    failure = faults[name].failure
    assert faults[name].status == status and "gpu_faults.py" in failure.traceback
    if status == "error":
        assert "CUDA" in failure.message or "CUDA" in failure.type


def test_the_next_run_starts_clean(faults):
    for name in ("ok1", "ok3", "ok5", "ok7"):
        assert faults[name].status == "ok"
        assert list(faults[name].measurements.samples_ms["forward"]) == [1023 * 512.0]


def test_a_record_says_where_it_was_measured(faults):
    record = faults["ok1"]
    assert record.device.startswith("NVIDIA") and record.gpus[0]["name"] == record.device
    assert record.gpus[0]["uuid"].startswith("GPU-")
    assert record.environment["driver"] and record.environment["loaded"]["cuda"]
