"""Tests of exposed communication: operations on spans, and timelines from trace events."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from systems.measure.profiler.communication_timeline import (
    StepTimeline,
    steps_data,
    steps_of,
)
from systems.measure.profiler.trace import merged, total, without
from systems.plot_data import read_figure, write_figure


def covered(spans):
    return {i for start, end in spans for i in range(start, end)}


span = st.tuples(st.integers(0, 60), st.integers(1, 30)).map(lambda x: (x[0], x[0] + x[1]))


@given(st.lists(span, max_size=20), st.lists(span, max_size=20))
def test_spans_against_sets_of_whole_numbers(a, b):
    assert covered(merged(a)) == covered(a)
    assert all(x[1] < y[0] for x, y in zip(merged(a), merged(a)[1:], strict=False))
    assert total(a) == len(covered(a))
    assert covered(without(a, b)) == covered(a) - covered(b)


def event(cat, name, ts, dur, **args):
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "args": args}


def on_gpu(name, launch, ts, dur, correlation):
    return [
        event("cuda_runtime", "cudaLaunchKernel", launch, 1, correlation=correlation),
        event("kernel", name, ts, dur, correlation=correlation),
    ]


def test_kernels_belong_to_the_phase_that_launched_them():
    [step] = steps_of(
        [
            event("user_annotation", "train_step", 1000, 100),
            event("user_annotation", "forward", 1000, 20),
            event("user_annotation", "backward", 1020, 30),
            event("user_annotation", "nccl:all_reduce", 1030, 60),  # on the host
            *on_gpu("gemm", 1005, 1010, 20, 1),  # still runs when the host is in backward
            *on_gpu("gemm", 1025, 1040, 20, 2),
            *on_gpu("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 1035, 1050, 30, 3),
            *on_gpu("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 900, 950, 30, 4),  # before the step
        ]
    )
    assert step.length == 100
    assert step.computation == {"forward": [(10, 30)], "backward": [(40, 60)]}
    assert {name: spans for name, spans in step.calls.items() if spans} == {
        "all_reduce": [(50, 80)]
    }
    assert step.communication == [(50, 80)]
    assert step.communication_ms == pytest.approx(0.030)
    assert step.exposed_ms == pytest.approx(0.020)


def test_peer_copies_communicate_without_multiprocessors():
    [step] = steps_of(
        [
            event("user_annotation", "train_step", 0, 100),
            event("user_annotation", "graph", 0, 5),
            event("cuda_runtime", "cudaGraphLaunch", 1, 1, correlation=1),
            event("kernel", "gemm", 10, 40, correlation=1),
            event("kernel", "c10d::symmetric_memory::wait_signal_kernel()", 20, 10, correlation=1),
            event("gpu_memcpy", "Memcpy PtoP (Device -> Device)", 30, 30, correlation=1),
            event("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL", 70, 5, correlation=1),
        ]
    )
    assert step.computation == {"graph": [(10, 50)]}
    assert step.calls == {"peer_copy": [(20, 30), (30, 60)], "all_reduce": [(70, 75)]}
    assert step.on_multiprocessors_ms == pytest.approx(0.005)
    assert step.exposed_ms == pytest.approx(0.015)


def test_on_a_processor_neither_copies_nor_what_a_hook_waits_for_are_computation():
    [step] = steps_of(
        [
            event("user_annotation", "train_step", 0, 100),
            event("user_annotation", "backward", 0, 90),
            event("cpu_op", "autograd::engine::evaluate_function: AccumulateGrad", 10, 55),
            event("cpu_op", "aten::mm", 10, 20),
            event("user_annotation", "gloo:all_reduce", 20, 40),
            event("user_annotation", "peer_copy:", 70, 20),
            event("cpu_op", "aten::copy_", 75, 10),
        ]
    )
    assert step.computation == {"backward": [(10, 30)]}
    assert step.calls["peer_copy"] == [(70, 90)]
    assert step.exposed_ms == pytest.approx(0.050)


def test_a_gather_that_ends_beside_computation_was_waited_for_by_nobody():
    computation = {"forward": [(0, 20), (40, 60)]}
    gathers = [(5, 15), (18, 38), (25, 39), (55, 60), (62, 65)]
    calls = {"all_gather": gathers, "reduce_scatter": [(70, 90)]}
    step = StepTimeline(100.0, calls, computation)
    assert step.waits_ms("all_gather") == pytest.approx([0, 0.018, 0.014, 0, 0.003])
    assert step.waits_ms("all_gather", "forward") == pytest.approx([0, 0.018, 0.014, 0])
    assert step.waits_ms("reduce_scatter") == pytest.approx([0.020])
    assert step.waits_ms("broadcast") == []


def test_a_trace_without_steps_is_refused():
    with pytest.raises(ValueError, match="no range named train_step"):
        steps_of([event("cpu_op", "aten::mm", 0, 1)])


def test_the_drawn_data_can_be_read_again(tmp_path):
    step = StepTimeline(
        100.0,
        {"all_reduce": [(50, 80)]},
        {"forward": [(10, 30), (45, 48)], "backward": [(60, 70)]},
    )
    path = tmp_path / "timeline.plot.json"
    write_figure(steps_data({"naive": [step, step]}, "a step"), path)
    rows = read_figure(path).rows
    assert len(rows) == 4  # computation and communication of two ranks
    # The gap of 15 us is shorter than GAP_MS.
    assert rows["naive, rank 1, computation"]["computation, forward"] == [(0.01, 0.048)]
    assert rows["naive, rank 0, communication"] == {
        "communication, overlapped": [(0.06, 0.07)],
        "communication, exposed": [(0.05, 0.06), (0.07, 0.08)],
    }
