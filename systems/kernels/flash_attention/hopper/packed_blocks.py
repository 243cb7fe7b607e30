"""List of the blocks of packed sequences, which the Hopper kernels take as work items.

The lengths of packed sequences are known only on the GPU. A list of all blocks, made by a kernel of
its own, lets the programs of the attention kernels share the work evenly, and start with the blocks
that take the longest.
"""

# Kernel arguments have Triton's own types, which mypy does not know.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl

from systems.kernels.flash_attention.triton.mask_ops import sequence_rows

CHUNK = 64  # number of blocks, and of sequences, that a program of the kernel compares at a time
SEQUENCES = tl.constexpr(128)  # number of sequences that `padded_tile` compares at a time


@triton.jit
def packed_block(blocks, item, n_heads, group):
    """Return the sequence, the block and the head of a work item, heads in groups of `group`.

    `blocks` is the list of `packed_blocks_kernel`. `item` is below n_heads times the number of
    blocks. For groups, see `tile_ops.schedule`.
    """
    n_blocks = tl.load(blocks)
    first = item // (n_blocks * group) * group
    within = item % (n_blocks * group)
    size = tl.minimum(group, n_heads - first)  # the last group may have fewer heads
    entry = blocks + 2 * (within // size + 1)
    return tl.load(entry), tl.load(entry + 1), first + within % size


@triton.jit
def padded_start(starts, sequence, total, BLOCK: tl.constexpr):
    """Return the first row of a sequence if each sequence gets whole blocks of rows, at least one.

    The results of consecutive sequences differ by at least the length of the first of them, rounded
    up to whole blocks. The rows of all n sequences need no more than (total + n * BLOCK) rows.
    `starts` are the boundaries of the sequences, int32 (n_sequences + 1,). `total` is the number of
    rows of the tensor without padding. `sequence` may be several indices.
    """
    start = tl.minimum(tl.maximum(tl.load(starts + sequence), 0), total)
    return (start + sequence * BLOCK) // BLOCK * BLOCK


@triton.jit
def padded_tile(starts, tile, n_sequences, total, BLOCK: tl.constexpr, PACKED: tl.constexpr):
    """Return to which rows of which sequence a block of padded rows belongs.

    `tile` is the index of the block. Without PACKED, all rows belong to one sequence.

    Returns:
        start: first row of the sequence in the tensor without padding.
        first: first row of the block, counted from the start of the sequence.
        n_rows: number of rows of the sequence. Rows from n_rows on are padding.
    """
    start, first, n_rows = tl.full((), 0, tl.int32), tile * BLOCK, total
    if PACKED:
        n_before = 0  # number of sequences that start at this block or before it
        for other in range(0, n_sequences, SEQUENCES):
            sequence = other + tl.arange(0, SEQUENCES)
            there = sequence < n_sequences
            begin = tl.load(starts + sequence, mask=there, other=0)
            begin = (tl.minimum(tl.maximum(begin, 0), total) + sequence * BLOCK) // BLOCK
            n_before += tl.sum((there & (begin <= tile)).to(tl.int32))
        sequence = tl.maximum(n_before - 1, 0)
        start, n_rows = sequence_rows(starts, sequence, 1, total, True)
        first = tile * BLOCK - padded_start(starts, sequence, total, BLOCK)
        first = tl.where(first < 0, n_rows, first)  # rows before the first sequence are padding
    return start, first, n_rows


@triton.jit(do_not_specialize=["n_sequences", "total", "most"])
def packed_blocks_kernel(
    starts, blocks, n_sequences, total, most,
    BLOCK: tl.constexpr, FROM_END: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """List the blocks of all sequences, in the order in which the attention kernels process them.

    The blocks of a sequence are numbered from its start, or with FROM_END from its end. The blocks
    with the largest numbers come first. Under a causal mask, this is the order of decreasing work
    for blocks of queries, and with FROM_END for blocks of keys.

    Grid: (n_sequences, CHUNKS), where CHUNKS * CHUNK is at least the number of blocks of each
    sequence. Blocks past this number are left out.

    Args:
        starts: boundaries of the sequences, int32 (n_sequences + 1,).
        blocks: int32 (2 * (most + 1),), output. The first element is the number of blocks. After
            two elements, each block has two: its sequence, and its index in it, counted from the
            start.
        most: upper bound of the number of blocks. More, of overlapping sequences, are left out.
        CHUNK: number of blocks, and of sequences, that are compared at a time.
    """
    sequence = tl.program_id(0)
    longest = tl.num_programs(1) * CHUNK
    j = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    place = tl.zeros((CHUNK,), tl.int32)
    n_blocks = 0
    for first in range(0, n_sequences, CHUNK):
        other = first + tl.arange(0, CHUNK)
        there = other < n_sequences
        start = tl.load(starts + other, mask=there, other=0)
        start = tl.minimum(tl.maximum(start, 0), total)
        end = tl.load(starts + other + 1, mask=there, other=0)
        end = tl.minimum(tl.maximum(end, start), total)
        n_others = tl.minimum(tl.cdiv(end - start, BLOCK), longest)
        n_blocks += tl.sum(n_others)
        later = n_others[None, :] - 1 - j[:, None]  # blocks of the other sequence with a larger j
        place += tl.sum(tl.maximum(later, 0), 1)
        place += tl.sum(((later >= 0) & (other < sequence)[None, :]).to(tl.int32), 1)
    _, n_rows = sequence_rows(starts, sequence, 1, total, True)
    n_own = tl.minimum(tl.cdiv(n_rows, BLOCK), longest)
    block = n_own - 1 - j if FROM_END else j
    entry = blocks + 2 * (place + 1)
    there = (j < n_own) & (place < most)
    tl.store(entry, tl.zeros((CHUNK,), tl.int32) + sequence, mask=there)
    tl.store(entry + 1, block, mask=there)
    if (sequence == 0) & (tl.program_id(1) == 0):
        tl.store(blocks, tl.minimum(n_blocks, most))
