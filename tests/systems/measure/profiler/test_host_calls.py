"""Tests of the split of a step by calls of the host, with handwritten traces."""

from __future__ import annotations

from typing import Any

import pytest

from systems.measure.profiler.host_calls import host_times, purpose
from systems.measure.profiler.trace import by_category


def call(name: str, ts: float, dur: float, correlation: int | None = None) -> dict[str, Any]:
    args = {} if correlation is None else {"correlation": correlation}
    return {"ph": "X", "cat": "cuda_runtime", "name": name, "ts": ts, "dur": dur, "args": args}


def kernel(name: str, correlation: int) -> dict[str, Any]:
    args = {"correlation": correlation}
    return {"ph": "X", "cat": "kernel", "name": name, "ts": 0, "dur": 1, "args": args}


def test_each_microsecond_of_a_step_counts_once() -> None:
    events = [
        kernel("mul", 0), kernel("gemm", 1), kernel("gemm", 2), kernel("add", 3),
        kernel("gemm", 4), kernel("mul", 5),
        call("cudaLaunchKernel", 10, 5, 0),  # before the first step
        call("cudaMalloc", 100, 200),
        call("cudaLaunchKernel", 400, 100, 1),  # the first launch of gemm loads its code
        call("cudaLaunchKernel", 500, 10, 2),
        call("cudaFuncGetAttributes", 600, 40),
        call("cudaLaunchKernel", 620, 50, 3),  # another thread; 20 us at the same time
        call("cudaDeviceSynchronize", 700, 300),
        call("cudaEventRecord", 1000, 7),
        call("cudaLaunchKernel", 2100, 10, 4),
        call("cudaLaunchKernel", 2200, 10, 5),
        call("cudaDeviceSynchronize", 2900, 50),
    ]  # fmt: skip
    first, second = host_times(by_category(events), [(50, 2050), (2050, 3000)])
    assert first == {
        "step_ms": 2.0, "first_launches_ms": 0.17, "memory_ms": 0.2, "launches_ms": 0.01,
        "waiting_ms": 0.3, "no_call_ms": pytest.approx(2.0 - 0.687), "new_kernels": 2,
        "memory_requests": 1,
    }  # fmt: skip
    assert second["first_launches_ms"] == 0 and second["new_kernels"] == 0
    assert second["launches_ms"] == 0.02 and second["waiting_ms"] == 0.05


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("cudaMalloc", "memory"), ("cudaFree", "memory"), ("cudaHostAlloc", "memory"),
        ("cuMemCreate", "memory"), ("cuModuleLoadData", "loading"),
        ("cuLibraryLoadData", "loading"), ("cudaFuncSetAttribute", "loading"),
        ("cudaStreamSynchronize", "waiting"), ("cudaEventRecord", "other"),
    ],
)  # fmt: skip
def test_purposes_of_calls(name: str, expected: str) -> None:
    assert purpose(name) == expected
