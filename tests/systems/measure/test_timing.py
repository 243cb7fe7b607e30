"""Tests of timing: what a sample includes, and how many samples are taken."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial

import pytest
import torch

from systems.measure import windows
from systems.measure.sustained import sustained_ms
from systems.measure.timing import (
    HOLD,
    LEAST_HOLD,
    MAX_HOLD_MS,
    MAX_SAMPLES,
    MIN_HOLD_MS,
    MIN_SAMPLES,
    hold_ms,
    host_ms,
    time_ms,
)
from systems.measure.windows import during

CPU = torch.device("cpu")


@pytest.fixture
def pass_ms(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Return the function that advances the clock, which stands still otherwise."""
    passed: list[float] = []
    for name in ("perf_counter", "monotonic"):
        monkeypatch.setattr(time, name, lambda: sum(passed) / 1e3)
    return passed.append


def test_samples_hold_the_call_and_not_what_comes_before_it(pass_ms):
    order: list[str] = []

    def take(name: str, milliseconds: float) -> None:
        order.append(name)
        pass_ms(milliseconds)

    samples = time_ms(partial(take, "fn", 2), CPU, before=partial(take, "before", 20), measure_ms=1)
    assert samples == pytest.approx([2.0] * MIN_SAMPLES)
    assert order == ["before", "fn"] * (len(order) // 2)


def test_a_short_call_is_sampled_often_but_not_for_ever():
    assert len(time_ms(lambda: None, CPU, measure_ms=1000)) == MAX_SAMPLES


def test_warm_up_is_neither_kept_nor_in_the_window_of_the_phase(pass_ms):
    windows.forget()
    calls: list[int] = []

    def slow_at_first() -> None:
        calls.append(1)
        pass_ms(20 if len(calls) <= 3 else 0.5)

    samples = time_ms(slow_at_first, CPU, warmup_ms=100, measure_ms=5, phase="forward")
    assert len(calls) > len(samples) + 3
    assert samples == pytest.approx([0.5] * MIN_SAMPLES)
    ((start, end),) = windows.windows()["forward"]
    assert end - start == pytest.approx(sum(samples) / 1e3)


def test_hold_follows_the_launch_unless_a_block_gives_one_that_is_long_enough(monkeypatch):
    monkeypatch.delenv("RUN_ROUND", raising=False)
    assert hold_ms(0.01) == hold_ms(MIN_HOLD_MS / HOLD) == MIN_HOLD_MS
    assert hold_ms(2.0) == 2 * HOLD
    assert hold_ms(1e6) == MAX_HOLD_MS
    monkeypatch.setenv("RUN_ROUND", json.dumps({"check": False, "hold_ms": 7.5}))
    assert hold_ms(0.01) == hold_ms(5.0) == 7.5
    assert hold_ms(6.0) == 6 * LEAST_HOLD


def test_sustained_samples_are_means_of_calls_after_a_warm_up(pass_ms):
    """The fake clock advances only in the calls, so their number is known."""
    calls: list[int] = []

    def call() -> None:
        calls.append(1)
        pass_ms(10)

    samples, kept, bound = sustained_ms(call, CPU, 2.0, before=lambda: pass_ms(1), phase="x")
    assert not bound and samples == pytest.approx([10.0] * len(samples))
    assert len(samples) >= 2000 // 110 and kept == 10 * len(samples) < len(calls)


def test_an_exception_is_told_with_the_outermost_phase_of_the_last():
    windows.forget()
    with pytest.raises(MemoryError), during("forward"):
        raise MemoryError
    with pytest.raises(MemoryError), during("check"), during("backward"):
        raise MemoryError
    assert windows.failed_phase() == "check"


@pytest.mark.gpu
def test_gpu_time_is_without_the_launches_and_host_time_is_the_launches():
    device = torch.device("cuda")
    x = torch.zeros(1, device=device)

    def launch_many() -> None:
        time.sleep(0.002)  # a slow host
        for _ in range(20):
            x.add_(1)

    samples = time_ms(launch_many, device)
    assert host_ms(launch_many, device) > 2
    assert sorted(samples)[len(samples) // 2] < 0.5


@pytest.mark.gpu
def test_the_first_call_after_an_idle_gpu_is_not_kept():
    """The time of a short kernel does not depend on its place among the samples."""
    device = torch.device("cuda")
    x = torch.zeros(1 << 20, device=device)
    firsts, medians = [], []
    for _ in range(10):
        samples = time_ms(lambda: x.add_(1), device)
        firsts.append(samples[0])
        medians.append(sorted(samples)[len(samples) // 2])
    assert sorted(firsts)[5] < 1.1 * sorted(medians)[5]


@pytest.mark.gpu
def test_sustained_time_is_near_that_of_a_call():
    device = torch.device("cuda")
    x = torch.randn(2048, 2048, device=device)
    samples, calls, bound = sustained_ms(lambda: x @ x, device, 0.5)
    tiny = torch.zeros(1, device=device)
    assert not bound and sustained_ms(lambda: tiny.add_(1), device, 0.5).launch_bound
    once = sorted(time_ms(lambda: x @ x, device))
    assert calls >= len(samples) > 2
    assert 0.5 < sorted(samples)[len(samples) // 2] / once[len(once) // 2] < 2
