"""Shared memory of the Hopper backward kernel for head_dim 136 to 192, and copies into it.

Gluon needs tiles whose numbers of rows and columns are powers of two. So 96 keys are divided into
a wide part of 64 and a narrow part of 32 keys, and 192 columns into three boxes of 64 columns. The
module `backward.d192` uses these tiles.
"""

# Kernel arguments have Triton's own types, which mypy does not know.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

# No `from __future__ import annotations`: an aggregate needs the types of its fields, not strings.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.core import _aggregate as aggregate

from systems.kernels.flash_attention.hopper.backward.rings import barriers, copy
from systems.kernels.flash_attention.hopper.backward.work import BLOCK_Q
from systems.kernels.flash_attention.hopper.gluon_names import async_load, reinterpret

WIDE = gl.constexpr(64)  # number of keys of the wide part
NARROW = gl.constexpr(32)  # number of keys of the narrow part, and of a TMA copy of keys
BOX = gl.constexpr(64)  # number of columns of a TMA copy
BOXES = gl.constexpr(3)  # number of boxes of 64 columns
SLOTS = gl.constexpr(2)  # number of slots of Q, dO, lse and -delta


@aggregate
class Shared:
    """Tiles in shared memory and their mbarriers.

    Tiles of keys consist of boxes of 64 columns.
    """

    k_wide: gl.shared_memory_descriptor  # (3, 64, 64)
    k_narrow: gl.shared_memory_descriptor  # (3, 32, 64)
    v_wide: gl.shared_memory_descriptor  # as k_wide
    v_narrow: gl.shared_memory_descriptor  # as k_narrow
    q: gl.shared_memory_descriptor  # (3 * slots, 64, 64)
    do: gl.shared_memory_descriptor  # as q
    lse: gl.shared_memory_descriptor  # float32 (slots, 64), in base 2
    minus_delta: gl.shared_memory_descriptor  # float32 (slots, 64)
    p_wide: gl.shared_memory_descriptor  # (1, 64 queries, 64)
    p_narrow: gl.shared_memory_descriptor  # (1, 64 queries, 32)
    ds_wide: gl.shared_memory_descriptor  # as p_wide
    ds_narrow: gl.shared_memory_descriptor  # as p_narrow
    dq: gl.shared_memory_descriptor  # float32 (2, 64, 64), one for each consumer
    k_full: gl.shared_memory_descriptor  # (1)
    v_full: gl.shared_memory_descriptor  # (1)
    q_full: gl.shared_memory_descriptor  # (slots), for q and lse
    q_empty: gl.shared_memory_descriptor  # (slots)
    do_full: gl.shared_memory_descriptor  # (slots), for do and minus_delta
    do_empty: gl.shared_memory_descriptor  # (slots)
    p_full: gl.shared_memory_descriptor  # (1)
    p_empty: gl.shared_memory_descriptor  # (1)
    ds_full: gl.shared_memory_descriptor  # (1)
    ds_empty: gl.shared_memory_descriptor  # (1)

    @gluon.constexpr_function
    def __init__(
        self, k_wide, k_narrow, v_wide, v_narrow, q, do, lse, minus_delta, p_wide, p_narrow,
        ds_wide, ds_narrow, dq, k_full, v_full, q_full, q_empty, do_full, do_empty, p_full, p_empty,
        ds_full, ds_empty,
    ):  # fmt: skip
        self.k_wide = k_wide
        self.k_narrow = k_narrow
        self.v_wide = v_wide
        self.v_narrow = v_narrow
        self.q = q
        self.do = do
        self.lse = lse
        self.minus_delta = minus_delta
        self.p_wide = p_wide
        self.p_narrow = p_narrow
        self.ds_wide = ds_wide
        self.ds_narrow = ds_narrow
        self.dq = dq
        self.k_full = k_full
        self.v_full = v_full
        self.q_full = q_full
        self.q_empty = q_empty
        self.do_full = do_full
        self.do_empty = do_empty
        self.p_full = p_full
        self.p_empty = p_empty
        self.ds_full = ds_full
        self.ds_empty = ds_empty


@gluon.jit
def allocate(k_desc, lse_desc):
    """Allocate the tiles in shared memory and their mbarriers, and return `Shared`."""
    dtype: gl.constexpr = k_desc.dtype
    wide_keys: gl.constexpr = gl.NVMMASharedLayout.get_default_for([WIDE, BOX], dtype)
    narrow_keys: gl.constexpr = gl.NVMMASharedLayout.get_default_for([NARROW, BOX], dtype)
    queries: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_Q, BOX], dtype)
    wide: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_Q, WIDE], dtype)
    narrow: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_Q, NARROW], dtype)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
    return Shared(
        gl.allocate_shared_memory(dtype, [BOXES, WIDE, BOX], wide_keys),
        gl.allocate_shared_memory(dtype, [BOXES, NARROW, BOX], narrow_keys),
        gl.allocate_shared_memory(dtype, [BOXES, WIDE, BOX], wide_keys),
        gl.allocate_shared_memory(dtype, [BOXES, NARROW, BOX], narrow_keys),
        gl.allocate_shared_memory(dtype, [BOXES * SLOTS, BLOCK_Q, BOX], queries),
        gl.allocate_shared_memory(dtype, [BOXES * SLOTS, BLOCK_Q, BOX], queries),
        gl.allocate_shared_memory(gl.float32, [SLOTS, BLOCK_Q], lse_desc.layout),
        gl.allocate_shared_memory(gl.float32, [SLOTS, BLOCK_Q], lse_desc.layout),
        gl.allocate_shared_memory(dtype, [1, BLOCK_Q, WIDE], wide),
        gl.allocate_shared_memory(dtype, [1, BLOCK_Q, NARROW], narrow),
        gl.allocate_shared_memory(dtype, [1, BLOCK_Q, WIDE], wide),
        gl.allocate_shared_memory(dtype, [1, BLOCK_Q, NARROW], narrow),
        gl.allocate_shared_memory(gl.float32, [2, BOX, BLOCK_Q], plain),
        barriers(1, 1),
        barriers(1, 1),
        barriers(SLOTS, 1),
        barriers(SLOTS, 2),
        barriers(SLOTS, 1),
        barriers(SLOTS, 2),
        barriers(1, 1),
        barriers(1, 1),
        barriers(1, 1),
        barriers(1, 1),
    )


@gluon.jit
def keys_of_box(wide, narrow, box):
    """Return 64 columns of the tile of keys K or V, transposed: (64, 64 keys) and (64, 32 keys).

    `wide` and `narrow` are its parts in `Shared`, and `box` is the index of the 64 columns, 0 to 2.
    """
    return wide.index(box).permute((1, 0)), narrow.index(box).permute((1, 0))


@gluon.jit
def copies_in(tile, desc, N: gl.constexpr):
    """Return a tile in shared memory as N tiles (32, 64), with the layout of `desc`, for TMA."""
    return reinterpret(tile, desc.dtype, [N, 1, 1, NARROW, BOX], desc.layout)


@gluon.jit
def copy_keys(desc, batch, head, row, barrier, wide, narrow):
    """Load 96 rows of K or V by TMA, asynchronously."""
    mbarrier.expect(barrier, 3 * BOXES * desc.block_type.nbytes)
    for box in gl.static_range(BOXES):
        halves = copies_in(wide.index(box), desc, 2)
        async_load(desc, [batch, head, row, box * BOX], barrier, halves.index(0))
        async_load(desc, [batch, head, row + NARROW, box * BOX], barrier, halves.index(1))
        copy(desc, [batch, head, row + WIDE, box * BOX], barrier, narrow.index(box))


@gluon.jit
def copy_queries(desc, row_desc, batch, head, row, padded_row, barrier, boxes, slot, numbers):
    """Load a tile of Q or dO, and one number per query, by TMA, asynchronously."""
    mbarrier.expect(barrier, BOXES * desc.block_type.nbytes + row_desc.block_type.nbytes)
    for box in gl.static_range(BOXES):
        copy(desc, [batch, head, row, box * BOX], barrier, boxes.index(slot * BOXES + box))
    copy(row_desc, [padded_row], barrier, numbers.index(slot))
