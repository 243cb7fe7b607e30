"""Additions to dQ in a fixed order in the Hopper backward kernels, for reproducible gradients.

Every tile of dQ is a sum over the blocks of 128 keys that its queries see. Its rounding errors
depend on the order of the additions. For bitwise reproducible gradients, the blocks of a head add
to each tile in descending order of their keys. A warp of its own, the adder, issues the additions,
because it waits between them. For each block and head of q, a counter in global memory has the
index of a tile of queries: the block has added to all tiles before it. Before a block adds to a
tile, it waits until the counter of the next block of keys is past this tile.

This cannot come to a standstill: programs take the blocks of a head in descending order, so a block
only waits for blocks that were taken before it.

Blocks process tiles of queries in ascending order. With a causal mask, each block starts with
another tile, the first one that sees its keys. If all blocks of a head start at the same time, each
one is two tiles behind the next block of keys, and none has to wait. Without a mask, all blocks
start with the same tile, and each one follows the next block of keys at a distance of a tile.

The ring of dQ^T in shared memory has the mbarriers `dq_full` and `dq_empty` here (see the module
`backward.rings`).
"""

# Kernel arguments have Triton's own types, which mypy does not know.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from systems.kernels.flash_attention.hopper.backward.rings import store_dq
from systems.kernels.flash_attention.hopper.backward.work import BLOCK_Q, HALF_K
from systems.kernels.flash_attention.hopper.gluon_names import async_atomic_add, barrier


@gluon.jit
def pass_dq(shared, dq, n, place, SLOTS: gl.constexpr):
    """Pass a tile of dQ^T to the adder through shared memory.

    dq is float32 (64 of head_dim, 64 queries), in registers. n is the number of earlier calls of
    this warpgroup, which uses SLOTS slots in turn. `place` is explained in `add_in_order`.
    """
    mbarrier.wait(shared.dq_empty.index(place), (n // SLOTS & 1) ^ 1)
    store_dq(dq, shared.dq.index(place))
    fence_async_shared()
    mbarrier.arrive(shared.dq_full.index(place), count=1)


@gluon.jit
def add_in_order(
    shared, problem, item, dq_desc, n, SLOTS: gl.constexpr, HALVES: gl.constexpr
):  # fmt: skip
    """Add all tiles of dQ of a work item to global memory by TMA. The adder calls this function.

    n is the number of tiles in earlier work items of this program, and n for the next work item is
    returned. The ring has room for SLOTS tiles of dQ^T, 1 or 2. HALVES parts of 64 columns are
    passed separately (head_dim / 64). Part h of a tile is in the place (n % SLOTS) * HALVES + h.
    """
    for which in range(problem.Q_PER_ITEM):
        q_head = item.head * problem.Q_PER_ITEM + which
        first_row = q_head * problem.n_padded + item.padded_query_start
        # Blocks of different sequences start at different keys, so there is a counter for each key.
        counter = problem.turns + (q_head * problem.n_keys + item.key_start + item.first_key)
        known = gl.to_tensor(0)  # a value that the counter of the next block of keys has reached
        for i in range(item.n_tiles):
            tile = item.first_tile + i
            known = _wait_for_turn(problem, item, tile, counter + 2 * HALF_K, known)
            row = (first_row // BLOCK_Q + tile) * (HALVES * 64)
            for half in gl.static_range(HALVES):
                place = n % SLOTS * HALVES + half
                mbarrier.wait(shared.dq_full.index(place), n // SLOTS & 1)
                async_atomic_add(dq_desc, [row + half * 64, 0], shared.dq.index(place))
            tma.store_wait(pendings=0)  # until TMA has read the tile, not until it has added it
            for half in gl.static_range(HALVES):
                mbarrier.arrive(shared.dq_empty.index(n % SLOTS * HALVES + half), count=1)
            if i > 0:  # the previous tile is complete while this one is being added
                _set(counter, _when_added(tile, HALVES))
            n += 1
        _set(counter, _when_added(item.first_tile + item.n_tiles, 0))
    return n


@gluon.jit
def _wait_for_turn(problem, item, tile, counter, known):
    """Wait until the next block of keys has added to a tile of dQ, if its queries see this block.

    `counter` points to the counter of the next block of keys, and `known` is a value that it has
    reached. Returns a new value of known. `tile` is the index in the sequence.
    """
    next_key = item.first_key + 2 * HALF_K
    waits = next_key < item.n_keys
    if problem.BOUNDED or problem.IS_CAUSAL:
        waits = waits & (next_key <= tile * BLOCK_Q + (BLOCK_Q - 1) + item.upper)
    if waits:
        while known <= tile:
            # All threads load the number, which is the same for all threads of the warp.
            known = gl.inline_asm_elementwise(
                "ld.acquire.gpu.global.b32 $0, [$1];", "=r,l,~{memory}", [counter.to(gl.int64)],
                dtype=gl.int32, is_pure=False, pack=1,
            )  # fmt: skip
    return known


@gluon.jit
def _when_added(value, PENDING: gl.constexpr):
    """Wait until additions of the adder are complete, and return `value`.

    It does not wait for the latest PENDING additions.
    """
    # `tma.store_wait` waits only until TMA has read shared memory, not until it has added.
    return gl.inline_asm_elementwise(
        f"cp.async.bulk.wait_group {PENDING}; mov.b32 $0, $1;", "=r,r,~{memory}", [value],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _set(counter, value):
    """Set the counter of a work item to `value`, after the additions for which the adder waited."""
    barrier()  # only one thread has issued the additions, and waited for them
    # The maximum, so that a wrong list of sequences, which may overlap, cannot make a block wait
    # forever.
    gl.inline_asm_elementwise(
        """{
            .reg .b32 lane;
            .reg .pred is_elected;
            elect.sync lane|is_elected, -1;
            @is_elected red.release.gpu.global.max.s32 [$1], $2;
            mov.b32 $0, $2;
        }""", "=r,l,r,~{memory}", [counter.to(gl.int64), value],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
