"""The producer of the Hopper forward kernel, and the rings of tiles that it fills.

The module `forward.kernel` describes rings, their mbarriers and what the producer does. Usually, a
tile of q, k or v takes one box in shared memory, which one TMA copy fills, and keys and values have
rings of their own. Both the keys and the values of tile n are then use n of their ring.

If SHARED_RING is True (q, k and v have the same head_dim, 136 to 192), a tile takes three boxes of
64 columns. The number of columns of a box is a power of two, and boxes of 256 columns would leave
no room for tiles of 128 keys. Keys and values share one ring of three slots. Except for the first
and the last tile of a work item, the values of a tile take the slot of its keys, which both
consumers release early:

    use      0     1     2     3     4     5     6    ...
    tile     k_0   k_1   v_0   k_2   v_1   k_3   v_2
    slot     0     1     2     0     1     2     0

The next work item starts after the values of the last tile.
"""

# Kernel arguments have Triton's own types, which mypy does not know.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False
# A tuple of one tile or of two, by a constant
# mypy: disable-error-code=assignment

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from systems.kernels.flash_attention.hopper.column_parts import parts_of
from systems.kernels.flash_attention.hopper.forward.work import ROWS, publish
from systems.kernels.flash_attention.hopper.gluon_names import async_load, reinterpret


@gluon.jit
def place_of_keys(n, first, SHARED_RING: gl.constexpr):
    """Return the number of the use of their ring by the keys of tile n.

    n and `first`, the first tile of the work item, are counted over all work items of the program.
    """
    place = n
    if SHARED_RING:
        place = gl.maximum(2 * n - 1, 2 * first)
    return place


@gluon.jit
def place_of_values(n, last, SHARED_RING: gl.constexpr):
    """Return the number of the use of their ring by the values of tile n.

    `last` is the last tile of the work item, counted as n.
    """
    place = n
    if SHARED_RING:
        place = gl.minimum(2 * n + 2, 2 * last + 1)
    return place


@gluon.jit
def allocate_ring(desc, SLOTS: gl.constexpr, SHARED_RING: gl.constexpr):
    """Allocate a ring for the tiles that are loaded with a TMA descriptor.

    Returns a tuple of one array, (SLOTS, 1, 1, rows, columns), or of two if tiles take three boxes:
    (SLOTS, rows, 128) for the first two boxes of each tile, and (SLOTS, 1, 1, rows, 64).
    """
    ROWS_OF_TILE: gl.constexpr = desc.block_type.shape[2]
    COLUMNS: gl.constexpr = desc.block_type.shape[3]
    shape: gl.constexpr = [SLOTS, 1, 1, ROWS_OF_TILE, COLUMNS]
    if SHARED_RING:
        pair: gl.constexpr = [SLOTS, ROWS_OF_TILE, 2 * COLUMNS]
        layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(pair[1:], desc.dtype)
        ring = (
            gl.allocate_shared_memory(desc.dtype, pair, layout),
            gl.allocate_shared_memory(desc.dtype, shape, desc.layout),
        )
    else:
        ring = (gl.allocate_shared_memory(desc.dtype, shape, desc.layout),)
    return ring


@gluon.jit
def _load_tile(
    desc, batch, head, row, ring, full, empty, place, SLOTS: gl.constexpr, SHARED_RING: gl.constexpr
):
    """Load a tile into a ring by TMA, asynchronously.

    The tile starts at (batch, head, row) of the tensor. `place` is the number of this use of the
    ring.
    """
    BOX: gl.constexpr = desc.block_type.shape[3]
    slot = place % SLOTS
    full = full.index(slot)
    mbarrier.wait(empty.index(slot), (place // SLOTS & 1) ^ 1)
    if SHARED_RING:
        mbarrier.expect(full, 3 * desc.block_type.nbytes)
        # In a swizzled tile, each 64 columns are contiguous, as in a tile of their own.
        shape: gl.constexpr = [2, 1, 1, desc.block_type.shape[2], BOX]
        pair = reinterpret(ring[0].index(slot), desc.dtype, shape, desc.layout)
        async_load(desc, [batch, head, row, 0], full, pair.index(0))
        async_load(desc, [batch, head, row, BOX], full, pair.index(1))
        async_load(desc, [batch, head, row, 2 * BOX], full, ring[1].index(slot))
    else:
        mbarrier.expect(full, desc.block_type.nbytes)
        async_load(desc, [batch, head, row, 0], full, ring[0].index(slot))


@gluon.jit
def tile_at(ring, slot, SHARED_RING: gl.constexpr, IN_PARTS: gl.constexpr):
    """Return the tile in a slot of a ring, as the tuple of `column_parts.parts_of`.

    With SHARED_RING, it must be IN_PARTS.
    """
    ROWS_OF_TILE: gl.constexpr = ring[-1].shape[3]
    COLUMNS: gl.constexpr = ring[-1].shape[4]
    tile = ring[-1].index(slot).reshape([ROWS_OF_TILE, COLUMNS])
    if SHARED_RING:
        parts = (ring[0].index(slot), tile)
    else:
        parts = parts_of(tile, IN_PARTS)
    return parts


@gluon.jit
def produce(tensors, problem, barriers, STAGES: gl.constexpr, SHARED_RING: gl.constexpr):
    """Load the data of all work items of a program into shared memory. The producer warp runs this.

    For each work item, the producer loads the queries first. It then loads the tiles of keys and
    values, from the last tile to the first. A slot for queries has those of one consumer, and only
    this consumer releases it.

    The tuples `tensors` and `barriers` are unpacked in the first lines of the function.
    `forward.kernel.hopper_forward_kernel` describes the constants.
    """
    q_desc, k_desc, v_desc, q_ring, k_ring, v_ring, work_smem, counters = tensors
    q_full, q_empty, k_full, k_empty, v_full, v_empty, work_full, work_empty = barriers
    CONSUMERS: gl.constexpr = problem.CONSUMERS
    BLOCK_K: gl.constexpr = problem.BLOCK_K
    Q_SLOTS: gl.constexpr = q_full.shape[0]
    turn = 0
    n = 0
    work = gl.program_id(0)
    while work < problem.n_work:
        publish(work, work_smem, work_full, work_empty, turn)
        item = problem.locate(work)
        batch = item.head // problem.n_heads
        head = item.head % problem.n_heads
        kv_head = head // problem.Q_PER_KV
        first_query = item.query_start + item.first_query
        for c in gl.static_range(CONSUMERS):
            _load_tile(
                q_desc, batch, head, first_query + c * ROWS, q_ring, q_full, q_empty,
                turn * CONSUMERS + c, Q_SLOTS, SHARED_RING,
            )  # fmt: skip
        first = n
        last = first + item.n_tiles - 1
        start = item.key_start + item.first_key + (item.n_tiles - 1) * BLOCK_K
        for _ in range(item.n_tiles):
            _load_tile(
                k_desc, batch, kv_head, start, k_ring, k_full, k_empty,
                place_of_keys(n, first, SHARED_RING), STAGES, SHARED_RING,
            )  # fmt: skip
            if not SHARED_RING:
                _load_tile(
                    v_desc, batch, kv_head, start, v_ring, v_full, v_empty, n, STAGES, SHARED_RING
                )
            elif n > first:
                _load_tile(
                    v_desc, batch, kv_head, start + BLOCK_K, v_ring, v_full, v_empty,
                    place_of_values(n - 1, last, SHARED_RING), STAGES, SHARED_RING,
                )  # fmt: skip
            start -= BLOCK_K
            n += 1
        if SHARED_RING:
            _load_tile(
                v_desc, batch, kv_head, start + BLOCK_K, v_ring, v_full, v_empty,
                place_of_values(last, last, SHARED_RING), STAGES, SHARED_RING,
            )  # fmt: skip
        turn += 1
        work = gl.num_programs(0) + gl.atomic_add(counters, 1, sem="relaxed")
    # Publish an index of n_work or more, at which the consumers stop.
    publish(work, work_smem, work_full, work_empty, turn)
    # The last program to finish resets the counters for the next launch.
    if gl.atomic_add(counters + 1, 1) == gl.num_programs(0) - 1:
        gl.store(counters, 0)
        gl.store(counters + 1, 0)


@gluon.jit
def skip(n_tiles, n, first, last, barriers, STAGES: gl.constexpr, SHARED_RING: gl.constexpr):
    """Release the keys and values of the next n_tiles tiles without reading them.

    A slot is released after it is filled. Otherwise, the arrival at `empty` could count for the
    previous phase. n tiles were released before by this consumer, and its value for the next tile
    is returned. `first` and `last` are the first and last tile of the work item.
    """
    _, _, k_full, k_empty, v_full, v_empty, _, _ = barriers
    for _ in range(n_tiles):
        place = place_of_keys(n, first, SHARED_RING)
        slot = place % STAGES
        mbarrier.wait(k_full.index(slot), place // STAGES & 1)
        mbarrier.arrive(k_empty.index(slot), count=1)
        place = place_of_values(n, last, SHARED_RING)
        slot = place % STAGES
        mbarrier.wait(v_full.index(slot), place // STAGES & 1)
        mbarrier.arrive(v_empty.index(slot), count=1)
        n += 1
    return n
