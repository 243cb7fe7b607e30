"""Tests of tables of kernels by range, with handwritten traces."""

from __future__ import annotations

from typing import Any

import pytest

from systems.measure.profiler.kernel_table import PHASES, kernel_facts, profile_of

MAIN, AUTOGRAD, STREAM = 1, 2, 7


def event(cat: str, name: str, ts: float, dur: float, tid: int = MAIN, **args: Any) -> dict:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid, "args": args}


class Trace:
    """Events of steps on a GPU, as torch.profiler exports them."""

    def __init__(self) -> None:
        self.events: list[dict] = []

    def range(self, name: str, start: float, end: float) -> None:
        self.events.append(event("user_annotation", name, start, end - start))

    def operator(self, name: str, start: float, end: float, tid: int = MAIN, **args: Any) -> None:
        self.events.append(event("cpu_op", name, start, end - start, tid, **args))

    def launch(
        self, at: float, name: str, start: float, end: float, tid: int = MAIN, cat: str = "kernel"
    ) -> None:
        number = len(self.events)
        runtime = event("cuda_runtime", "cudaLaunchKernel", at, 1, tid, correlation=number)
        work = event(cat, name, start, end - start, STREAM, correlation=number)
        self.events += [work, runtime]  # kernels may precede their launch in the file


def step(trace: Trace, at: float) -> None:
    """Add a step with 300 us of forward, 500 us of backward and 100 us of optimizer.

    Kernels run after the inner range that launched them has ended, but inside of its phase.
    """
    number = int(at)  # sequence numbers increase from step to step
    trace.range("forward", at, at + 300)
    trace.range("attention_scores", at + 10, at + 30)
    trace.range("attention_softmax", at + 30, at + 50)
    trace.range("attention_output", at + 50, at + 70)
    # aten::matmul has the sequence number of the node that aten::bmm creates. aten::ones creates no
    # node and has the number of the softmax, but is in the range of the scores.
    trace.operator("aten::matmul", at + 11, at + 20, **{"Sequence number": number})
    trace.operator("aten::bmm", at + 12, at + 19, **{"Sequence number": number})
    trace.operator("aten::ones", at + 21, at + 22, **{"Sequence number": number + 1})
    trace.operator("aten::softmax", at + 31, at + 40, **{"Sequence number": number + 1})
    trace.operator("aten::bmm", at + 51, at + 60, **{"Sequence number": number + 2})
    trace.operator("aten::mm", at + 80, at + 90, **{"Sequence number": number + 3})
    trace.launch(at + 13, "sgemm_scores", at + 20, at + 60)  # 40
    trace.launch(at + 32, "softmax_warp_forward", at + 60, at + 80)  # 20
    trace.launch(at + 52, "sgemm_output", at + 80, at + 120)  # 40
    trace.launch(at + 82, "sgemm_mlp", at + 150, at + 250)  # 100
    trace.range("backward", at + 300, at + 800)
    node = "autograd::engine::evaluate_function: "
    for i, name in enumerate(("MmBackward0", "BmmBackward0", "SoftmaxBackward0", "BmmBackward0")):
        trace.operator(
            node + name, at + 310 + 10 * i, at + 319 + 10 * i, AUTOGRAD,
            **{"Sequence number": number + 3 - i, "Fwd thread id": 1},
        )  # fmt: skip
    trace.launch(at + 311, "sgemm_mlp", at + 320, at + 520, AUTOGRAD)  # 200
    trace.launch(at + 321, "sgemm_output", at + 520, at + 600, AUTOGRAD)  # 80
    trace.launch(at + 331, "softmax_warp_backward", at + 600, at + 630, AUTOGRAD)  # 30
    trace.launch(at + 341, "sgemm_scores", at + 630, at + 700, AUTOGRAD)  # 70
    trace.launch(at + 342, "Memset (Device)", at + 700, at + 720, AUTOGRAD, "gpu_memset")  # 20
    trace.range("optimizer", at + 800, at + 900)
    trace.range("Optimizer.step#AdamW.step", at + 801, at + 890)
    trace.launch(at + 810, "multi_tensor_apply_kernel", at + 820, at + 880)  # 60
    trace.launch(at + 950, "sgemm_between_steps", at + 955, at + 960)


@pytest.fixture
def facts() -> dict[str, Any]:
    trace = Trace()
    step(trace, 1000)
    step(trace, 2000)
    return kernel_facts(profile_of(trace.events))


def test_each_kernel_belongs_to_the_range_that_launched_it(facts):
    kernels = {
        name: {row["kernel"]: row["time_ms"] for row in rows}
        for name, rows in facts["kernels"].items()
    }
    assert kernels == {
        "forward": {
            "sgemm_mlp": 0.1, "sgemm_output": 0.04, "sgemm_scores": 0.04,
            "softmax_warp_forward": 0.02,
        },
        "backward": {
            "sgemm_mlp": 0.2, "sgemm_output": 0.08, "sgemm_scores": 0.07,
            "softmax_warp_backward": 0.03, "Memset": 0.02,
        },
        "optimizer": {"multi_tensor_apply_kernel": 0.06},
        "train_step": {
            "sgemm_mlp": 0.3, "sgemm_output": 0.12, "sgemm_scores": 0.11,
            "multi_tensor_apply_kernel": 0.06, "softmax_warp_backward": 0.03,
            "softmax_warp_forward": 0.02, "Memset": 0.02,
        },
        "attention_scores": {"sgemm_scores": 0.04},
        "attention_softmax": {"softmax_warp_forward": 0.02},
        "attention_output": {"sgemm_output": 0.04},
        "attention_scores_backward": {"sgemm_scores": 0.07, "Memset": 0.02},
        "attention_softmax_backward": {"softmax_warp_backward": 0.03},
        "attention_output_backward": {"sgemm_output": 0.08},
    }  # fmt: skip
    assert facts["counted"] == "GPU kernels" and facts["profiled_steps"] == 2


def test_shares_and_sums_by_hand(facts):
    assert facts["kernel_ms"]["forward"] == 0.2
    assert facts["kernel_ms"]["train_step"] == 0.66
    assert facts["matmul_share"]["forward"] == 0.9
    assert facts["matmul_share"]["optimizer"] == 0
    assert facts["matmul_share"]["train_step"] == pytest.approx(0.53 / 0.66, abs=1e-6)
    assert facts["top_kernel"]["train_step"] == "sgemm_mlp"
    assert facts["top_kernel_share"]["train_step"] == pytest.approx(0.3 / 0.66, abs=1e-6)
    assert facts["range_ms"] == {
        "forward": 0.3, "backward": 0.5, "optimizer": 0.1, "train_step": 0.9,
    }  # fmt: skip
    assert facts["busy_share"]["forward"] == pytest.approx(200 / 300, abs=1e-6)
    assert facts["busy_share"]["train_step"] == pytest.approx(660 / 900, abs=1e-6)
    row = facts["kernels"]["train_step"][0]
    assert row["class"] == "matmul" and row["calls"] == 2


def test_softmax_against_the_products_of_attention_alone(facts):
    assert facts["softmax_ms"] == {"forward": 0.02, "backward": 0.03}
    assert facts["attention_matmul_ms"] == {"forward": 0.08, "backward": 0.15}
    assert facts["softmax_over_matmul_time"] == {"forward": 0.25, "backward": 0.2}


def test_kernels_at_once_are_busy_once():
    trace = Trace()
    for name, start in (("forward", 0), ("backward", 100), ("optimizer", 200)):
        trace.range(name, start, start + 100)
        trace.launch(start + 1, "sgemm", start + 10, start + 60)
        trace.launch(start + 2, "sgemm", start + 20, start + 40)
    facts = kernel_facts(profile_of(trace.events))
    assert facts["kernel_ms"]["forward"] == 0.07
    assert facts["busy_share"] == dict.fromkeys((*PHASES, "train_step"), 0.5)


def test_a_kernel_whose_launch_was_lost_belongs_to_the_phase_in_which_it_ran():
    trace = Trace()
    step(trace, 1000)
    lost = event("kernel", "sgemm_lost", 1900 - 50, 10, STREAM, correlation=-1)
    facts = kernel_facts(profile_of([*trace.events, lost]))
    assert "sgemm_lost" in {row["kernel"] for row in facts["kernels"]["optimizer"]}


def test_an_operator_has_its_own_time_only():
    trace = Trace()
    for name, start in (("forward", 0), ("backward", 100), ("optimizer", 200)):
        trace.range(name, start, start + 100)
    trace.operator("aten::linear", 10, 60)
    trace.operator("aten::t", 11, 14)
    trace.operator("aten::mm", 20, 55)
    trace.operator("aten::resize_", 20, 22)  # starts at the same time as its caller
    trace.operator("aten::mul", 60, 70)  # starts when the previous one ends
    facts = kernel_facts(profile_of(trace.events))
    assert {row["kernel"]: row["time_ms"] for row in facts["kernels"]["forward"]} == {
        "aten::mm": 0.033, "aten::linear": 0.012, "aten::mul": 0.01, "aten::t": 0.003,
        "aten::resize_": 0.002,
    }  # fmt: skip
    assert facts["counted"].startswith("CPU operators")
    assert facts["busy_share"]["forward"] == 0.6
