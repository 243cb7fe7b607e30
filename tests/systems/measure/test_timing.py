"""Tests of timing: what a sample includes, and how many samples are taken."""

from __future__ import annotations

import time

import pytest
import torch

from systems.measure.timing import (
    MAX_SAMPLES,
    MIN_SAMPLES,
    host_ms,
    time_ms,
)

CPU = torch.device("cpu")


class Clock:
    """Fake clock that advances only when a test calls `pass_ms`."""

    now = 0.0

    def pass_ms(self, milliseconds: float) -> None:
        self.now += milliseconds / 1e3


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(time, "perf_counter", lambda: made.now)
    return made


def test_samples_hold_the_call_and_not_what_comes_before_it(clock):
    samples = time_ms(lambda: clock.pass_ms(2), CPU, before=lambda: clock.pass_ms(20), measure_ms=1)
    assert samples == pytest.approx([2.0] * MIN_SAMPLES)


def test_before_precedes_every_call():
    order: list[str] = []
    time_ms(lambda: order.append("fn"), CPU, before=lambda: order.append("before"), measure_ms=0.1)
    assert order == ["before", "fn"] * (len(order) // 2)


def test_a_short_call_is_sampled_often_but_not_for_ever():
    assert len(time_ms(lambda: None, CPU, measure_ms=1000)) == MAX_SAMPLES


def test_warm_up_is_not_kept(clock):
    calls: list[int] = []

    def slow_at_first() -> None:
        calls.append(1)
        clock.pass_ms(20 if len(calls) <= 3 else 0.5)

    samples = time_ms(slow_at_first, CPU, warmup_ms=100, measure_ms=5)
    assert len(calls) > len(samples) + 3
    assert samples == pytest.approx([0.5] * MIN_SAMPLES)


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
