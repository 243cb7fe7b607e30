"""The feed-forward layer on many devices, and XXL."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from systems.accounting import xxl_model
from systems.accounting.feed_forward import (
    BATCHES,
    PASSES,
    FeedForward,
    Machine,
    balanced_mesh_tokens,
    batch_limit,
    communication_seconds,
    compute_bound_tokens,
    compute_seconds,
    machine,
    mesh_limit,
    pipeline_bubble,
    tensor_limit,
)
from systems.measure.memory.saved_tensors import saved_tensors

# For hand-computed cases: 3 * 8 * 16 = 384 weights of 2 bytes, 1000 FLOP/s, 100 B/s on each axis.
LAYER = FeedForward(d_model=8, d_ff=16)
TOKENS = 64
OWN_LINKS = Machine(1000, 100, 100)
SHARED = Machine(1000, 100, 100, shared_links=True)

layers = st.builds(
    FeedForward, st.integers(1, 20_000), st.integers(1, 60_000), st.integers(2, 3), st.just(2)
)
machines = st.builds(
    Machine, st.floats(1e12, 1e16), st.floats(1e9, 1e13), st.floats(1e9, 1e13), st.booleans()
)
batches = st.integers(1, 10**8)
passes, ways = st.sampled_from(PASSES), st.sampled_from(BATCHES)


# ---- FLOPs and seconds ---------------------------------------------------------------------------


def test_seconds_by_hand():
    # N = 8: 2 * 384 * 64 / 8 = 6144 FLOPs, 6.144 s at 1000 FLOP/s; backward twice that
    assert compute_seconds("forward", LAYER, TOKENS, OWN_LINKS, 8) == pytest.approx(6.144)
    assert compute_seconds("backward", LAYER, TOKENS, OWN_LINKS, 8) == pytest.approx(12.288)

    def seconds(which, on, batch, n_d, n_t):
        return communication_seconds(which, LAYER, TOKENS, on, batch, n_d, n_t)

    # DP over 4: all-reduce of 768 bytes of gradients, 2 * 768 * 3/4 = 1152 bytes
    assert seconds("forward", OWN_LINKS, "dp", 4, 1) == 0
    assert seconds("backward", OWN_LINKS, "dp", 4, 1) == pytest.approx(11.52)
    # FSDP over 4: all-gather of 768, 576 bytes; backward that and a reduce-scatter
    assert seconds("forward", OWN_LINKS, "fsdp", 4, 1) == pytest.approx(5.76)
    assert seconds("backward", OWN_LINKS, "fsdp", 4, 1) == pytest.approx(11.52)
    # TP over 2: all-reduce of 64 * 8 * 2 = 1024 bytes, 2 * 1024 / 2, in each pass
    assert seconds("forward", OWN_LINKS, "fsdp", 1, 2) == pytest.approx(10.24)
    assert seconds("backward", OWN_LINKS, "fsdp", 1, 2) == pytest.approx(10.24)
    # FSDP 4 x TP 2: half the weights, 2.88 s; a quarter of the activations, 2.56 s
    assert seconds("forward", OWN_LINKS, "fsdp", 4, 2) == pytest.approx(2.88)
    assert seconds("forward", SHARED, "fsdp", 4, 2) == pytest.approx(2.88 + 2.56)
    assert seconds("backward", OWN_LINKS, "fsdp", 4, 2) == pytest.approx(5.76)
    assert seconds("backward", SHARED, "fsdp", 4, 2) == pytest.approx(5.76 + 2.56)


# ---- largest number of devices -------------------------------------------------------------------


def test_limits_by_hand():
    # a = B W / C = 64 * 100 / 1000 = 6.4; b = 3 F W / (2 C) = 3 * 16 * 100 / 2000 = 2.4
    assert batch_limit("forward", LAYER, TOKENS, OWN_LINKS, "fsdp").devices == pytest.approx(7.4)
    assert batch_limit("backward", LAYER, TOKENS, OWN_LINKS, "fsdp").devices == pytest.approx(7.4)
    assert batch_limit("backward", LAYER, TOKENS, OWN_LINKS, "dp").devices == pytest.approx(7.4)
    assert batch_limit("forward", LAYER, TOKENS, OWN_LINKS, "dp").devices == math.inf
    assert tensor_limit("forward", LAYER, OWN_LINKS).devices == pytest.approx(3.4)
    assert tensor_limit("backward", LAYER, OWN_LINKS).devices == pytest.approx(5.8)
    assert mesh_limit("forward", LAYER, TOKENS, OWN_LINKS).devices == pytest.approx(7.4 * 3.4)
    # s = 1 + 1/6.4 + 1/2.4 = 1.572917: n_d = 3.2 s, n_t = 1.2 s
    shared = mesh_limit("forward", LAYER, TOKENS, SHARED)
    assert shared.batch_devices == pytest.approx(5.03333, abs=1e-5)
    assert shared.tensor_devices == pytest.approx(1.8875)


@given(passes, layers, batches, machines, ways)
def test_at_the_limit_communication_takes_as_long_as_computation(which, layer, tokens, on, batch):
    assume(not (batch == "dp" and which == "forward"))
    for limit in (
        batch_limit(which, layer, tokens, on, batch),
        tensor_limit(which, layer, on),
        mesh_limit(which, layer, tokens, on, batch),
    ):
        for grown in (1, 2):  # communication takes longer if one axis has twice as many devices
            n_d, n_t = limit.batch_devices, limit.tensor_devices
            n_d, n_t = (n_d * grown, n_t) if n_d > 1 else (n_d, n_t * grown)
            compute = compute_seconds(which, layer, tokens, on, n_d * n_t)
            sent = communication_seconds(which, layer, tokens, on, batch, n_d, n_t)
            # (n-1)/n loses precision for n just above 1
            close = pytest.approx(compute, rel=1e-6)
            assert sent == close if grown == 1 else sent > compute


def test_an_axis_that_would_fall_below_one_device_is_not_used():
    # b = 2.4 as before, but B = 1: a = 0.1, and 0.1 s / 2 < 1
    assert mesh_limit("forward", LAYER, 1, SHARED) == tensor_limit("forward", LAYER, SHARED)
    narrow = FeedForward(8, 1)  # b = 0.15
    only_batch = batch_limit("forward", narrow, TOKENS, SHARED, "fsdp")
    assert mesh_limit("forward", narrow, TOKENS, SHARED) == only_batch


def test_a_machine_that_is_not_known_is_none():
    assert machine("cpu: some processor") is None
    assert machine("NVIDIA H100 PCIe") is None  # no link
    assert machine("TPU v5p", dtype="fp32") is None
    assert machine("TPU v5p", batch_axes=2) == Machine(459e12, 360e9, 180e9)


# ---- smallest batch ------------------------------------------------------------------------------


def test_balanced_mesh_by_hand():
    # a = 100 B / 1000, b = 3 * 16 * 100 / 2000 = 2.4: B / (a b) = 10 / 2.4
    assert balanced_mesh_tokens("forward", LAYER, OWN_LINKS) == pytest.approx(10 / 2.4)
    assert balanced_mesh_tokens("forward", LAYER, SHARED) == pytest.approx(40 / 2.4)
    assert balanced_mesh_tokens("backward", LAYER, SHARED) == pytest.approx(40 / 4.8)
    # XXL on v5p: alpha^2 / (M_X M_Y F) with alpha = 4.6e14 / 1.8e11
    v5p = Machine(4.6e14, 2 * 1.8e11, 1.8e11)
    alpha = 4.6e14 / 1.8e11
    tokens = balanced_mesh_tokens("forward", xxl_model.LAYER, v5p)
    assert tokens == pytest.approx(alpha**2 / (2 * 53248)) == pytest.approx(61.3, abs=0.05)


def test_pipeline_bubble_by_hand():
    # 4 stages, 5 microbatches: the last forward ends after 8 turns, and a stage works in 5 of them
    assert pipeline_bubble(4, 5) == 3 / 8
    assert pipeline_bubble(1, 5) == 0
    with pytest.raises(ValueError, match="at least 1, got 0 and 5"):
        pipeline_bubble(0, 5)


def test_the_books_example():
    # How to Scale Your Model, part 5: FSDP alone on v5p needs 2550 tokens per chip and axis
    v5p = machine("TPU v5p")
    layer = FeedForward(4096, 32768, matrices=2)
    for chips in (16, 64):
        tokens = compute_bound_tokens("forward", layer, v5p, chips, 1, long_rings=True)
        assert tokens / chips == pytest.approx(2550)
    # and tensor parallelism is communication-bound beyond F / 2550 = 12.85
    assert compute_bound_tokens("forward", layer, v5p, 2, 12, long_rings=True) is not None
    assert compute_bound_tokens("forward", layer, v5p, 2, 13, long_rings=True) is None


# ---- XXL -----------------------------------------------------------------------------------------


def test_xxl_state_by_hand():
    # 126 * 2 * 16384 * 53248 = 252 * 872,415,232
    assert xxl_model.PARAMETERS == 219_848_638_464
    assert xxl_model.state_bytes() == {
        "weights": 879_394_553_856,
        "gradients": 879_394_553_856,
        "optimizer_state": 1_758_789_107_712,
    }
    # 2 * 126 * (16384 + 53248) = 252 * 69,632
    assert xxl_model.saved_bytes(1) == 17_547_264
    # 3517.58 GB / 80 GB = 43.97; 1000 tokens add 17.5 GB: 3535.13 / 80 = 44.2
    assert xxl_model.devices_worth(0, 80e9) == 44
    assert xxl_model.devices_worth(1000, 80e9) == 45


def test_xxl_under_fsdp_by_hand():
    # 3517.58 / 95 = 37.03
    assert xxl_model.fsdp_devices(0, 95 * 10**9) == 38
    # A = 71.874 GB: (3517.578 + 35.937) / (95 - 35.937) = 60.17
    assert xxl_model.fsdp_devices(4096, 95 * 10**9) == 61
    by_hand = (3517.578e9 + 35.937e9) / 61 + 35.937e9
    assert xxl_model.fsdp_device_bytes(4096, 61) == pytest.approx(by_hand, rel=1e-5)
    # half of 10,828 tokens' 190.002 GB is more than 95 GB
    assert xxl_model.fsdp_devices(10_827, 95 * 10**9) is not None
    assert xxl_model.fsdp_devices(10_828, 95 * 10**9) is None


@given(st.integers(0, 10_000), st.integers(10**9, 10**12))
def test_xxl_fits_from_the_fewest_devices_on(tokens, memory):
    least = xxl_model.fsdp_devices(tokens, memory)
    if least is None:
        assert xxl_model.fsdp_device_bytes(tokens, 10**15) >= memory * (1 - 1e-9)
        return
    assert xxl_model.fsdp_device_bytes(tokens, least) < memory * (1 + 1e-12)
    if least > 1:
        assert xxl_model.fsdp_device_bytes(tokens, least - 1) >= memory * (1 - 1e-12)


def test_xxl_saves_what_autograd_saves(monkeypatch):
    monkeypatch.setattr(xxl_model, "LAYER", FeedForward(8, 24, matrices=2))
    monkeypatch.setattr(xxl_model, "BLOCKS", 3)
    blocks = [
        torch.nn.Linear(*shape, bias=False, dtype=torch.bfloat16)
        for _ in range(3)
        for shape in ((8, 24), (24, 8))
    ]
    x = torch.ones(5, 8, dtype=torch.bfloat16)
    saved = saved_tensors(
        lambda: torch.nn.Sequential(*blocks)(x), [block.weight for block in blocks]
    )
    assert sum(tensor.saved_bytes for tensor in saved) == xxl_model.saved_bytes(5)


def test_xxl_batch_by_hand():
    # alpha = 4.59e14 / 1.8e11 = 2550; separate links: B = alpha X / M_X = 2550 * 16 / 2 = 20,400
    v5p = machine("TPU v5p", batch_axes=2, tensor_axes=1)
    arguments = ("forward", xxl_model.LAYER)
    tokens = compute_bound_tokens(*arguments, v5p, 16, 4, long_rings=True)
    assert tokens == pytest.approx(20_400)
    # with (n-1)/n: 2550 * 15 / 2
    assert compute_bound_tokens(*arguments, v5p, 16, 4) == pytest.approx(19_125)
    # shared links: F X / M_X + B Y / M_Y = B F / alpha, 425,984 + 4 B = 20.88157 B
    in_turns = machine("TPU v5p", batch_axes=2, tensor_axes=1, shared_links=True)
    tokens = compute_bound_tokens(*arguments, in_turns, 16, 4, long_rings=True)
    assert tokens == pytest.approx(425_984 / (53248 / 2550 - 4))
    assert tokens / 64 == pytest.approx(394.3, abs=0.05)
    # with (n-1)/n: 15 / a + 3 / b = 1, b = 20.88157, in backward twice that
    for which, b in (("forward", 53248 / 2550), ("backward", 2 * 53248 / 2550)):
        tokens = compute_bound_tokens(which, xxl_model.LAYER, in_turns, 16, 4)
        assert tokens == pytest.approx(19_125 / (1 - 3 / b))
