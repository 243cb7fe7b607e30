"""Gradients of keys that several work items compute together, in the Hopper backward kernels.

If several work items have the same keys, each of them adds its dK and dV to float32 sums in global
memory. Each work item then counts itself. The last one of its keys reads the sums and writes the
gradients in their dtype. No work item waits for another one.

The sums and the counters must be zeros. The sums of dK are float32 (batch * heads of k, n_keys,
COLUMNS), contiguous, and those of dV follow them, with their own number of columns.
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
    problem, item, key_row, sums, columns, value, KEY_AXIS: gl.constexpr, ADDS: gl.constexpr
):
    """Add a part of dK or dV to the sums, or read it from there.

    With ADDS, `value` is added and returned. Otherwise, the sum of all work items is returned, and
    only the shape and the layout of `value` matter. Only the last work item may read, see
    `is_last_item`.

    Args:
        key_row: row of the tensor k that has the first key of the tile. Rows past the last key of
            the sequence are neither added nor read.
        sums: address of the first column of the tile in the sums of dK or of dV.
        columns: number of columns of a row of these sums.
        value: float32 (keys, columns of the tile), or the opposite if KEY_AXIS is 1.
    """
    COLUMN_AXIS: gl.constexpr = 1 - KEY_AXIS
    layout: gl.constexpr = value.type.layout
    row = key_row + gl.arange(0, value.shape[KEY_AXIS], gl.SliceLayout(COLUMN_AXIS, layout))
    column = gl.arange(0, value.shape[COLUMN_AXIS], gl.SliceLayout(KEY_AXIS, layout))
    there = gl.expand_dims(row < item.key_start + item.n_keys, COLUMN_AXIS)
    before = (item.head // problem.ITEMS_PER_KV).to(gl.int64) * problem.n_keys
    offset = gl.expand_dims((before + row) * columns, COLUMN_AXIS)
    pointers = sums + offset + gl.expand_dims(column, KEY_AXIS)
    if ADDS:
        gl.atomic_add(pointers, value, mask=there, sem="relaxed")
    else:
        value = gl.load(pointers, mask=there, other=0.0)
    return value


@gluon.jit
def sums_of_values(problem, sums, columns):
    """Return the address of the sums of dV. Those of dK start at `sums`, with `columns` columns."""
    n_heads = problem.n_programs // problem.ITEMS_PER_KV
    return sums + n_heads.to(gl.int64) * problem.n_keys * columns


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
