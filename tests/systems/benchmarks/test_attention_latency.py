"""Tests of the benchmark of latency, on this machine's device."""

from __future__ import annotations

import statistics
from itertools import pairwise

import pytest
import torch

from systems.benchmarks.attention_latency import Params, run
from systems.measure import windows
from systems.measure.latency import WARMUP_ROUNDS, latency_ms_in_turn

CPU = torch.device("cpu")


def test_functions_take_turns_and_the_order_is_reversed() -> None:
    """Each window has one timed call, so its conditions are not those of other functions."""
    windows.forget()
    calls: list[str] = []
    latencies = latency_ms_in_turn(
        {"first": lambda: calls.append("first"), "second": lambda: calls.append("second")},
        CPU,
        before=lambda: calls.append("before"),
        rounds=3,
    )
    turn = ["before", "first", "before", "second", "before", "second", "before", "first"]
    assert calls == (turn * (WARMUP_ROUNDS + 3))[: 4 * (WARMUP_ROUNDS + 3)]
    assert {name: len(times) for name, times in latencies.items()} == {"first": 3, "second": 3}
    assert all(ms > 0 for times in latencies.values() for ms in times)
    spans = sorted((span, name) for name, each in windows.windows().items() for span in each)
    assert [name for _, name in spans] == [x for x in calls if x != "before"][-6:]
    assert all(end <= start for ((_, end), _), ((start, _), _) in pairwise(spans))


@pytest.mark.parametrize("implementation", ["torch", "auto", "naive"])
def test_the_ratio_is_that_of_calls_in_the_same_round(implementation: str) -> None:
    sizes = {"seq_len": 16, "head_dim": 16, "dtype": "fp32", "rounds": 5}
    measured = run(Params(implementation=implementation, **sizes))
    own, of_torch = (measured["samples_ms"][name] for name in ("forward_backward", "torch"))
    ratios = [ours / theirs for ours, theirs in zip(own, of_torch, strict=True)]
    assert measured["facts"]["latency_over_torch"] == statistics.median(ratios)
    assert set(measured["facts"]["relative_error"]) == {"out", "dq", "dk", "dv"}
