"""The backward pass of `hopper_backward` for head_dim 128, where registers leave no warps for dQ.

dK and dV of 64 keys are 128 registers of each thread of a consumer. So two consumers have 240 each,
and compute dQ too, a half of head_dim each, from both halves' dS^T. The products of a step are

    S^T of tile i    dQ^T of tile i - 1    dP^T, dV and dK of tile i

A consumer needs the other's dS^T of a tile that both have left behind, so it rarely waits for it,
and its exponentials run under a product of its own. There is no room for the next item's K and V
beside these: programs that stay for several items gain nothing, as measured.

    ring   slots of               filled by      read by              slots
    kv     K, V of the item       producer       consumers            1
    q      Q, dO, lse, delta      producer       consumers            2
    ds     dS^T of a tile         consumers      consumers            2
    dq     a half of dQ^T         a consumer     copy engine          1 for each half
"""

# Arguments of a kernel are Triton's, which has no types.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from systems.kernels.flash_attention.hopper_backward_parts import (
    BLOCK_Q,
    HALF_K,
    Problem,
    allocate,
    hide,
    load_item,
    reduce_add,
    row_of,
    store_rows,
    times,
)

HEAD_DIM = gl.constexpr(128)
CHUNK = gl.constexpr(64)  # of head_dim: the half of dQ^T that a consumer computes
KV_SLOTS = gl.constexpr(1)
Q_SLOTS = gl.constexpr(2)
DS_SLOTS = gl.constexpr(2)
# Of a thread; of 504 for one warp of each warpgroup, consumer 0 gets what the others leave: 240.
CONSUMER_REGISTERS = gl.constexpr(240)
PRODUCER_REGISTERS = gl.constexpr(24)


@gluon.jit
def _produce(shared, problem, q_desc, do_desc, k_desc, v_desc, lse_desc, delta_desc):
    turn = 0
    n = 0
    for item in range(gl.program_id(0), problem.n_items, gl.num_programs(0)):
        n = load_item(
            shared, problem, q_desc, do_desc, k_desc, v_desc, lse_desc, delta_desc, item, turn, n,
            KV_SLOTS, Q_SLOTS,
        )  # fmt: skip
        turn += 1  # noqa: SIM113, kernels have no enumerate


@gluon.jit
def _begin_dq(shared, n, kt0, kt1, there, layout: gl.constexpr, HALF: gl.constexpr):
    """A half of dQ^T of step n - 1; of what lies in its slot, without a wait, if not `there`."""
    slot = (n + DS_SLOTS - 1) % DS_SLOTS
    zeros = gl.zeros([CHUNK, BLOCK_Q], gl.float32, layout)
    other_full = shared.ds_full.index(2 * slot + 1 - HALF)
    mbarrier.wait(other_full, ((n + DS_SLOTS - 1) // DS_SLOTS + 1) & 1, pred=there)
    dq = warpgroup_mma(kt0, shared.ds.index(2 * slot), zeros, use_acc=False, is_async=True)
    return warpgroup_mma(kt1, shared.ds.index(2 * slot + 1), dq, is_async=True)


@gluon.jit
def _add_dq(shared, dq_desc, dq, row, HALF: gl.constexpr):
    dq_tile = shared.dq.index(HALF)
    tma.store_wait(pendings=0)  # the copy engine has read the one before
    dq_tile.store(dq)
    fence_async_shared()
    reduce_add(dq_desc, [row, 0], dq_tile)


@gluon.jit
def _step(
    shared, dq_desc, n, i, k, v, kt0, kt1, dk, dv, first_key, first_query, n_keys, row, scale_log2e,
    HALF: gl.constexpr, IS_CAUSAL: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """dk and dv with what tile i of the item adds, and dQ of tile i - 1 on its way.

    Args:
        n: step of the program.
        kt0, kt1: this half of head_dim of K^T, of the keys of either consumer.
        row: of dq_desc, where dQ^T of tile i - 1 is.
    """
    dtype: gl.constexpr = shared.q.dtype
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_Q, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, dk.type.layout, 2)
    q_slot = n % Q_SLOTS
    ds_slot = n % DS_SLOTS
    q = shared.q.index(q_slot)
    do = shared.do.index(q_slot)

    mbarrier.wait(shared.q_full.index(q_slot), (n // Q_SLOTS) & 1)
    s = times(k, q, layout)
    dq = _begin_dq(shared, n, kt0, kt1, i > 0, layout, HALF)
    lse = row_of(shared.lse.index(q_slot), layout)
    s = warpgroup_mma_wait(2, deps=[s])
    p = gl.exp2(s * scale_log2e - lse[None, :])
    if MASKED:
        p = hide(p, first_key, first_query, n_keys, IS_CAUSAL)
    p16 = gl.convert_layout(p.to(dtype), operand)
    dq = warpgroup_mma_wait(0, deps=[dq])
    mbarrier.arrive(shared.ds_empty.index((n + DS_SLOTS - 1) % DS_SLOTS), count=1, pred=i > 0)
    if i > 0:
        _add_dq(shared, dq_desc, dq, row, HALF)
    delta = row_of(shared.delta.index(q_slot), layout)
    dp = times(v, do, layout)
    dv = warpgroup_mma(p16, do, dv, is_async=True)
    dp = warpgroup_mma_wait(1, deps=[dp])
    ds = (p * (dp - delta[None, :])).to(dtype)
    ds16 = gl.convert_layout(ds, operand)
    dk = warpgroup_mma(ds16, q, dk, is_async=True)
    mbarrier.wait(shared.ds_empty.index(ds_slot), (n // DS_SLOTS) & 1 ^ 1)
    shared.ds.index(2 * ds_slot + HALF).store(ds)
    fence_async_shared()
    mbarrier.arrive(shared.ds_full.index(2 * ds_slot + HALF), count=1)
    dv, p16, dk, ds16 = warpgroup_mma_wait(0, deps=[dv, p16, dk, ds16])
    mbarrier.arrive(shared.q_empty.index(q_slot), count=1)
    return dk, dv


@gluon.jit
def _consume(
    shared, problem, dq_desc, dkey, dvalue, dk_split, dk_batch, dk_head, dk_row,
    dv_split, dv_batch, dv_head, dv_row, scale, scale_log2e, HALF: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_Q, 16])
    turn = 0
    n = 0
    for item in range(gl.program_id(0), problem.n_items, gl.num_programs(0)):
        split, item_head, first_key, first_tile, n_tiles, n_masked = problem.place(item)
        first_key += HALF * HALF_K
        mbarrier.wait(shared.kv_full.index(0), turn & 1)
        mbarrier.wait(shared.kv_full.index(1), turn & 1)
        k = shared.k.index(HALF)
        v = shared.v.index(HALF)
        kt0 = shared.k.index(0).permute((1, 0)).slice(HALF * CHUNK, CHUNK, 0)
        kt1 = shared.k.index(1).permute((1, 0)).slice(HALF * CHUNK, CHUNK, 0)
        dk = gl.zeros([HALF_K, HEAD_DIM], gl.float32, layout)
        dv = gl.zeros([HALF_K, HEAD_DIM], gl.float32, layout)
        # Of dQ^T of the tile before the first, of which there is none
        row = (item_head * (problem.n_padded // BLOCK_Q) + first_tile - 1) * HEAD_DIM
        row += HALF * CHUNK
        for i in range(n_masked):
            dk, dv = _step(
                shared, dq_desc, n + i, i, k, v, kt0, kt1, dk, dv, first_key,
                (first_tile + i) * BLOCK_Q, problem.n_keys, row + i * HEAD_DIM, scale_log2e,
                HALF, problem.IS_CAUSAL, True,
            )  # fmt: skip
        for i in range(n_masked, n_tiles):
            dk, dv = _step(
                shared, dq_desc, n + i, i, k, v, kt0, kt1, dk, dv, first_key,
                (first_tile + i) * BLOCK_Q, problem.n_keys, row + i * HEAD_DIM, scale_log2e,
                HALF, problem.IS_CAUSAL, False,
            )  # fmt: skip
        n += n_tiles
        dq = _begin_dq(shared, n, kt0, kt1, True, s_layout, HALF)
        dq = warpgroup_mma_wait(0, deps=[dq])
        mbarrier.arrive(shared.ds_empty.index((n + DS_SLOTS - 1) % DS_SLOTS), count=1)
        mbarrier.arrive(shared.kv_empty.index(0), count=1)
        _add_dq(shared, dq_desc, dq, row + n_tiles * HEAD_DIM, HALF)
        batch = (item_head // problem.n_heads).to(gl.int64)
        head = (item_head % problem.n_heads).to(gl.int64)
        part = split.to(gl.int64)
        dk_base = dkey + part * dk_split + batch * dk_batch + head * dk_head
        dv_base = dvalue + part * dv_split + batch * dv_batch + head * dv_head
        store_rows(dk_base, dk * scale, first_key, problem.n_keys, dk_row)
        store_rows(dv_base, dv, first_key, problem.n_keys, dv_row)
        turn += 1  # noqa: SIM113, kernels have no enumerate
    tma.store_wait(pendings=0)


@gluon.jit(
    do_not_specialize=[
        "n_programs", "n_heads", "n_queries", "n_keys", "n_padded", "queries_a_split", "group",
        "n_items",
    ]
)  # fmt: skip
def wide_backward_kernel(
    q_desc, do_desc, k_desc, v_desc, lse_desc, delta_desc, dq_desc, counter, dkey, dvalue,
    dk_split, dk_batch, dk_head, dk_row, dv_split, dv_batch, dv_head, dv_row,
    n_programs, n_heads, n_queries, n_keys, n_padded, queries_a_split, group, n_items,
    scale, scale_log2e, IS_CAUSAL: gl.constexpr,
):  # fmt: skip
    """Grid: (programs,), n_items or fewer. num_warps=4, those of consumer 0.

    Args: as for `hopper_backward.backward_kernel` with head_dim 128, dq_desc of float32
        (batch * heads * n_padded * 2, 64); counter is not used.
    """
    problem = Problem(
        n_programs, n_heads, n_queries, n_keys, n_padded, queries_a_split, group, n_items,
        IS_CAUSAL,
    )  # fmt: skip
    shared = allocate(q_desc, k_desc, lse_desc, dq_desc, KV_SLOTS, Q_SLOTS, DS_SLOTS, 2, 2, 2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consume, (shared, problem, dq_desc, dkey, dvalue,
                        dk_split, dk_batch, dk_head, dk_row, dv_split, dv_batch, dv_head, dv_row,
                        scale, scale_log2e, gl.constexpr(0))),
            (_consume, (shared, problem, dq_desc, dkey, dvalue,
                        dk_split, dk_batch, dk_head, dk_row, dv_split, dv_batch, dv_head, dv_row,
                        scale, scale_log2e, gl.constexpr(1))),
            (_produce, (shared, problem, q_desc, do_desc, k_desc, v_desc, lse_desc, delta_desc)),
        ],
        [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
