"""Conditions of a measurement: state of the GPUs by phase."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path

import pytest

from jobs.provenance import GpuReading, visible_gpus
from jobs.results.record import Measurements
from jobs.worker import conditions as conditions_module
from jobs.worker.conditions import MIN_ENERGY_S, ConditionSampler, energy_facts, summary
from jobs.worker.fork_server import WORKER_SIGNALS
from tests.jobs.harness import PATIENCE_S, records, run


def reading(power_w: float, energy_j: float | None = None, *throttle: str) -> GpuReading:
    return GpuReading(1980, power_w, 50, energy_j, frozenset(throttle))


def test_summary_has_the_range_over_samples_and_gpus() -> None:
    samples = [
        (0.0, [reading(100, 10), reading(300, 20)]),
        (1.0, [reading(200, 160, "sw_power_cap"), reading(700, 470)]),
    ]
    found = summary(samples, [(0.0, 2.0)])
    assert found["power_w"] == [100, 250, 700]
    assert found["sm_clock_mhz"] == [1980, 1980, 1980]
    assert found["throttle"] == {"sw_power_cap": 0.5}
    assert found["energy_j"] == 2 * (150 + 450)  # 600 W for 2 s
    assert found["samples"] == 2
    assert "energy_j" not in summary(samples, [(0.0, 0.5), (0.7, 1.0)])  # needs one window
    near = [samples[0], (MIN_ENERGY_S / 2, samples[1][1])]
    assert "energy_j" not in summary(near, [(0.0, 1.0)])


def test_energy_of_a_call_is_told_where_calls_were_counted() -> None:
    measured = Measurements(
        samples_ms={"forward": [1.0], "forward_sustained": [1.0]},
        flops={"forward": 6e12, "forward_sustained": 6e12},
        facts={"sustained_calls": {"forward_sustained": 200}},
    )
    conditions = {
        "forward": {"energy_j": 70.0},  # of calls with holds between them
        "forward_sustained": {"energy_j": 2000.0},
    }
    assert energy_facts(measured, conditions) == {
        "joules_per_call": {"forward_sustained": 10.0},
        "tflop_per_joule": {"forward_sustained": 0.6},
    }
    assert energy_facts(measured, {}) == {}


def test_the_thread_that_samples_takes_no_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the worker's handlers run while the main thread blocks signals."""
    blocked: list[set[signal.Signals]] = []

    def read(gpus: list[str]) -> list[GpuReading]:
        if threading.current_thread() is not threading.main_thread():
            blocked.append(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
            sampled.set()
        return [reading(100)]

    sampled = threading.Event()
    monkeypatch.setattr(conditions_module, "read_gpus", read)
    with ConditionSampler(["0"]):
        assert sampled.wait(PATIENCE_S)
    assert blocked[0] >= set(WORKER_SIGNALS)
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & set(WORKER_SIGNALS)


@pytest.mark.gpu
def test_conditions_of_a_real_run(tmp_path: Path) -> None:
    (tmp_path / "sweep.yaml").write_text(
        "{name: real, benchmark: attention, fixed: {implementation: sdpa_flash, seq_len: 4096, "
        "head_dim: 64, num_heads: 16}, resources: {gpus_per_node: 1}}"
    )
    done = run("jobs.submit", tmp_path / "sweep.yaml", "--local", "--out", tmp_path / "out")
    assert done.returncode == 0, done.stdout
    (found,) = records(tmp_path / "out")
    assert found.conditions.keys() >= {"forward", "backward", "forward_backward"}
    for phase in found.conditions.values():
        low, middle, high = phase["sm_clock_mhz"]
        assert 0 < low <= middle <= high
        assert phase["samples"] >= 1 and "throttle" in phase


@pytest.mark.gpu
def test_energy_of_a_real_window() -> None:
    import torch

    x = torch.randn(4096, 4096, device="cuda")
    with ConditionSampler(visible_gpus()[:1]) as sampler:
        start = time.monotonic()
        while time.monotonic() < start + 1.5 * MIN_ENERGY_S:
            (x @ x).sum().item()
        end = time.monotonic()
    (phase,) = sampler.by_phase({"matmul": [(start, end)]}).values()
    assert phase["samples"] >= 5
    mean_w = phase["energy_j"] / (end - start)
    assert 0.3 * phase["power_w"][0] < mean_w < 3 * phase["power_w"][2]
