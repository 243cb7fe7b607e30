"""Gradients of keys that several work items compute together, in the Hopper backward kernels.

If several work items have the same keys, each of them adds its dK and dV to float32 sums in global
memory. Each work item then counts itself. The last one of its keys reads the sums and writes the
gradients in their dtype. No work item waits for another one.

The sums and the counters must be zeros. The sums of dK are float32 (batch * heads of k, rows,
COLUMNS), contiguous, and those of dV follow them, with their own number of columns. Without packed
sequences, rows are those of whole blocks of keys. The order of the elements within a tile is that
in which the threads have them, see `sum_of_items`.
"""

# Kernel arguments have Triton's own types, which mypy does not know.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from systems.kernels.flash_attention.hopper.gluon_names import barrier


@gluon.jit
def sum_of_items(
    problem, item, key_row, sums, columns, first_column, value, KEY_AXIS: gl.constexpr,
    ADDS: gl.constexpr,
):  # fmt: skip
    """Add a tile of dK or dV to the sums, or read it from there.

    With ADDS, `value` is added and returned. Otherwise, the sum of all work items is returned, and
    only the shape and the layout of `value` matter. Only the last work item may read, see
    `is_last_item`.

    A thread adds 16 bytes at a time. Of each 16 adjacent elements of the last axis of a tile, it
    has two pairs, such as 0, 1, 8 and 9. The sums have them next to each other. If the last axis is
    that of the keys, a tile has its columns one after another, and not its keys.

    Args:
        key_row: row of the tensor k that has the first key of the tile.
        sums: address of the sums of dK or of dV.
        columns: number of columns of a row of these sums.
        first_column: first column of the tile.
        value: float32 (keys, columns of the tile), or the opposite if KEY_AXIS is 1. It is the
            result of a WGMMA. PACKED must be False if KEY_AXIS is 1.
    """
    given: gl.constexpr = value.type.layout
    layout: gl.constexpr = _four_at_a_time(value.shape[1])
    i = gl.arange(0, value.shape[0], gl.SliceLayout(1, layout))
    j = gl.arange(0, value.shape[1], gl.SliceLayout(0, layout))
    before = (item.head // problem.ITEMS_PER_KV).to(gl.int64) * _n_rows(problem)
    if KEY_AXIS == 0:
        # Rows past the last key may belong to the next packed sequence.
        there = (key_row + i < item.key_start + item.n_keys)[:, None]
        place = ((before + key_row + i) * columns + first_column)[:, None] + j[None, :]
    else:
        there = (j >= 0)[None, :]  # all: a tile has room past the last key
        first = (before + key_row) * columns + first_column * value.shape[1]
        place = first + (i * value.shape[1])[:, None] + j[None, :]
    if ADDS:
        swapped = gl.convert_layout(_swapped(value, 2, 4), layout, assert_trivial=True)
        gl.atomic_add(sums + place, swapped, mask=there, sem="relaxed")
    else:
        swapped = gl.load(sums + place, mask=there, other=0.0)
        value = gl.convert_layout(_swapped(swapped, 4, 2), given, assert_trivial=True)
    return value


@gluon.jit
def _swapped(value, FIRST: gl.constexpr, SECOND: gl.constexpr):
    """Transpose (FIRST, SECOND) pairs of adjacent elements, in each 16 elements of a row."""
    rows: gl.constexpr = value.shape[0]
    columns: gl.constexpr = value.shape[1]
    pairs = value.reshape([rows, columns // 16, FIRST, SECOND, 2])
    return pairs.permute((0, 1, 3, 2, 4)).reshape([rows, columns])


@gluon.constexpr_function
def _four_at_a_time(columns):
    """Return the register layout of the result of a WGMMA, (64, columns), after `_swapped`."""
    blocks = [[0, 16 << i] for i in range((columns // 16).bit_length() - 1)]
    registers = [[0, 1], [0, 2], [8, 0], *blocks]
    lanes = [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [64, columns])


@gluon.jit
def _n_rows(problem):
    """Return the number of rows of the sums of a head."""
    rows = problem.n_keys
    if not problem.PACKED:
        rows = gl.cdiv(rows, problem.BLOCK_K) * problem.BLOCK_K
    return rows


@gluon.jit
def sums_of_values(problem, sums, columns):
    """Return the address of the sums of dV. Those of dK start at `sums`, with `columns` columns."""
    n_heads = problem.n_programs // problem.ITEMS_PER_KV
    return sums + n_heads.to(gl.int64) * _n_rows(problem) * columns


@gluon.jit
def is_last_item(problem, item, key_row, counters, PART: gl.constexpr):
    """Count a work item, and return whether it is the last one of its keys.

    Each of two warpgroups calls this function for its own part of dK and dV: for 64 of the keys, or
    as PART 0 and 1 for some columns, or one of the tensors, of the same keys. It must have added
    its part before. For keys past the end, the result is False.

    `counters` are int32 (batch * heads of k * n_keys * 2,): two for each row, because packed
    sequences may start at any row. Only those of the first key of a part are used.
    """
    has_keys = key_row < item.key_start + item.n_keys
    place = (item.head // problem.ITEMS_PER_KV).to(gl.int64) * problem.n_keys + key_row
    # One thread counts for the warpgroup. The barrier orders the additions of the other threads
    # before its release, and the broadcast of its count orders their loads after its acquire.
    barrier()
    count = gl.atomic_add(counters + 2 * place + PART, 1, mask=has_keys, sem="acq_rel")
    return has_keys & (count + 1 == problem.ITEMS_PER_KV * problem.n_splits)
