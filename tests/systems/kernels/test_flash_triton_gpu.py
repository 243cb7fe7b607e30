"""Tests of FlashAttention-2 in Triton on a GPU, against float64."""

from __future__ import annotations

import pytest
import torch

from systems.kernels.flash_attention import Call, FlashAttentionTriton, attention_reference
from systems.kernels.flash_attention.call import PLAIN
from systems.kernels.flash_attention.triton.tile_table import TABLE
from tests.systems.kernels.attention_error import assert_within_limits, attention_shares
from tests.systems.kernels.flash_cases import (
    BF16,
    F16,
    F32,
    LENGTHS,
    assert_right,
    by_triton,
    inputs,
)
from tests.systems.kernels.random_cases import laid_out

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("outputs_hold_nan")]
CAUSAL = Call(True)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("lengths", [*LENGTHS, (799, 3), (1023, 1024), (4224, 4224)])
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_gpu_against_float64(lengths, head_dim, dtype, is_causal):
    for n_splits in (None, 1, 3):
        assert_right(
            *inputs(lengths, head_dim, dtype, (2, 2), "cuda"), Call(is_causal), n_splits=n_splits
        )


# ptxas 12.8 compiles wrong code for some of these, see `tile_table.block_columns`.
UNEQUAL = [(59, 3), (59, 28), (120, 10), (168, 10), (168, 28), (250, 20), (100, 40)]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("head_dims", [*UNEQUAL, *(dims[::-1] for dims in UNEQUAL)])
def test_gpu_another_head_dim_of_v(head_dims, dtype, is_causal):
    head_dim, value_dim = head_dims
    assert_right(
        *inputs((300, 500), head_dim, dtype, (2, 3), "cuda", value_dim=value_dim), Call(is_causal)
    )


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("kind", "columns"), TABLE)
def test_gpu_fifty_repeats_of_every_configuration_are_bit_equal(kind, columns, is_causal):
    """A race in a compiled kernel may show in few runs; the first is compared with float64."""
    dtype = BF16 if kind == "16-bit" else F32
    call = Call(is_causal, precision="tf32" if kind == "tf32" else PLAIN.precision)
    given_inputs = inputs((1024, 1024), columns, dtype, (2, 4), "cuda")
    if kind != "tf32":
        assert_right(*given_inputs, call)
    for n_splits in (1, 4):
        first = by_triton(*given_inputs, call, n_splits=n_splits)
        for _ in range(50):
            again = by_triton(*given_inputs, call, n_splits=n_splits)
            assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_gpu_one_product_of_tf32():
    given_inputs = inputs((1024, 1024), 64, F32, (2,), "cuda")
    exact = attention_reference(*given_inputs, CAUSAL)
    out, _, *gradients = by_triton(*given_inputs, Call(True, precision="tf32"))
    known = (exact.out, *exact[2:])
    for found, right in zip((out, *gradients), known, strict=True):
        error = (found - right).norm() / right.norm()
        assert 1e-6 < error < 3e-3  # tf32 rounds to 2^-11


def test_gpu_heads_past_two_to_the_31_elements():
    heads = (1 << 31) // (128 * 64) + 2
    if torch.cuda.mem_get_info()[0] < 10 * heads * 128 * 64 * 2:
        pytest.skip("needs 43 GB of GPU memory")
    q, k, v, dout = torch.empty(4, heads, 128, 64, dtype=BF16, device="cuda").normal_()
    found = by_triton(q, k, v, dout, CAUSAL)
    last = slice(heads - 2, None)
    given_last = q[last], k[last], v[last], dout[last]
    assert_within_limits(attention_shares([x[last] for x in found], given_last, CAUSAL))


def test_gpu_rows_past_two_to_the_31_elements():
    stride = 1 << 19
    rows = (1 << 31) // stride + 100
    if torch.cuda.mem_get_info()[0] < 3 * rows * stride * 2:
        pytest.skip("needs 14 GB of GPU memory")
    base = torch.empty(rows, stride, dtype=BF16, device="cuda")
    q, k, v, dout = (base[:, 64 * i : 64 * i + 64].normal_() for i in range(4))
    assert_right(q, k, v, dout, CAUSAL)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_gpu_compiled_by_torch_gives_the_same(dtype, monkeypatch):
    monkeypatch.undo()  # the fixture that fills new tensors with NaN breaks torch.compile
    q, k, v, dout = inputs((512, 512), 64, dtype, (1, 4), "cuda")
    results = []
    compiled_function = torch.compile(FlashAttentionTriton.apply, fullgraph=True)
    for function in (FlashAttentionTriton.apply, compiled_function):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = function(*leaves, True)
        out.backward(dout)
        results.append([out.detach(), *(x.grad for x in leaves)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_gpu_in_a_cuda_graph():
    q, k, v, dout = inputs((300, 257), 64, BF16, (2,), "cuda")
    by_triton(q, k, v, dout, CAUSAL)  # compile before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = by_triton(q, k, v, dout, CAUSAL)
    fresh = inputs((300, 257), 64, BF16, (2,), "cuda", seed=1)
    for static, new in zip((q, k, v, dout), fresh, strict=True):
        static.copy_(new)
    graph.replay()
    for found, known in zip(captured, by_triton(*fresh, CAUSAL), strict=True):
        assert torch.equal(found, known)


def test_gpu_unaligned_addresses_after_aligned_ones():
    """Tensors of one shape share a plan, whose kernels Triton compiles for each alignment."""
    made = inputs((257, 257), 64, BF16, (2,), "cuda")
    assert_right(*made, CAUSAL)
    shifted = [laid_out(x, "shifted") for x in made]
    assert shifted[0].data_ptr() % 16
    assert_right(*shifted, CAUSAL)
    assert_right(*made, CAUSAL)
