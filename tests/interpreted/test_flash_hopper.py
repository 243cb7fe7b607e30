"""Tests of the Hopper kernels in an emulation of Hopper's parallelism, against float64."""

from __future__ import annotations

import itertools
import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from systems.kernels.flash_attention.api import flash_attention
from systems.kernels.flash_attention.autograd import FlashAttentionHopper
from systems.kernels.flash_attention.call import PLAIN, Call, PackedSizes, signature
from systems.kernels.flash_attention.hopper import backward_launch, forward_launch
from tests.interpreted.hopper_emulator.launch import Source, emulated_gpu
from tests.systems.kernels.flash_cases import (
    BF16,
    F16,
    assert_right,
    by_function,
    by_hopper,
    inputs,
    packed_inputs,
)
from tests.systems.kernels.selection import matrix, slow

pytestmark = pytest.mark.usefixtures("outputs_hold_nan", "blocks_of_96_keys")

CAUSAL = Call(True)
MASKS = {
    "full": PLAIN,
    "causal": CAUSAL,
    "window": Call(window_left=130, window_right=65, lower_right=True),
    "softcap": Call(True, softcap=2.0),
}
# (head_dim, value_dim): each kernel, with and without padded columns
HEAD_DIMS = [(64, 64), (96, 96), (128, 128), (136, 136), (192, 192), (192, 128), (256, 256)]
# (batch, heads of q), heads of k, (queries, keys)
SHAPES = [((2, 4), 2, (1, 70)), ((1, 2), 1, (200, 300)), ((1, 2), 1, (300, 150))]
# Each kernel with two masks and two shapes, and each mask with each shape
ALWAYS = list(zip(sorted(2 * HEAD_DIMS), itertools.cycle(MASKS), itertools.cycle(SHAPES)))
PACKED_LENGTHS = [(0, 3), (100, 100), (129, 64), (5, 0), (64, 140)]
WAIT = "dv, p16, dk, ds16 = warpgroup_mma_wait(1, deps=[dv, p16, dk, ds16])  # S^T stays in flight"
RELEASE = "mbarrier.arrive(shared.q_empty.index(q_slot), count=1)"
EMPTY = "mbarrier.wait(shared.ds_empty.index(ds_slot), (n // DS_SLOTS) & 1 ^ 1)"
STORE = "shared.ds.index(2 * ds_slot + HALF).store(ds)"
FENCE = "fence_async_shared()"
FULL = "mbarrier.arrive(shared.ds_full.index(2 * ds_slot + HALF), count=1)"
ADD = "_sum_of_items(problem, item, sums, values, True)"
COUNT = "writes = is_last_item(problem, item, item.first_key, problem.turns, WHICH)"
NUMBERS, ENDLESS = "above their limits", "waits for"
# Changes of the kernels that are errors: head_dim, module, text, its replacement, and what is found
ERRORS = {
    "a slot is overwritten early": (
        128, "forward.rings", "mbarrier.wait(empty.index(slot), (place // SLOTS & 1) ^ 1)",
        "pass", "more arrivals",
    ),
    "a slot is read early": (
        192, "forward.kernel", "mbarrier.wait(v_full.index(used_slot), used_phase)\n"
        "            o_token", "o_token", NUMBERS,
    ),
    "a slot is released early": (
        64, "backward.d64", f"{WAIT}\n    {RELEASE}", f"{RELEASE}\n    {WAIT}", NUMBERS,
    ),
    "a slot is passed before the store": (
        64, "backward.d64", f"{STORE}\n    {FENCE}\n    {FULL}",
        f"{FULL}\n    {STORE}\n    {FENCE}", NUMBERS,
    ),
    "a store before the slot is empty": (
        64, "backward.d64", f"{EMPTY}\n    {STORE}", f"{STORE}\n    {EMPTY}", NUMBERS,
    ),
    "a result is used early": (
        128, "backward.d128", "warpgroup_mma_wait(2 if IN_PARTS else 1, deps=[dp])",
        "warpgroup_mma_wait(3, deps=[dp])", "a WGMMA is used before",
    ),
    "a buffer is overwritten while TMA reads it": (
        64, "backward.d64", "tma.store_wait(pendings=DQ_SLOTS - 1)", "pass", NUMBERS,
    ),
    "no fence before WGMMA reads a store": (
        128, "backward.d128", f"{FENCE}\n    mbarrier.arrive", "mbarrier.arrive", NUMBERS,
    ),
    "dS is overwritten while it is read": (
        192, "backward.d192", "mbarrier.wait(shared.ds_empty.index(0), (i & 1) ^ 1, pred=i > 0)",
        "pass", f"{NUMBERS}|{ENDLESS}",
    ),
    "dO is released early": (
        192, "backward.d192",
        "sums, wide = _wait(sums, wide, BOXES)  # the narrow part of S stays in flight",
        "sums, wide = _wait(sums, wide, 10)", f"a WGMMA is used before|{NUMBERS}",
    ),
    "no fence after mbarriers are initialized": (
        256, "backward.d256", f"lse_desc, dq_desc)\n    {FENCE}", "lse_desc, dq_desc)",
        "without a fence",
    ),
    "a wait for the wrong phase": (
        64, "forward.work", "mbarrier.wait(full.index(slot), turn // 2 & 1)",
        "mbarrier.wait(full.index(slot), turn // 2 & 1 ^ 1)", ENDLESS,
    ),
    "too few arrivals": (256, "backward.d256", "barriers(1, 2),", "barriers(1, 3),", ENDLESS),
    "counters keep their values": (
        64, "forward.rings", "gl.store(counters, 0)", "pass", "counters",
    ),
    "a work item counts itself before it adds": (
        192, "backward.d192", f"{ADD}\n        {COUNT}", f"{COUNT}\n        {ADD}", NUMBERS,
    ),
    "a work item does not release its additions": (
        64, "backward.sums", 'sem="acq_rel"', 'sem="relaxed"', NUMBERS,
    ),
    "the first work item reads the sums": (
        128, "backward.sums", "count + 1 == problem.ITEMS_PER_KV * problem.n_splits", "count == 0",
        NUMBERS,
    ),
    "a work item has one count for both consumers": (
        192, "backward.sums", "counters + 2 * place + PART", "counters + 2 * place", NUMBERS,
    ),
}  # fmt: skip


def contiguous(heads: int, n: int, head_dim: int, dtype: torch.dtype = BF16) -> tuple[Any, ...]:
    """Return the shapes, strides, dtypes and devices of contiguous q, k and v."""
    return signature(*[torch.empty(1, heads, n, head_dim, dtype=dtype, device="meta")] * 3)


@pytest.mark.parametrize(("dims", "mask", "shape"), matrix(ALWAYS, HEAD_DIMS, MASKS, SHAPES))
def test_against_float64(dims, mask, shape):
    """Two heads of q share a head of k. The programs of two multiprocessors share the work."""
    leading, kv_heads, lengths = shape
    given = inputs(lengths, dims[0], BF16, leading, kv_heads=kv_heads, value_dim=dims[1])
    dlse = torch.randn(given[0].shape[:-1], generator=torch.Generator().manual_seed(1))
    with emulated_gpu(multiprocessors=2, seed=SHAPES.index(shape)):
        assert_right(*given, MASKS[mask], by=by_hopper, dlse=dlse)


@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_a_query_that_sees_no_key_has_no_gradient(head_dim):
    """Its log-sum-exp is -inf, and the gradient of that may be infinite."""
    given = inputs((130, 60), head_dim, BF16, (1, 1))
    dlse = torch.zeros(1, 1, 130)
    dlse[..., :70] = -math.inf
    with emulated_gpu(multiprocessors=2, seed=0):
        _, lse, *gradients = by_hopper(*given, Call(True, lower_right=True), dlse=dlse)
    assert (lse[..., :70] == -math.inf).all() and not gradients[0][..., :70, :].any()
    assert all(x.isfinite().all() for x in gradients)


@pytest.mark.parametrize(("head_dim", "value_dim"), [slow(*dims) for dims in HEAD_DIMS])
def test_many_orders_of_execution(head_dim, value_dim):
    """Results are right in 20 random orders. Each launch of a case has its own order."""
    given = inputs((300, 300), head_dim, BF16, (1, 1), value_dim=value_dim)
    for seed in range(20):
        with emulated_gpu(multiprocessors=2, seed=seed):
            assert_right(*given, CAUSAL, by=by_hopper)


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("head_dim", [192, *map(slow, (64, 128, 256))])
def test_small_probabilities(head_dim, dtype):
    """All queries see mainly key 0. The probabilities of other keys are below the smallest normal
    number of float16, but their gradients are not.
    """
    q, k, v, dout = inputs((130, 130), head_dim, dtype, (1, 1))
    q[..., 0], k[..., 0] = 8, 0
    k[:, :, 0] = 0
    k[:, :, 0, 0] = 14 * math.sqrt(head_dim) / 8  # scores of key 0 are 14, those of others about 0
    with emulated_gpu(multiprocessors=2, seed=0):
        assert_right(q, k, v, 256 * dout, by=by_hopper)


@pytest.mark.parametrize(
    ("heads", "n", "dtype", "kernel"),
    [
        # Blocks per multiprocessor of 132, with 64 and with 96 keys: 3 and 2, 1 and 1
        (24, 1024, BF16, "d192_backward_kernel"),
        (8, 1024, BF16, "d256_backward_kernel"),
        (24, 1024, F16, "d256_backward_kernel"),
    ],
)
def test_kernel_for_head_dim_192(monkeypatch, heads, n, dtype, kernel):
    monkeypatch.undo()  # the fixture `blocks_of_96_keys`
    tensors = contiguous(heads, n, 192, dtype)
    stride = tensors[1][0]
    with emulated_gpu(multiprocessors=132, seed=0):
        plan = backward_launch.HopperBackwardPlan(*tensors, stride, stride, CAUSAL)
    assert plan.differentiate.kernel.fn.__name__ == kernel


@pytest.mark.parametrize(
    ("heads", "n", "longest", "n_programs"),
    [
        (512, 1024, None, 264), (512, 2048, None, 132), (16, 1024, None, 128),
        (16, 8192, 4096, 264), (16, 8192, 8192, 132),
    ],
)  # fmt: skip
def test_two_programs_of_forward_per_multiprocessor(heads, n, longest, n_programs):
    """Short causal sequences at head_dim 64. With few blocks, it is one program."""
    packed = None if longest is None else PackedSizes(16, longest, longest)
    with emulated_gpu(multiprocessors=132, seed=0):
        plan = forward_launch.HopperForwardPlan(
            *contiguous(heads, n, 64), Call(True, packing=packed)
        )
    assert plan.n_splits == 1
    assert plan.attend.grid == (n_programs, 1, 1)
    assert plan.attend.options.get("maxnreg") == (80 if n_programs > 132 else None)


@pytest.mark.parametrize("head_dim", [64, *map(slow, (128, 192, 256))])
def test_splits(head_dim):
    given = inputs((300, 300), head_dim, F16, (1, 1))
    with emulated_gpu(multiprocessors=3, seed=0):
        assert_right(*given, CAUSAL, by=by_hopper, n_splits=3)


# Each kernel with another division, and those with padded columns only in make test-all
SHARED_KEYS = [((64, 64), 1, 2), ((128, 128), 2, 1), ((192, 192), 1, 1), ((256, 256), 2, 2)]


@pytest.mark.parametrize(
    ("dims", "q_per_item", "n_splits"), matrix(SHARED_KEYS, HEAD_DIMS, (1, 2), (1, 2))
)
def test_work_items_that_share_keys(monkeypatch, dims, q_per_item, n_splits):
    """Four heads of q have one head of k. Work items have one or two of them."""
    given = inputs((200, 150), dims[0], BF16, (1, 4), kv_heads=1, value_dim=dims[1])
    share_keys(monkeypatch, q_per_item=q_per_item, n_splits=n_splits)
    with emulated_gpu(multiprocessors=3, seed=q_per_item):
        assert_right(*given, CAUSAL, by=by_hopper)


def test_three_heads_of_q_have_one_head_of_k():
    """Work items of two heads, as of short causal inputs, would have those of two heads of k."""
    with emulated_gpu(multiprocessors=2, seed=0):
        assert_right(*inputs((130, 130), 64, BF16, (1, 6), kv_heads=2), CAUSAL, by=by_hopper)


def share_keys(monkeypatch: pytest.MonkeyPatch, **options: int | None) -> None:
    """Let backward divide the heads of q and the queries in this way."""
    backward = partial(backward_launch.flash_backward, **options)
    monkeypatch.setattr(backward_launch, "flash_backward", backward)


# With the default work items, and with one for each head of q
PACKED = [((64, 64), None), ((128, 128), None), ((256, 256), None), ((64, 64), 1)]
PACKED_DIMS = [(64, 64), (128, 128), (192, 192), (192, 128), (256, 256)]


@pytest.mark.parametrize(("dims", "q_per_item"), matrix(PACKED, PACKED_DIMS, (None, 1)))
def test_packed_sequences(monkeypatch, dims, q_per_item):
    given, packing = packed_inputs(PACKED_LENGTHS, (4, 2), dims[0], BF16, dims[1])
    share_keys(monkeypatch, q_per_item=q_per_item)
    with emulated_gpu(multiprocessors=2, seed=0):
        assert_right(*given, Call(True, packing=packing), by=by_hopper)


@pytest.mark.parametrize("from_end", [False, True])
@pytest.mark.parametrize("lengths", [[70 * n % 400 for n in range(150)], [9000]])
def test_blocks_of_packed_sequences(lengths, from_end):
    """More sequences, and more blocks of one, than the kernel compares at a time."""
    counts = [-(-n // 64) for n in lengths]
    most = sum(lengths) // 64 + len(lengths)
    starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    blocks = listed_blocks(starts, most, max(counts), from_end)
    ranked = sorted((-j, s) for s, count in enumerate(counts) for j in range(count))
    expected = [[s, counts[s] - 1 + j if from_end else -j] for j, s in ranked]
    assert blocks[0] == len(expected) <= most
    assert blocks[2 : 2 + 2 * len(expected)].view(-1, 2).tolist() == expected


def test_overlapping_sequences_do_not_overflow_the_list():
    starts = torch.tensor([0, 640, 0, 640, 0, 640], dtype=torch.int32)
    blocks = listed_blocks(starts, 15, 10, from_end=False)
    assert blocks[0] == 15 and (blocks[32:] == -1).all()


def listed_blocks(starts: Tensor, most: int, longest: int, from_end: bool) -> Tensor:
    """Return the list of blocks of 64 rows. No sequence has more than `longest`. The rest is -1."""
    from systems.kernels.flash_attention.hopper.packed_blocks import CHUNK, packed_blocks_kernel

    n, options = len(starts) - 1, {"BLOCK": 64, "FROM_END": from_end, "CHUNK": CHUNK}
    blocks = torch.full((2 * (n * longest + 1),), -1, dtype=torch.int32)
    grid = n, longest // CHUNK + 1
    packed_blocks_kernel[grid](starts, blocks, n, int(starts.max()), most, **options)
    return blocks


@pytest.mark.parametrize(
    ("leading", "lengths"), [((2, 0, 2), (70, 70)), ((1, 2), (300, 0)), ((1, 2), (0, 300))]
)
def test_without_elements(leading, lengths):
    by = partial(by_function, function=FlashAttentionHopper)
    with emulated_gpu(multiprocessors=2, seed=0):
        assert_right(*inputs(lengths, 64, BF16, leading), CAUSAL, by=by)


def test_wrong_boundaries_of_packed_sequences_read_nothing_outside():
    """The boundaries say that no sequence has rows, although the tensors have some.

    The emulation raises an IndexError if a kernel reads outside of a tensor.
    """
    given, packing = packed_inputs([(100, 100)], (1, 1), 128, BF16)
    nothing = torch.zeros_like(packing.starts_q)
    wrong = packing._replace(starts_q=nothing, starts_k=nothing)
    with emulated_gpu(multiprocessors=2, seed=0):
        results = by_hopper(*given, Call(True, packing=wrong))
    assert [x.shape for x in results[2:]] == [x.shape for x in given[:3]]


@pytest.mark.parametrize(("head_dim", "rows"), [(64, 400), slow(96, 600), slow(128, 600)])
def test_additions_in_a_fixed_order(monkeypatch, head_dim, rows):
    """The gradients are bitwise equal in different orders of execution if torch asks for it."""
    given = inputs((rows, rows), head_dim, BF16, (1, 1))
    results: dict[bool, list[tuple[Tensor, ...]]] = {True: [], False: []}
    for seed, deterministic in itertools.product(range(3), (True, False)):
        # `torch.use_deterministic_algorithms` itself would make the emulation slow.
        monkeypatch.setattr(
            torch, "are_deterministic_algorithms_enabled", lambda x=deterministic: x
        )
        with emulated_gpu(multiprocessors=3, seed=seed):
            found = by_function(*given, CAUSAL, function=FlashAttentionHopper)
        results[deterministic].append(found)
    assert_right(*given, CAUSAL, by=lambda *_, **__: results[True][0])

    def all_equal(several: list[tuple[Tensor, ...]]) -> bool:
        return all(all(map(torch.equal, several[0], other)) for other in several[1:])

    assert all_equal(results[True])
    assert not all_equal(results[False])


@pytest.mark.parametrize("error", ERRORS)
def test_the_emulation_finds_errors(error):
    """At least one of several random orders of execution shows an error in a kernel.

    For errors of work items that share keys, two heads of q have one head of k.
    """
    head_dim, module, text, replacement, found = ERRORS[error]
    heads = 2 if "work item" in error else 1
    given = inputs((300, 300), head_dim, BF16, (1, heads), kv_heads=1)
    changed = Source(module, text, replacement)
    with pytest.raises(Exception, match=found):
        for seed in range(40):
            with emulated_gpu(multiprocessors=heads, seed=seed, source=changed):
                assert_right(*given, CAUSAL, by=by_hopper)


def test_symbolic_shapes():
    """Tools that trace with symbolic shapes see the operator, and no plan of fixed sizes."""
    given = [torch.randn(1, 2, 20, 64, dtype=BF16) for _ in range(3)]
    attend = partial(flash_attention, is_causal=True, implementation="flash_hopper")
    with emulated_gpu(multiprocessors=2, seed=0):
        traced = make_fx(attend, tracing_mode="symbolic")(*given)
        assert torch.equal(traced(*given), attend(*given))


def test_plans_of_backward_are_limited(monkeypatch):
    """The gradient of the output of a concatenation has other strides for each other length."""
    monkeypatch.setattr(backward_launch, "MAX_BACKWARD_PLANS", 2)
    given = [torch.randn(1, 2, 20, 64, dtype=BF16, requires_grad=True) for _ in range(3)]
    with emulated_gpu(multiprocessors=2, seed=0):
        kept = forward_launch.plan_of(*given, CAUSAL)
        assert kept is not None
        for rows in range(5):
            out = FlashAttentionHopper.apply(*given, kept)
            other = torch.zeros(1, 2, 8 * rows, 64, dtype=BF16)
            torch.cat([out, other], -2).sum().backward()
            assert len(kept.backward_plans) <= 2
