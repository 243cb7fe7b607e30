"""The order in which work items add to dQ in the Hopper backward kernels, if it must not vary.

Every tile of dQ is a sum over the blocks of 128 keys that its queries see. Its rounding errors
depend on the order of the additions. For bitwise reproducible gradients, the work items add in the
order of their keys. For each tile, a counter in global memory has the number of additions that are
complete. A work item waits for its turn: until the counter has the number of blocks before its own
one. It ends its turn when its addition is complete. With head_dim 128, there is a counter for each
half of the columns, because each consumer adds one half.

This cannot come to a standstill: programs take the blocks of a head in ascending order, and a work
item waits only for blocks before its own one.

Work items process tiles of queries from the last to the first one. So all blocks of a head start
with the same tile, and each one follows the block before it at a distance of about one tile. From
the first to the last tile, a causal mask would make a work item wait at its first tile until the
blocks before it have processed all tiles before that one.
"""

# Kernel arguments have Triton's own types, which mypy does not know.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from systems.kernels.flash_attention.hopper.backward_work import BLOCK_Q, HALF_K


@gluon.jit
def take_turn(problem, item, held, tile, counter, PENDING: gl.constexpr = 0):
    """End the previous turn, then wait for the turn of a work item to add to a tile of dQ.

    Args:
        problem, item: `BackwardProblem` and `WorkItem`.
        held: result of the previous call by this warpgroup; -1 before the first one.
        tile: index of the tile of queries in its sequence.
        counter: index of the counter of the tile.
        PENDING: see `end_turn`.

    Returns:
        The counter of the tile, or -1 if no query of the tile sees a key of the work item. Its
        addition then adds zeros, at any time.
    """
    end_turn(problem, held, PENDING)
    block = item.first_key // (2 * HALF_K)
    order = block
    if problem.BOUNDED:
        order -= gl.maximum(tile * BLOCK_Q + item.lower, 0) // (2 * HALF_K)
    if problem.BOUNDED or problem.IS_CAUSAL:
        last_key = tile * BLOCK_Q + BLOCK_Q - 1 + item.upper
        order = gl.where(item.first_key <= last_key, order, -1)
    if order > 0:
        n_complete = gl.atomic_add(problem.turns + counter, 0, sem="acquire", scope="gpu")
        while n_complete < order:
            n_complete = gl.atomic_add(problem.turns + counter, 0, sem="acquire", scope="gpu")
    return gl.where(order >= 0, counter, -1)


@gluon.jit
def end_turn(problem, held, PENDING: gl.constexpr = 0):
    """Wait until the previous addition of this warpgroup is complete, and end its turn.

    Args:
        problem: `BackwardProblem`.
        held: result of `take_turn` for this addition; -1 if there is no turn to end.
        PENDING: number of TMA stores that this warpgroup has issued since this addition.
    """
    # `tma.store_wait` waits only until TMA has read shared memory, not until it has added.
    gl.inline_asm_elementwise(
        f"cp.async.bulk.wait_group {PENDING}; mov.b32 $0, $1;", "=r,r,~{memory}", [held],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    gl.thread_barrier()  # the thread that ends the turn may not be the one that has waited
    if held >= 0:
        gl.atomic_add(problem.turns + held, 1, sem="release", scope="gpu")
