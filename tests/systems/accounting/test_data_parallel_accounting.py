"""Collectives, DDP buckets, ZeRO and hardware: hand-computed cases and small simulations."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from systems import accounting
from systems.accounting.data_parallel import STRATEGIES

H100 = "NVIDIA H100 80GB HBM3"
some_bytes = st.integers(1, 10**13)
rates = st.floats(1e6, 1e13)


# ---- rings ---------------------------------------------------------------------------------------


def test_ring_seconds_by_hand():
    # 800 bytes on 4 ranks: chunks of 200, 3 steps of 2 s at 100 B/s; whole tensors take 3 x 8 s
    assert accounting.all_gather_seconds(800, 4, 100) == 6
    assert accounting.reduce_scatter_seconds(800, 4, 100) == 6
    assert accounting.all_reduce_seconds(800, 4, 100) == 12
    assert accounting.all_reduce_bus_bytes(800, 4) == 2 * 3 * 200
    assert accounting.whole_tensor_all_reduce_seconds(800, 4, 100) == 24
    # on 2 ranks one step of a whole tensor, or two of a half
    assert accounting.whole_tensor_all_reduce_seconds(800, 2, 100) == 8
    assert accounting.all_reduce_seconds(800, 2, 100) == 8


# ---- hardware ------------------------------------------------------------------------------------


def test_links_and_memory_by_the_datasheets():
    # NVLink 4: 18 links of 25 GB/s each way; NVLink 5: 18 of 50. v5p: two links of 90 an axis.
    assert accounting.link_bandwidth(H100) == 18 * 25e9
    assert accounting.link_bandwidth("NVIDIA H200") == 18 * 25e9
    assert accounting.link_bandwidth("NVIDIA B200") == 18 * 50e9
    assert accounting.link_bandwidth("TPU v5p") == 2 * 90e9
    # DGX B200, 8 GPUs: 72 PFLOP/s of FP8, which is twice its BF16, with sparsity
    assert accounting.peak_flops("NVIDIA B200", "bf16") == 72e15 / 2 / 2 / 8
    assert accounting.peak_flops("TPU v5p", "bf16") == 459e12
    assert accounting.peak_flops(H100, "bf16") == 989.4e12
    assert accounting.peak_flops("NVIDIA H100 PCIe", "tf32") == 378e12
    assert accounting.memory_bytes(H100) == 80e9
    assert accounting.memory_bytes("TPU v5p") == 95e9


def test_what_is_not_known_is_none():
    assert accounting.peak_flops("TPU v5p", "fp32") is None
    assert accounting.peak_flops("NVIDIA H200", "int8") is None
    assert accounting.link_bandwidth("NVIDIA H100 PCIe") is None  # only with a bridge
    for name in ("cpu: some processor", None):
        assert accounting.peak_flops(name, "bf16") is None
        assert accounting.link_bandwidth(name) is None
        assert accounting.memory_bytes(name) is None
        assert accounting.predicted_all_reduce_seconds(name, 1e9, 8) is None
        assert accounting.predicted_ddp_overhead_seconds(name, 1e9, 8, 1e-5, 10) is None


def test_predictions_over_a_devices_own_link():
    # 9 GB on 2 ranks at 450 GB/s: each sends 9 GB
    assert accounting.predicted_all_reduce_seconds(H100, 9e9, 2) == pytest.approx(0.02)
    # in 10 buckets: the last takes 2 ms, and ten calls 1 ms each
    overhead = accounting.predicted_ddp_overhead_seconds(H100, 9e9, 2, 1e-3, 10)
    assert overhead == pytest.approx(0.002 + 0.01)
    # if backward takes 5 ms per bucket, only the 3 ms of the last bucket are exposed
    hidden = accounting.predicted_ddp_overhead_seconds(H100, 9e9, 2, 1e-3, 10, 0.05)
    assert hidden == pytest.approx(0.003)
    alone = accounting.predicted_ddp_overhead_seconds(H100, 9e9, 1, 1e-3, 10)
    assert alone == pytest.approx(0.01)


# ---- DDP's buckets -------------------------------------------------------------------------------


def test_bucket_size_by_hand():
    # s = 8 GB, w = 200 GB/s, o = 100 us: sqrt(8e9 * 2e11 * 1e-4) = 4e8; s / 4e8 = 20 buckets
    model = (8e9, 200e9, 1e-4)
    assert accounting.best_bucket_bytes(*model) == pytest.approx(400e6)
    assert accounting.best_bucket_count(*model) == 20
    # 400 MB at 200 GB/s are 2 ms, 20 calls another 2 ms
    assert accounting.ddp_overhead_seconds(*model, 20) == pytest.approx(4e-3)
    # without overlap: 8 GB take 40 ms
    assert accounting.ddp_overhead_seconds(*model, 20, 0) == pytest.approx(40e-3 + 2e-3)


@given(
    some_bytes,
    rates,
    st.floats(0, 1),
    st.integers(1, 50),
    st.none() | st.floats(0, 10),
)
def test_overhead_is_what_a_run_of_the_buckets_leaves(size, bandwidth, call, buckets, backward):
    total = size / bandwidth if backward is None else backward
    sent_at = 0.0
    for bucket in range(1, buckets + 1):
        ready = total * bucket / buckets
        sent_at = max(sent_at, ready) + size / buckets / bandwidth + call
    overhead = accounting.ddp_overhead_seconds(size, bandwidth, call, buckets, backward)
    assert overhead == pytest.approx(sent_at - total, rel=1e-6, abs=1e-9 * (total + sent_at))


@given(some_bytes, rates, st.floats(1e-7, 1))
def test_no_other_count_of_buckets_is_better(size, bandwidth, call):
    best = accounting.best_bucket_count(size, bandwidth, call)

    def overhead(count: int) -> float:
        return accounting.ddp_overhead_seconds(size, bandwidth, call, count)

    others = {*range(1, 200), *range(max(1, best - 200), best + 200), 2 * best}
    assert overhead(best) <= min(map(overhead, others)) * (1 + 1e-12)
    bucket = accounting.best_bucket_bytes(size, bandwidth, call)
    assert bucket <= size
    assert abs(size / bucket - best) < 1 + 1e-6 * best


def test_buckets_that_cannot_be():
    with pytest.raises(ValueError, match="buckets must be at least 1, got 0"):
        accounting.ddp_overhead_seconds(1, 1, 1, 0)
    with pytest.raises(ValueError, match="call_seconds must be more than 0, got 0"):
        accounting.best_bucket_count(1, 1, 0)


# ---- ZeRO ----------------------------------------------------------------------------------------


def mixed_precision(parameters: int) -> dict[str, int]:
    """Return the state of the example in the ZeRO paper: fp16 weights and gradients, K = 12."""
    return {
        "weights": 2 * parameters,
        "gradients": 2 * parameters,
        "optimizer_state": 12 * parameters,
    }


def test_zeros_own_figures():
    # Rajbhandari et al. 2020, figure 1: 7.5 B parameters on 64 GPUs, in GB
    state = mixed_precision(7_500_000_000)
    published = {"ddp": 120, "zero1": 31.4, "zero2": 16.6, "zero3": 1.9}
    for strategy, gigabytes in published.items():
        kept = sum(accounting.rank_state_bytes(strategy, state, 64).values()) / 1e9
        assert kept == pytest.approx(gigabytes, abs=0.05), strategy


def test_our_optimizer_by_hand():
    # P = 100 in float32 on 4 ranks: 400 of weights, 400 of gradients, 800 of state shared by 4
    state = {"weights": 400, "gradients": 400, "optimizer_state": 800}
    ours = accounting.rank_state_bytes("sharded_optimizer", state, 4)
    assert ours == {"weights": 400, "gradients": 400, "optimizer_state": 200}
    assert ours == accounting.rank_state_bytes("zero1", state, 4)
    # each round of the ring sends 3/4 of 400
    sent = accounting.step_sent_bytes("sharded_optimizer", state, 4)
    assert sent == {
        ("reduce_scatter", "gradients"): 300,
        ("all_gather", "gradients"): 300,
        ("all_gather", "weights"): 300,
    }
    assert sum(accounting.step_sent_bytes("zero1", state, 4).values()) == 600
    assert sum(accounting.step_sent_bytes("ddp", state, 4).values()) == 600


@given(st.integers(1, 10**12), st.integers(1, 10_000))
def test_what_zero_keeps_and_sends_beside_ddp(parameters, n):
    state = mixed_precision(parameters)
    kept = {s: sum(accounting.rank_state_bytes(s, state, n).values()) for s in STRATEGIES}
    sent = {s: sum(accounting.step_sent_bytes(s, state, n).values()) for s in STRATEGIES}
    assert kept["zero3"] <= kept["zero2"] <= kept["zero1"] <= kept["ddp"]
    assert kept["zero3"] * n == pytest.approx(kept["ddp"])
    # section 7: stages 1 and 2 send as much as an all-reduce, stage 3 sends 1.5 times as much
    assert sent["zero1"] == sent["zero2"] == pytest.approx(sent["ddp"])
    assert sent["zero3"] == sent["sharded_optimizer"] == pytest.approx(1.5 * sent["ddp"])
    assert sent["ddp"] == pytest.approx(accounting.all_reduce_bus_bytes(2 * parameters, n))


def test_a_wrong_strategy_and_no_ranks_are_told_together():
    with pytest.raises(ValueError, match="world_size must be at least 1, got 0"):
        accounting.all_reduce_bus_bytes(1, 0)
    for function in (accounting.rank_state_bytes, accounting.step_sent_bytes):
        with pytest.raises(ValueError, match=r"one of ddp, .*, got 'zero4'; world_size .*, got 0"):
            function("zero4", mixed_precision(1), 0)
