"""The profile study: which range a kernel belongs to, on a trace written by hand, and what kernels
do by their names; on a processor, and on a GPU, real profiles of a small training."""

from __future__ import annotations

import gzip
import json
import os
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from systems.accounting import softmax_over_matmul_flops
from systems.benchmarks.base import Unsupported
from systems.benchmarks.kernel_table import (
    ATTENTION_RANGES,
    NAME_LENGTH,
    PHASES,
    kernel_class,
    kernel_facts,
    profile_of,
    short_name,
)
from systems.benchmarks.profile import PROFILED_STEPS, Params, predict, run
from systems.benchmarks.ranges import annotated_naive, has_attention_ranges
from systems.benchmarks.under_nsys import run_under_nsys
from systems.kernels.flash_attention import naive

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
TINY: dict[str, Any] = {
    "size": "tiny", "context_length": 24, "batch_size": 2, "vocab_size": 50,
    "warmup_steps": 1, "measure_steps": 2,
}  # fmt: skip


@pytest.fixture(autouse=True)
def artifacts(tmp_path, monkeypatch):
    monkeypatch.setenv("RUN_ARTIFACTS", str(tmp_path / "artifacts"))
    return tmp_path / "artifacts"


def params(**given: Any) -> Params:
    return Params.model_validate(TINY | given)


# ---- names ---------------------------------------------------------------------------------------

ELEMENTWISE = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::BinaryFunctor<float, float, "
    "float, at::native::binary_internal::MulFunctor<float> >, std::array<char*, 3ul> >(int, "
    "at::native::BinaryFunctor<float, float, float, at::native::binary_internal::MulFunctor<float>"
    " >, std::array<char*, 3ul>)"
)
COPY = (
    "void at::native::elementwise_kernel<128, 2, at::native::gpu_kernel_impl_nocast<at::native::"
    "direct_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda()#3}::operator()() const::{lambda()"
    "#7}::operator()() const::{lambda(float)#1}>(at::TensorIteratorBase&, at::native::"
    "direct_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda()#3}::operator()() const::{lambda()"
    "#7}::operator()() const::{lambda(float)#1} const&)::{lambda(int)#1}>(int, at::native::"
    "gpu_kernel_impl_nocast<at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda()"
    "#3}::operator()() const::{lambda()#7}::operator()() const::{lambda(float)#1}>(at::"
    "TensorIteratorBase&, at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda()#3"
    "}::operator()() const::{lambda()#7}::operator()() const::{lambda(float)#1} const&)::{lambda("
    "int)#1})"
)
REDUCE = (
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float, "
    "float, float, float>, unsigned int, float, 4, 4> >(at::native::ReduceOp<float, at::native::"
    "MeanOps<float, float, float, float>, unsigned int, float, 4, 4>)"
)
ADAM = (
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous "
    "namespace)::FusedOptimizerTensorListMetadata<4>, at::native::(anonymous namespace)::"
    "FusedAdamMathFunctor<float, 4, (at::native::ADAM_MODE)1, false>, float const*>(int)"
)
NAMES = {
    "void cutlass::Kernel2<cutlass_80_simt_sgemm_128x256_8x4_tn_align1>(T1::Params)": "matmul",
    "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize32x32x8_stage3_warpsize1x2x1_ffma": "matmul",
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1": "matmul",
    "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT": "matmul",
    "ampere_sgemm_128x64_tn": "matmul",
    "void gemmSN_TN_kernel<float, 128, 16, 2, 4, 4, 4, true>(int)": "matmul",
    "void gemv2T_kernel_val<int, int, float, float, float, float, 128, 16, 4, 4>(int)": "matmul",
    "void cublasLt::splitKreduce_kernel<32, 16, int, float, float, float>(int)": "matmul",
    "triton_tem_fused_mm_3": "matmul",
    "void (anonymous namespace)::softmax_warp_forward<float, float, float, 9, false, false>(int)":
        "softmax",
    "void at::native::(anonymous namespace)::cunn_SoftMaxForwardSmem<4, float, float>(int)":
        "softmax",
    "void at::native::(anonymous namespace)::cunn_SoftMaxBackward<4, float, float>(int)":
        "softmax",
    "triton_per_fused__softmax__to_copy_mul_2": "softmax",
    "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64>>(int)":
        "attention",
    "fmha_cutlassF_f32_aligned_64x64_rf_sm80(PyTorchMemEffAttention::Params)": "attention",
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3f_64x64x64": "attention",
    ELEMENTWISE: "elementwise",
    "void at::native::unrolled_elementwise_kernel<at::native::FillFunctor<float>>(int)":
        "elementwise",
    "void at::native::triu_tril_kernel<bool, int, true, 1, false>(int)": "elementwise",
    "triton_poi_fused__scaled_dot_product_cudnn_attention_transpose_3": "elementwise",
    REDUCE: "reduction",
    "triton_red_fused__to_copy_mean_mul_pow_rsqrt_1": "reduction",
    COPY: "copy",
    "void at::native::(anonymous namespace)::CatArrayBatchedCopy<float, unsigned int, 4>(float*)":
        "copy",
    "Memcpy DtoD (Device -> Device)": "copy",
    "Memset (Device)": "copy",
    ADAM: "optimizer",
    "adamw_kernel": "optimizer",
    "void at::native::(anonymous namespace)::indexSelectLargeIndex<float, long>(int)": "other",
    "aten::bmm": "matmul",
    "aten::_softmax_backward_data": "softmax",
    "aten::_fused_adamw_": "optimizer",
    "aten::copy_": "copy",
    "aten::mul": "elementwise",
    "aten::sum": "reduction",
    "aten::empty": "other",
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_what_a_kernel_does_is_told_by_its_name(name):
    assert kernel_class(name) == NAMES[name]


def test_a_name_is_shown_without_arguments_and_namespaces():
    assert short_name(next(iter(NAMES))) == (
        "cutlass::Kernel2<cutlass_80_simt_sgemm_128x256_8x4_tn_align1>"
    )
    assert short_name(ELEMENTWISE) == (
        "vectorized_elementwise_kernel<4, BinaryFunctor<float, float, float, "
        "MulFunctor<float>>, array<char*, 3ul>>"
    )
    assert short_name("Memcpy DtoD (Device -> Device)") == "Memcpy DtoD"
    assert short_name("ampere_sgemm_128x64_tn") == "ampere_sgemm_128x64_tn"


def test_a_long_name_keeps_both_ends():
    short = short_name(COPY)
    assert len(short) == NAME_LENGTH and "..." in short
    assert short.startswith("elementwise_kernel<128, 2, ") and short.endswith("::{lambda(int)#1}>")


# ---- a trace by hand -----------------------------------------------------------------------------

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
        self.events += [work, runtime]  # in the file kernels may come first


def step(trace: Trace, at: float) -> None:
    """1000 us: forward 300, backward 500, optimizer 100. Kernels run after they were launched, and
    after the range that launched them, but for the phases."""
    number = int(at)  # autograd counts on
    trace.range("forward", at, at + 300)
    trace.range("attention_scores", at + 10, at + 30)
    trace.range("attention_softmax", at + 30, at + 50)
    trace.range("attention_output", at + 50, at + 70)
    # aten::matmul shows the number of the node that aten::bmm makes; aten::ones makes none, and
    # shows the softmax's while still in the range of the scores.
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
    trace.operator("aten::resize_", 20, 22)  # as early as its caller
    trace.operator("aten::mul", 60, 70)  # begins as the one before ends
    facts = kernel_facts(profile_of(trace.events))
    assert {row["kernel"]: row["time_ms"] for row in facts["kernels"]["forward"]} == {
        "aten::mm": 0.033, "aten::linear": 0.012, "aten::mul": 0.01, "aten::t": 0.003,
        "aten::resize_": 0.002,
    }  # fmt: skip
    assert facts["counted"].startswith("CPU operators")
    assert facts["busy_share"]["forward"] == 0.6


def test_operations_of_softmax_by_hand():
    # 5 a score against two products of 2 * 64 operations a score, and 4 against four.
    assert softmax_over_matmul_flops("forward", 64) == 5 / 256
    assert softmax_over_matmul_flops("backward", 64) == 4 / 512
    assert predict(params())["softmax_over_matmul_flops"]["forward"] == 5 / 64  # heads of 16


# ---- real profiles -------------------------------------------------------------------------------


def test_annotated_attention_is_naive_attention():
    q, k, v = (torch.randn(2, 3, 17, 8, requires_grad=True) for _ in range(3))
    for causal in (False, True):
        ours, plain = (f(q, k, v, is_causal=causal) for f in (annotated_naive, naive))
        assert torch.equal(ours, plain)
        for mine, theirs in zip(
            torch.autograd.grad(ours.sum(), (q, k, v)),
            torch.autograd.grad(plain.sum(), (q, k, v)),
            strict=True,
        ):
            assert torch.equal(mine, theirs)


def check(measured: dict[str, Any], steps: int) -> None:
    """What holds for every profile."""
    facts = measured["facts"]
    samples = measured["samples_ms"]
    assert set(samples) == {*PHASES, "forward_backward", "train_step"}
    assert len(samples["forward"]) == len(samples["train_step"]) == steps
    assert facts["profiled_steps"] == PROFILED_STEPS
    for name, rows in facts["kernel_classes"].items():
        assert sum(row["time_share"] for row in rows) == pytest.approx(1, abs=1e-4)
        total = sum(row["time_ms"] for row in rows)
        assert total == pytest.approx(facts["kernel_ms"][name], rel=1e-3)
        # Every step is alike: what is called is called equally often.
        assert all(isinstance(row["calls"], int) for row in facts["kernels"][name])
    for phase in PHASES:
        assert facts["kernels"][phase] and 0 < facts["busy_share"][phase] <= 1
        assert facts["kernel_ms"][phase] <= 1.02 * facts["range_ms"][phase]
    assert facts["top_kernel"]["optimizer"] == facts["kernels"]["optimizer"][0]["kernel"]


@no_gpu
def test_ranges_of_a_training_on_a_processor():
    measured = run(params())
    check(measured, steps=2)
    calls = {
        name: {row["kernel"]: row["calls"] for row in rows}
        for name, rows in measured["facts"]["kernels"].items()
    }
    # Three blocks, each with one product in the scores and one in the output: two each backward.
    for part, products in (("attention_scores", 3), ("attention_output", 3)):
        assert calls[part]["aten::bmm"] == products
        assert calls[part + "_backward"]["aten::bmm"] == 2 * products
    assert calls["attention_softmax"]["aten::_softmax"] == 3
    assert calls["attention_softmax_backward"]["aten::_softmax_backward_data"] == 3
    # Four products of weights a block, and the output head.
    assert calls["forward"]["aten::mm"] == 3 * 4 + 1
    assert calls["backward"]["aten::mm"] == 2 * (3 * 4 + 1)
    assert calls["optimizer"]["aten::_fused_adamw_"] == 1
    assert "trace" not in measured["facts"]


@no_gpu
def test_the_trace_is_kept_where_it_is_asked_for(artifacts):
    measured = run(params(trace=True))
    with gzip.open(artifacts / measured["facts"]["trace"], "rt") as file:
        names = {e["name"] for e in json.load(file)["traceEvents"]}
    assert names >= {*PHASES, *ATTENTION_RANGES}


@pytest.mark.parametrize(
    "given",
    [
        {"attention": "sdpa"},
        {"mode": "compiled_blocks"},
        {"cuda_graph": True},
        {"checkpointing": "every_k"},
    ],
)
def test_attention_that_has_no_parts_has_no_ranges(given):
    assert has_attention_ranges(params()) and not has_attention_ranges(params(**given))


@no_gpu
def test_without_ranges_in_attention_the_phases_are_profiled():
    measured = run(params(attention="sdpa"))
    check(measured, steps=2)
    assert set(measured["facts"]["kernels"]) == {*PHASES, "train_step"}
    assert "softmax_ms" not in measured["facts"]


def test_nsys_keeps_no_trace_of_the_torch_profiler():
    with pytest.raises(ValidationError, match="trace: true keeps the trace of profiler: torch"):
        params(profiler="nsys", trace=True)


@no_gpu
def test_nsys_needs_a_gpu():
    with pytest.raises(Unsupported, match="this machine has none"):
        run(params(profiler="nsys"))


STAND_IN = """#!{python}
import json, os, subprocess, sys
at = sys.argv.index({python!r})
options, program = sys.argv[1:at], sys.argv[at:]
json.dump(options, open(os.environ["SEEN"], "w"))
if os.environ.get("FAIL"):
    sys.exit(7)
(report,) = [o.removeprefix("--output=") for o in options if o.startswith("--output=")]
code = subprocess.run(program).returncode
open(report + ".nsys-rep", "w").close()
sys.exit(code)
"""


@pytest.fixture
def nsys(tmp_path, monkeypatch) -> Path:
    """A stand-in for nsys on PATH, which cannot be installed where this is tested: it notes its
    options, runs the program, and leaves an empty report where nsys would leave its own."""
    script = tmp_path / "bin" / "nsys"
    script.parent.mkdir()
    script.write_text(STAND_IN.format(python=sys.executable))
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{script.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("SEEN", str(tmp_path / "seen.json"))
    return tmp_path / "seen.json"


def test_under_nsys_the_steps_run_and_the_report_stays(nsys, tmp_path, monkeypatch):
    """With a stand-in: the command, and what passes between the processes; not nsys itself."""
    monkeypatch.chdir(tmp_path)  # the package is found from anywhere
    facts = run_under_nsys(params(profiler="nsys"), tmp_path)
    assert (tmp_path / facts["report"]).exists()
    assert set(facts["range_ms"]) == {*PHASES, "train_step"} and facts["profiled_steps"] == 3
    assert json.loads(nsys.read_text()) == [
        "profile", "--trace=cuda,nvtx", "--sample=none", "--cpuctxsw=none",
        "--capture-range=cudaProfilerApi", "--capture-range-end=stop", "--force-overwrite=true",
        f"--output={tmp_path / 'report'}",
    ]  # fmt: skip


def test_a_failure_under_nsys_is_told(nsys, tmp_path, monkeypatch):
    """With a stand-in that ends with 7."""
    monkeypatch.setenv("FAIL", "1")
    with pytest.raises(RuntimeError, match=r"nsys ended with 7, and did not write .*report"):
        run_under_nsys(params(profiler="nsys"), tmp_path)


# ---- on a GPU ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def on_gpu() -> dict[str, Any]:
    return run(params(size="small", context_length=512, batch_size=4, vocab_size=10_000))


@pytest.mark.gpu
def test_kernels_of_every_phase_are_found(on_gpu):
    check(on_gpu, steps=2)
    facts = on_gpu["facts"]
    assert facts["counted"] == "GPU kernels"
    assert facts["kernels"]["optimizer"][0]["class"] == "optimizer"
    assert facts["matmul_share"]["optimizer"] < 0.01
    assert facts["matmul_share"]["forward"] > 0.3
    assert facts["matmul_share"]["train_step"] > 0.3
    classes = {row["class"]: row["time_share"] for row in facts["kernel_classes"]["train_step"]}
    assert classes.get("other", 0) < 0.1


def _calls(facts: dict[str, Any], name: str, kind: str) -> float:
    rows = facts["kernel_classes"][name]
    return next((row["calls"] for row in rows if row["class"] == kind), 0)


@pytest.mark.gpu
def test_kernels_inside_attention_are_found_forward_and_backward(on_gpu):
    facts = on_gpu["facts"]
    for part in ("attention_scores", "attention_output"):
        # One product a block, two of them backward; cuBLAS may cut one into several kernels.
        assert _calls(facts, part, "matmul") >= 12
        assert _calls(facts, part + "_backward", "matmul") >= 24
        assert facts["kernel_ms"][part] < facts["kernel_ms"]["forward"]
    # Backward first multiplies P and dP, in a kernel of its own.
    for part, classes in (("", {"softmax"}), ("_backward", {"softmax", "elementwise"})):
        assert _calls(facts, f"attention_softmax{part}", "softmax") == 12
        rows = facts["kernel_classes"][f"attention_softmax{part}"]
        assert {row["class"] for row in rows} == classes
    assert set(facts["softmax_ms"]) == set(facts["attention_matmul_ms"]) == {"forward", "backward"}
    # Its few operations move as many bytes as the products: in time it is no such trifle.
    for phase, ratio in facts["softmax_over_matmul_time"].items():
        assert ratio > softmax_over_matmul_flops(phase, 64)


@pytest.mark.gpu
def test_kernel_time_is_within_the_unprofiled_clock(on_gpu):
    """Kernels cannot take longer than the phase that they are; the clock was read without a
    profiler, so clocks of the GPU may differ between the two."""
    for phase, ratio in on_gpu["facts"]["kernels_over_clock"].items():
        assert 0 < ratio < 1.1, phase


@pytest.mark.gpu
@pytest.mark.parametrize(
    "given", [{"cuda_graph": True}, {"precision": "bf16", "attention": "sdpa"}]
)
def test_other_ways_to_train_are_profiled_by_phase(given):
    measured = run(params(size="small", context_length=256, batch_size=2, **given))
    check(measured, steps=2)
    assert set(measured["facts"]["kernels"]) == {*PHASES, "train_step"}
