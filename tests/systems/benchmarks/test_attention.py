"""Tests of the attention benchmark: results and wrong outputs."""

from __future__ import annotations

import gc
import math
from typing import Any

import pytest
import torch

from systems.benchmark import ROUND, Unsupported, WrongOutput
from systems.benchmarks.attention import Params, run
from systems.check import attention_call
from systems.check.attention_accuracy import TOLERANCE
from systems.kernels.flash_attention import ATTENTIONS, Call, naive
from tests.systems.training.tiny_training import no_gpu

QUICK = {"seq_len": 32, "head_dim": 16, "dtype": "fp32", "warmup_ms": 1.0, "measure_ms": 1.0}


def measured(implementation: str = "naive", **given: Any) -> dict[str, Any]:
    return run(Params(implementation=implementation, **QUICK | given))


@no_gpu
@pytest.mark.parametrize("implementation", ["naive", "flash_pytorch", "sdpa_math", "sdpa_flash"])
@pytest.mark.parametrize(("causal", "dtype"), [(False, "bf16"), (True, "fp32")])
def test_benchmark_measures_every_phase(implementation, causal, dtype):
    facts = measured(implementation, seq_len=48, num_heads=2, causal=causal, dtype=dtype)
    assert set(facts["samples_ms"]) == {"forward", "backward", "forward_backward"}
    assert all(len(s) >= 10 and min(s) > 0 for s in facts["samples_ms"].values())
    assert all(0 < error <= TOLERANCE[dtype] for error in facts["facts"]["relative_error"].values())
    full = 4 * 2 * 48 * 48 * 16
    assert facts["flops"]["forward"] == (full // 2 if causal else full)
    assert facts["flops"]["forward_backward"] == 3.5 * facts["flops"]["forward"]


def test_one_token_has_no_gradient_of_its_scores_and_is_right():
    assert measured(seq_len=1)["facts"]["relative_error"]["dq"] < 1e-6


@pytest.mark.parametrize("factor, error", [(1.001, r"1\.0"), (math.nan, "nan")])
def test_a_wrong_output_has_no_time(monkeypatch, factor, error):
    def off(q, k, v, is_causal=False, scale=None):
        return naive(q, k, v, is_causal, scale) * factor  # far above the tolerance of float32

    monkeypatch.setattr(attention_call, "naive", off)
    message = f"naive: relative L2 error .*5e-05 in fp32, got out {error}"
    with pytest.raises(WrongOutput, match=message):
        measured()


@no_gpu
def test_sustained_phases_have_times_and_calls(monkeypatch):
    monkeypatch.setenv(ROUND, '{"sustained_s": 0.05}')
    found = measured()
    phases = {"forward_sustained", "backward_sustained", "forward_backward_sustained"}
    assert phases <= found["samples_ms"].keys() & found["flops"].keys()
    assert found["flops"]["backward_sustained"] == found["flops"]["backward"]
    # The energy of backward_sustained includes forward.
    assert set(found["facts"]["sustained_calls"]) == phases - {"backward_sustained"}
    assert "relative_error" in found["facts"]


FEATURES = {
    "grouped": {"num_kv_heads": 2, "value_dim": 8},
    "fewer queries": {"num_queries": 9, "alignment": "lower_right"},
    "window": {"window_left": 5, "window_right": 3, "causal": False},
    "softcap": {"softcap": 2.0},
    "packed": {"packed": True, "num_kv_heads": 1, "window_left": 10},
}


@no_gpu
@pytest.mark.parametrize("name", FEATURES)
def test_features_are_measured_and_checked(name):
    found = measured(seq_len=33, num_heads=4, batch_size=2, **FEATURES[name])
    assert found["facts"]["relative_error"]["dv"] < 1e-5
    assert found["flops"]["forward"] > 0 and found["bytes"]["backward"] > 0


# ---- on a GPU ------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("implementation", "dtype"),
    [
        ("naive", "bf16"), ("flash_pytorch", "fp32"), ("flash_triton", "fp16"),
        ("flash_triton", "fp32"), ("sdpa_flash", "bf16"), ("sdpa_cudnn", "bf16"),
        ("sdpa_efficient", "fp32"), ("sdpa_math", "fp32"),
    ],
)  # fmt: skip
def test_every_backend_on_a_gpu(implementation, dtype, causal):
    facts = run(
        Params(
            implementation=implementation, seq_len=1024, head_dim=64, num_heads=2, causal=causal,
            dtype=dtype,
        )
    )  # fmt: skip
    assert all(error <= TOLERANCE[dtype] for error in facts["facts"]["relative_error"].values())
    rows = 2 * 1024 * 64 * {"fp32": 4, "bf16": 2, "fp16": 2}[dtype]
    # at least q, k, v, dout and the output are alive
    assert all(peak >= 5 * rows for peak in facts["peak_memory_bytes"].values())


def _peak(phase: str, seq_len: int) -> int:
    """Return the peak memory of a phase of naive attention, without memory of other tests."""
    gc.collect()
    before = torch.cuda.memory_allocated()
    params = Params(implementation="naive", seq_len=seq_len, head_dim=64, dtype="fp32")
    return run(params)["peak_memory_bytes"][phase] - before


@pytest.mark.gpu
def test_materialised_scores_show_in_peak_memory():
    scores = 4096 * 4096 * 4
    assert 3 * scores <= _peak("forward_backward", 4096) <= 6 * scores
    # quadratic in seq_len, except for the flush buffer and the inputs
    assert _peak("forward_backward", 8192) / _peak("forward_backward", 4096) > 3


@pytest.mark.gpu
def test_the_peak_of_forward_holds_one_call_and_no_graph_of_another():
    scores = 8192 * 8192 * 4
    # Two score-sized tensors at a time (scores, scaled, masked or softmax), and two masks, each a
    # quarter of their size.
    assert _peak("forward", 8192) <= 2.75 * scores


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["sdpa_flash", "sdpa_cudnn"])
def test_float32_is_unsupported_by_16_bit_backends(implementation):
    with pytest.raises(Unsupported, match="float32"):
        run(Params(implementation=implementation, seq_len=128, head_dim=64, dtype="fp32"))


@pytest.mark.gpu
def test_gpu_time_is_what_the_work_takes():
    """The bandwidth of a copy of known size, timed with time_ms, must be plausible for a GPU."""
    from systems.measure.timing import time_ms

    device = torch.device("cuda")
    source = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    samples = time_ms(lambda: target.copy_(source), device)
    gb_per_s = 2 * source.numel() / 1e6 / sorted(samples)[len(samples) // 2]
    assert 300 < gb_per_s < 10_000


@pytest.mark.gpu
def test_sdpa_holds_to_its_backend():
    q = torch.randn(1, 1, 64, 64, device="cuda")
    with pytest.raises(RuntimeError):
        ATTENTIONS["sdpa_flash"].attend(q, q, q, Call())  # does not support float32
