"""Warp-specialized backward pass of FlashAttention for Hopper and head_dim 64, in Gluon.

The kernel follows algorithm 2 of FlashAttention-2 (Dao 2023), with five matmuls per tile. It is
persistent, with one program per multiprocessor. A program processes work items (see the module
`backward.work`). Their contributions to dQ are added in float32 in global memory.

The formulas below leave out the scale. lse is the log-sum-exp in base 2, and delta is rowsum(dO *
O) minus the gradient of the log-sum-exp. The warps of a program are:

    producer (1 warp)          loads K and V of a work item, and Q, dO, lse, -delta of each tile
    consumer 0, 1 (4 warps     take 64 keys each and loop over the tiles of queries that see them:
    each)                          S^T = K Q^T                 dP^T = V dO^T
                                   P^T = exp2(S^T - lse)       dV += P^T dO
                                   dS^T = P^T * (dP^T - delta) dK += dS^T Q
                               and store dS^T in shared memory
    dQ (4 warps, the default   computes dQ^T = K^T dS^T for the keys of both consumers. TMA adds it
    partition)                 to global memory while dQ^T of the next tile is computed

The warps pass data to each other through rings of slots in shared memory (see the module
`backward.rings`). "dQ" below is the warpgroup that computes dQ^T:

    ring   content of a slot        written by     read by              slots
    kv     K, V of a work item      producer       consumers, dQ        2
    q      Q, dO, lse, -delta       producer       consumers            2
    ds     dS^T of a tile           consumers      dQ                   2
    dq     dQ^T of a tile           dQ             TMA                  2
    item   index of a work item     producer       consumers, dQ        2

The consumers compute S^T and dP^T instead of S and dP. This gives P^T and dS^T the register layout
of a left operand of WGMMA, so no result of a matmul is transposed before the next matmul. This
choice also avoids a bug of Triton versions before 3.8 (triton-lang/triton #9433).

WGMMA reads operands in registers asynchronously. To keep the compiler from overwriting these
operands too early, the code passes them as dependencies (deps) to the wait for the WGMMA.

In each step, a consumer issues its matmuls in this order:

    dP^T, dV and dK of tile i    S^T of tile i + 1

S^T of the next tile is computed while dS^T is stored in shared memory, so the next step can start
with its exponentials. These overlap dP^T. The consumers wait only for slots, so the exponentials of
one consumer also overlap the matmuls of the other consumer. Compared with S^T and
dP^T at the start of a step, this order is 8% faster for 16 to 32 heads of 16k tokens, and 1% faster
for 2k tokens, on an H100.

The contributions to dQ are added in an order that changes from call to call, so the rounding errors
of dQ also change, unless the kernel is launched with DETERMINISTIC (see `backward.turns`).
"""

# Kernel arguments have Triton's own types, which mypy does not know.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

# No `from __future__ import annotations`: an aggregate needs the types of its fields, not strings.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.core import _aggregate as aggregate

from systems.kernels.flash_attention.hopper.backward.rings import (
    add_dq,
    allocate,
    barriers,
    load_item,
    row_of,
)
from systems.kernels.flash_attention.hopper.backward.scores import (
    probabilities,
    times,
)
from systems.kernels.flash_attention.hopper.backward.sums import (
    is_last_item,
    sum_of_items,
    sums_of_values,
)
from systems.kernels.flash_attention.hopper.backward.turns import add_in_order, pass_dq
from systems.kernels.flash_attention.hopper.backward.work import (
    BLOCK_Q,
    HALF_K,
    BackwardProblem,
)
from systems.kernels.flash_attention.hopper.registers import in_elements, store_rows

HEAD_DIM = gl.constexpr(64)
KV_SLOTS = gl.constexpr(2)
Q_SLOTS = gl.constexpr(2)
DS_SLOTS = gl.constexpr(2)
DQ_SLOTS = gl.constexpr(2)
# Registers per thread (setmaxnreg). The registers per thread of the four warpgroups add up to 512,
# see `tiles.HopperTile`: 2 * 208 + 24 leave 72 for the dQ warpgroup.
CONSUMER_REGISTERS = gl.constexpr(208)
PRODUCER_REGISTERS = gl.constexpr(24)


@aggregate
class Dealer:
    """Queue from which each program takes its next work item while the kernel runs.

    The first work item of a program has the program id as its index. When the producer warp has
    issued the loads of a work item, it takes the next work item from a counter in global memory. It
    publishes the index of this work item to the other warpgroups through shared memory.
    """

    counter: gl.tensor  # int32 (1,) in global memory
    item: gl.shared_memory_descriptor  # int32 (2, 1), a ring of two indices
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, counter, item, full, empty):
        self.counter = counter
        self.item = item
        self.full = full
        self.empty = empty

    @gluon.jit
    def take(self, turn):
        """Take the next work item, publish its index to the other warpgroups, and return the index.

        An index of n_items or more means that no work item is left. Only the producer warp calls
        this method. `turn` counts earlier calls in this program.
        """
        item = gl.atomic_add(self.counter, 1, sem="relaxed") + gl.num_programs(0)
        slot = turn % 2
        mbarrier.wait(self.empty.index(slot), (turn // 2) & 1 ^ 1)
        layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
        self.item.index(slot).store(gl.full([1], item, gl.int32, layout))
        mbarrier.arrive(self.full.index(slot), count=1)
        return item

    @gluon.jit
    def next(self, turn, WARPS: gl.constexpr = 4):
        """Return the index of the next work item, after waiting until it is published.

        Each call of `take` publishes one index. Call number `turn` of this method, counted from 0,
        returns the index of call number `turn` of `take`. All but the producer call this method,
        `WARPS` warps together.
        """
        slot = turn % 2
        mbarrier.wait(self.full.index(slot), (turn // 2) & 1)
        item = self.item.index(slot).load(gl.BlockedLayout([1], [32], [WARPS], [0]))
        mbarrier.arrive(self.empty.index(slot), count=1)
        return gl.max(item, 0)


@gluon.jit
def _produce(shared, problem, dealer, q_desc, do_desc, k_desc, v_desc, lse_desc, minus_delta_desc):
    turn = 0
    n = 0
    item = gl.program_id(0)
    while item < problem.n_items:
        n = load_item(
            shared, problem, q_desc, do_desc, k_desc, v_desc, lse_desc, minus_delta_desc,
            item, turn, n, KV_SLOTS, Q_SLOTS,
        )  # fmt: skip
        item = dealer.take(turn)
        turn += 1


@gluon.jit
def _sum_dq(shared, problem, dealer, dq_desc):
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_Q, 16])
    zeros = gl.zeros([HEAD_DIM, BLOCK_Q], gl.float32, layout)
    turn = 0
    n = 0
    item = gl.program_id(0)
    while item < problem.n_items:
        located = problem.locate(item)
        kv_slot = turn % KV_SLOTS
        mbarrier.wait(shared.kv_full.index(2 * kv_slot), (turn // KV_SLOTS) & 1)
        mbarrier.wait(shared.kv_full.index(2 * kv_slot + 1), (turn // KV_SLOTS) & 1)
        k0 = shared.k.index(2 * kv_slot).permute((1, 0))
        k1 = shared.k.index(2 * kv_slot + 1).permute((1, 0))
        for which in range(problem.Q_PER_ITEM):
            q_head = located.head * problem.Q_PER_ITEM + which
            before = q_head * problem.n_padded + located.padded_query_start
            row = (before // BLOCK_Q + located.first_tile) * HEAD_DIM
            for i in range(located.n_tiles):
                slot = n % DS_SLOTS
                phase = (n // DS_SLOTS) & 1
                ds0 = shared.ds.index(2 * slot)
                ds1 = shared.ds.index(2 * slot + 1)
                mbarrier.wait(shared.ds_full.index(2 * slot), phase)
                dq = warpgroup_mma(k0, ds0, zeros, use_acc=False, is_async=True)
                mbarrier.wait(shared.ds_full.index(2 * slot + 1), phase)
                dq = warpgroup_mma(k1, ds1, dq, is_async=True)
                dq = warpgroup_mma_wait(0, deps=[dq])
                mbarrier.arrive(shared.ds_empty.index(slot), count=1)
                if problem.DETERMINISTIC:
                    pass_dq(shared, dq, n, n % DQ_SLOTS, DQ_SLOTS)
                else:
                    dq_tile = shared.dq.index(n % DQ_SLOTS)
                    # Wait until TMA has read the dQ^T that was stored here DQ_SLOTS steps ago.
                    tma.store_wait(pendings=DQ_SLOTS - 1)
                    if problem.BOUNDED:
                        row = (before // BLOCK_Q + located.tile(i)) * HEAD_DIM
                    add_dq(dq_desc, dq, row, dq_tile)
                row += HEAD_DIM
                n += 1
        mbarrier.arrive(shared.kv_empty.index(kv_slot), count=1)
        item = dealer.next(turn)
        turn += 1
    tma.store_wait(pendings=0)


@gluon.jit
def _add(shared, problem, dealer, dq_desc):
    turn = 0
    n = 0
    item = gl.program_id(0)
    while item < problem.n_items:
        n = add_in_order(shared, problem, problem.locate(item), dq_desc, n, DQ_SLOTS, 1)
        item = dealer.next(turn, 1)
        turn += 1


@gluon.jit
def _scores(shared, n, k, layout: gl.constexpr, pred=True):
    """Issue the WGMMA that computes S^T of a tile, when the tile is in shared memory.

    The caller must wait for the WGMMA before it uses the result. If not `pred`, there is no tile:
    the function does not wait for it, and the result must not be used. `n` counts the earlier steps
    of this program over all its work items, and `k` has the 64 keys of this consumer in registers.
    """
    slot = n % Q_SLOTS
    mbarrier.wait(shared.q_full.index(slot), (n // Q_SLOTS) & 1, pred=pred)
    return times(k, shared.q.index(slot), layout, HEAD_DIM)


@gluon.jit
def _step(
    shared, problem, item, n, is_last, s, k, v, dk, dv, first_key, first_query,
    HALF: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Process one tile of 64 queries: add its contribution to dk and dv, and store its dS^T.

    dS^T is stored in shared memory, where the warpgroup that computes dQ^T reads it.

    `s` is S^T of the tile. `k`, `v`, `dk` and `dv` are the 64 keys and values of this consumer and
    their gradients, summed over earlier tiles, float32 (64, 64), all in registers. dk is not yet
    multiplied by the scale. `n` counts the earlier steps of this program over all its work items. A
    tile is MASKED if some of its queries do not see all keys, or if keys are past the end. Returns
    the new dk and dv, and S^T of the next tile, which is undefined if is_last.
    """
    dtype: gl.constexpr = shared.q.dtype
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_Q, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, dk.type.layout, 2)
    q_slot = n % Q_SLOTS
    ds_slot = n % DS_SLOTS
    q = shared.q.index(q_slot)
    do = shared.do.index(q_slot)

    dp = times(v, do, layout, HEAD_DIM)
    lse = row_of(shared.lse.index(q_slot), layout)
    minus_delta = row_of(shared.minus_delta.index(q_slot), layout)
    # dP^T is in flight
    p, weighted = probabilities(s, lse, problem, item, first_key, first_query, MASKED)
    p16 = gl.convert_layout(p.to(dtype), operand)
    dv = warpgroup_mma(p16, do, dv, is_async=True)
    dp = warpgroup_mma_wait(1, deps=[dp])  # dV stays in flight
    ds = (weighted * (dp + minus_delta[None, :])).to(dtype)
    ds16 = gl.convert_layout(ds, operand)
    dk = warpgroup_mma(ds16, q, dk, is_async=True)
    s = _scores(shared, n + 1, k, layout, pred=not is_last)
    # Pass dS^T to the dQ warpgroup while dV, dK and S^T are in flight. fence_async_shared makes the
    # stores visible to the WGMMA that reads them.
    mbarrier.wait(shared.ds_empty.index(ds_slot), (n // DS_SLOTS) & 1 ^ 1)
    shared.ds.index(2 * ds_slot + HALF).store(ds)
    fence_async_shared()
    mbarrier.arrive(shared.ds_full.index(2 * ds_slot + HALF), count=1)
    dv, p16, dk, ds16 = warpgroup_mma_wait(1, deps=[dv, p16, dk, ds16])  # S^T stays in flight
    mbarrier.arrive(shared.q_empty.index(q_slot), count=1)
    # ptxas does not allow S^T to stay in flight at the end of an iteration of a loop.
    s = warpgroup_mma_wait(0, deps=[s])
    return dk, dv, s


@gluon.jit
def _consume(
    shared, problem, dealer, sums, dkey, dvalue, dk_batch, dk_head, dk_row,
    dv_batch, dv_head, dv_row, scale, HALF: gl.constexpr, SUMMED: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_Q, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, s_layout, 2)
    turn = 0
    n = 0
    index = gl.program_id(0)
    while index < problem.n_items:
        item = problem.locate(index)
        first_key = item.first_key + HALF * HALF_K
        kv_slot = turn % KV_SLOTS
        place = 2 * kv_slot + HALF
        mbarrier.wait(shared.kv_full.index(place), (turn // KV_SLOTS) & 1)
        k = shared.k.index(place).load(operand)
        v = shared.v.index(place).load(operand)
        dk = gl.zeros([HALF_K, HEAD_DIM], gl.float32, layout)
        dv = gl.zeros([HALF_K, HEAD_DIM], gl.float32, layout)
        end = n + problem.Q_PER_ITEM * item.n_tiles  # first step of the next work item
        scores = warpgroup_mma_wait(0, deps=[_scores(shared, n, k, s_layout)])
        for which in range(problem.Q_PER_ITEM):
            for i in range(item.n_first()):
                step = n + which * item.n_tiles + i
                dk, dv, scores = _step(
                    shared, problem, item, step, step + 1 == end, scores, k, v, dk, dv, first_key,
                    item.tile(i) * BLOCK_Q, HALF, True,
                )  # fmt: skip
            for i in range(item.n_first(), item.n_tiles):
                step = n + which * item.n_tiles + i
                dk, dv, scores = _step(
                    shared, problem, item, step, step + 1 == end, scores, k, v, dk, dv, first_key,
                    item.tile(i) * BLOCK_Q, HALF, False,
                )  # fmt: skip
        n = end
        mbarrier.arrive(shared.kv_empty.index(kv_slot), count=1)
        batch = item.head // problem.n_heads
        head = item.head % problem.n_heads // problem.ITEMS_PER_KV
        dk_base = dkey + batch * in_elements(dk_batch)
        dv_base = dvalue + batch * in_elements(dv_batch)
        dk_base += head * in_elements(dk_head)
        dv_base += head * in_elements(dv_head)
        first_row, n_rows = item.key_start + first_key, item.key_start + item.n_keys
        writes = gl.to_tensor(True)
        if SUMMED:
            dv_sums = sums_of_values(problem, sums, HEAD_DIM)
            sum_of_items(problem, item, first_row, sums, HEAD_DIM, 0, dk, 0, True)
            sum_of_items(problem, item, first_row, dv_sums, HEAD_DIM, 0, dv, 0, True)
            writes = is_last_item(problem, item, first_row, problem.turns, 0)
            if writes:
                dk = sum_of_items(problem, item, first_row, sums, HEAD_DIM, 0, dk, 0, False)
                dv = sum_of_items(problem, item, first_row, dv_sums, HEAD_DIM, 0, dv, 0, False)
        if writes:
            store_rows(dk_base, dk * scale, first_row, n_rows, in_elements(dk_row))
            store_rows(dv_base, dv, first_row, n_rows, in_elements(dv_row))
        index = dealer.next(turn)
        turn += 1


@gluon.jit(
    do_not_specialize=[
        "n_programs", "n_heads", "n_queries", "n_keys", "n_padded", "n_splits", "queries_per_split",
        "group", "n_items", "left", "right", "dk_batch", "dk_head", "dk_row", "dv_batch", "dv_head",
        "dv_row",
    ]
)  # fmt: skip
def backward_kernel(
    q_desc, do_desc, k_desc, v_desc, lse_desc, minus_delta_desc, dq_desc, counter, turns, sums,
    dkey, dvalue, starts_q, starts_k, blocks,
    dk_batch, dk_head, dk_row, dv_batch, dv_head, dv_row,
    n_programs, n_heads, n_queries, n_keys, n_padded, n_splits, queries_per_split, group, n_items,
    left, right, scale, scale_log2e, cap_log2e,
    IS_CAUSAL: gl.constexpr, BOUNDED: gl.constexpr, LOWER_RIGHT: gl.constexpr,
    PACKED: gl.constexpr, SOFTCAP: gl.constexpr, SUMMED: gl.constexpr, Q_PER_KV: gl.constexpr,
    Q_PER_ITEM: gl.constexpr, DETERMINISTIC: gl.constexpr,
):  # fmt: skip
    """Compute dQ, dK and dV for head_dim 64 with persistent, warp-specialized programs.

    Below, `heads` is the number of heads of k and v, and `q_heads` is heads * Q_PER_KV. With packed
    sequences (PACKED), batch is 1, and n_queries and n_keys are the rows of all sequences. All
    masks then apply to the rows of one sequence.

    Grid: (number of programs,), at most n_items; the programs share the work items. Launch with
    num_warps=4, the number of warps of the warpgroup that computes dQ.

    Args:
        q_desc, do_desc: TMA descriptors of Q and dO, (batch, q_heads, n_queries, 64), tiles of 64
            rows.
        k_desc, v_desc: TMA descriptors of K and V, (batch, heads, n_keys, 64), with tiles of 64
            rows.
        lse_desc, minus_delta_desc: TMA descriptors of the outputs log2_lse and minus_delta of
            `prepare_kernel`, float32 (batch * q_heads * n_padded,), with tiles of 64.
        dq_desc: TMA descriptor of float32 (batch * q_heads * n_padded, 64), with tiles of (64, 64).
            It must be zeros. The kernel adds dQ / scale to it, as one transposed tile for every 64
            queries.
        counter: int32 (1,), must be zero. Counts the work items that programs have taken, except
            the first one of each program.
        turns: int32, must be zeros. If DETERMINISTIC, (batch * q_heads * n_keys,), counters of
            `backward.turns`. If SUMMED, (batch * heads * n_keys * 2,), those of `backward.sums`.
        sums: float32, must be zeros, see `backward.sums`. Used only if SUMMED.
        dkey, dvalue: dK and dV, (batch, heads, n_keys, 64), outputs.
        starts_q, starts_k: boundaries of packed sequences, int32 (n_sequences + 1,).
        blocks: the blocks of 128 keys of packed sequences, as listed by
            `packed_blocks.packed_blocks_kernel`. Like starts_q and starts_k, read only if PACKED.
        dk_batch, dk_head, dk_row: strides of dkey, in units of 8 elements.
        dv_batch, dv_head, dv_row: strides of dvalue, in units of 8 elements.
        n_programs: batch * q_heads / Q_PER_ITEM.
        n_heads: q_heads / Q_PER_ITEM.
        n_padded: number of rows per head of lse_desc, minus_delta_desc and dq_desc: n_queries
            rounded up to a multiple of 64. With packed sequences, it has room for the sequences as
            `packed_blocks.padded_start` places them.
        queries_per_split: number of queries in each split except the last, a multiple of 64.
        group: number of heads whose work items run at about the same time, so that their data stay
            in the L2 cache (see `tile_ops.schedule`).
        n_items: splits * n_programs * blocks of 128 keys. Not used if PACKED.
        left, right: number of keys before and after its position that a query sees. Used only if
            BOUNDED, and right only if not IS_CAUSAL.
        scale_log2e: scale times log2(e). With SOFTCAP, this times 2 / softcap.
        cap_log2e: softcap times log2(e). Used only if SOFTCAP.
        BOUNDED: whether the mask is given by left and right, and by LOWER_RIGHT. Otherwise, query
            i has the position of key i. True if PACKED is True.
        LOWER_RIGHT: whether the last query has the position of the last key.
        PACKED: whether rows belong to packed sequences. There must be one split.
        SUMMED: whether several work items have the same keys, because there are several splits, or
            Q_PER_ITEM is below Q_PER_KV.
        Q_PER_KV: number of consecutive heads of q that have one head of k and v in common.
        Q_PER_ITEM: number of them that a work item processes, a divisor of Q_PER_KV.
        DETERMINISTIC: whether work items add to dQ in a fixed order, see `backward.turns`. There
            must be one split, and Q_PER_ITEM must be Q_PER_KV.
    """
    if PACKED:
        n_items = gl.load(blocks) * n_heads
    problem = BackwardProblem(
        n_programs, n_heads, n_queries, n_keys, n_padded, n_splits, queries_per_split, group,
        n_items, left, right, starts_q, starts_k, blocks, scale_log2e, cap_log2e, turns, IS_CAUSAL,
        BOUNDED, LOWER_RIGHT, PACKED, SOFTCAP, Q_PER_KV, Q_PER_ITEM, DETERMINISTIC, 2 * HALF_K,
    )  # fmt: skip
    shared = allocate(
        q_desc, k_desc, lse_desc, dq_desc, KV_SLOTS, Q_SLOTS, DS_SLOTS, DQ_SLOTS, 3, 1,
        DETERMINISTIC,
    )  # fmt: skip
    number: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    readers: gl.constexpr = 4 if DETERMINISTIC else 3
    dealer = Dealer(
        counter, gl.allocate_shared_memory(gl.int32, [2, 1], number), barriers(2, 1),
        barriers(2, readers),
    )  # fmt: skip
    fence_async_shared()
    if DETERMINISTIC:
        gl.warp_specialize(
            [
                (_sum_dq, (shared, problem, dealer, dq_desc)),
                (_consume, (shared, problem, dealer, sums, dkey, dvalue,
                            dk_batch, dk_head, dk_row,
                            dv_batch, dv_head, dv_row, scale, gl.constexpr(0), SUMMED)),
                (_consume, (shared, problem, dealer, sums, dkey, dvalue,
                            dk_batch, dk_head, dk_row,
                            dv_batch, dv_head, dv_row, scale, gl.constexpr(1), SUMMED)),
                (_produce, (shared, problem, dealer,
                            q_desc, do_desc, k_desc, v_desc, lse_desc, minus_delta_desc)),
                (_add, (shared, problem, dealer, dq_desc)),
            ],
            [4, 4, 1, 1],
            [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_sum_dq, (shared, problem, dealer, dq_desc)),
                (_consume, (shared, problem, dealer, sums, dkey, dvalue,
                            dk_batch, dk_head, dk_row,
                            dv_batch, dv_head, dv_row, scale, gl.constexpr(0), SUMMED)),
                (_consume, (shared, problem, dealer, sums, dkey, dvalue,
                            dk_batch, dk_head, dk_row,
                            dv_batch, dv_head, dv_row, scale, gl.constexpr(1), SUMMED)),
                (_produce, (shared, problem, dealer,
                            q_desc, do_desc, k_desc, v_desc, lse_desc, minus_delta_desc)),
            ],
            [4, 4, 1], [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
