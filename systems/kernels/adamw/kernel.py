"""Triton kernels for one AdamW step on many tensors, with the arithmetic of `reference.py`.

`launch.py` launches the kernels. A step takes two launches, whatever the number of parameters, if
all parameters have the same dtypes, the same rounding and the same alignment:

    advance_kernel   increments the step t of each tensor, and computes the scalars of each tensor:
                     values that depend only on t and the hyperparameters
    adamw_kernel     updates the tensors, with one program for each block of elements of a tensor

Both kernels read a table in device memory. A row of the table has the addresses of the parameter,
the gradient and the state of one tensor. So the kernels are not recompiled if the number or the
shapes of tensors change.

adamw_kernel is memory-bound, which determines its design:

- Only the last block of a tensor loads and stores with a mask. The mask depends on the number of
  elements, which the kernel reads from memory. With such a mask, the compiler does not use 16-byte
  accesses.
- Each thread has 16 bytes of the widest dtype. With this number of elements per thread, values of
  all dtypes are distributed over the threads in the same way (they have the same layout). With more
  elements per thread, Triton would use another layout for float32 stores and convert every value
  through shared memory. Tests check that there is no such conversion.
- Multiplications and additions are not fused. With float32 state, division and square root are
  correctly rounded. So results are bitwise equal to the reference. This takes 55 instructions per
  element. An H200 has time for about 190 instructions while it moves the 28 bytes of an element.
- With bfloat16 state, an element has 14 bytes, which leaves time for half as many instructions, and
  the random bits take some of them. So division and square root are approximate, with errors of up
  to 2 units in the last place of float32. That is 2^-15 units in the last place of bfloat16.
"""

# Arguments of Triton kernels have no type annotations.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl

from systems.kernels.adamw import reference

# Columns of the table (int64). All are addresses except NUMEL and STREAM.
PARAM = tl.constexpr(0)
GRAD = tl.constexpr(1)
EXP_AVG = tl.constexpr(2)
EXP_AVG_SQ = tl.constexpr(3)
MASTER = tl.constexpr(4)
STEP = tl.constexpr(5)  # address of an int64
HYPER = tl.constexpr(6)  # address of float64 (5,): lr, beta1, beta2, eps, weight_decay
NUMEL = tl.constexpr(7)  # number of elements of the tensor
STREAM = tl.constexpr(8)  # random stream of the tensor, reference.stream(seed, index)
COLUMNS = tl.constexpr(9)  # number of columns

# Columns of the scalars (float32), which depend on the step t and the hyperparameters.
DECAY = tl.constexpr(0)  # 1 - lr weight_decay
STEP_SIZE = tl.constexpr(1)  # lr / (1 - beta1^t)
RSQRT_CORRECTION = tl.constexpr(2)  # 1 / sqrt(1 - beta2^t)
ONE_MINUS_BETA1 = tl.constexpr(3)
BETA2 = tl.constexpr(4)
ONE_MINUS_BETA2 = tl.constexpr(5)
EPS = tl.constexpr(6)
SCALARS = tl.constexpr(8)  # number of columns: 7 and one unused, so that a row is 32 bytes

ROWS = 128  # number of rows of the table per program of advance_kernel

MIX_1 = tl.constexpr(reference.MIX_1)
MIX_2 = tl.constexpr(reference.MIX_2)
GOLDEN = tl.constexpr(reference.GOLDEN)


@triton.jit
def mix(word):
    """Return the same 32-bit hash of a uint32 word as `reference.mix`."""
    word = (word ^ (word >> 16)) * tl.full((), MIX_1, tl.uint32)
    word = (word ^ (word >> 15)) * tl.full((), MIX_2, tl.uint32)
    return word ^ (word >> 16)


@triton.jit
def _power(base, exponent):
    """Return base^exponent in float64 for 0 <= exponent < 2^31, by squaring."""
    result = base * 0 + 1
    for _ in range(31):
        result = tl.where(exponent & 1 == 1, result * base, result)
        base = base * base
        exponent = exponent >> 1
    return result


@triton.jit(do_not_specialize=["n_rows"])
def advance_kernel(table, scalars, keys, n_rows, ROWS: tl.constexpr):
    """Increment the step t of each tensor, and compute its scalars and its random key for step t.

    The scalars of a tensor are the values in the update formula that depend only on t and the
    hyperparameters. They are computed in float64 and rounded to float32. adamw_kernel reads the
    scalars and the keys. Grid: (ceil(n_rows / ROWS),).

    Args:
        table: int64 (n_rows, COLUMNS). Each row has the addresses and the number of elements of one
            tensor. The constants above (PARAM, GRAD, ...) are the columns.
        scalars: output, float32 (n_rows, SCALARS). The constants above (DECAY, ...) are the
            columns.
        keys: output, uint32 (n_rows,); reference.key(seed, index, t).
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = row < n_rows
    entry = table + row * COLUMNS
    step = tl.load(entry + STEP, mask=there, other=0).to(tl.pointer_type(tl.int64))
    hyper = tl.load(entry + HYPER, mask=there, other=0).to(tl.pointer_type(tl.float64))
    stream = tl.load(entry + STREAM, mask=there, other=0).to(tl.uint32)

    t = tl.load(step, mask=there, other=0) + 1
    tl.store(step, t, mask=there)
    tl.store(keys + row, mix(stream + t.to(tl.uint32)), mask=there)

    lr = tl.load(hyper, mask=there, other=0.0)
    beta1 = tl.load(hyper + 1, mask=there, other=0.0)
    beta2 = tl.load(hyper + 2, mask=there, other=0.0)
    eps = tl.load(hyper + 3, mask=there, other=0.0)
    weight_decay = tl.load(hyper + 4, mask=there, other=0.0)
    out = scalars + row * SCALARS
    step_size = lr / (1 - _power(beta1, t))
    rsqrt_correction = 1 / tl.sqrt(1 - _power(beta2, t))
    tl.store(out + DECAY, (1 - lr * weight_decay).to(tl.float32), mask=there)
    tl.store(out + STEP_SIZE, step_size.to(tl.float32), mask=there)
    tl.store(out + RSQRT_CORRECTION, rsqrt_correction.to(tl.float32), mask=there)
    tl.store(out + ONE_MINUS_BETA1, (1 - beta1).to(tl.float32), mask=there)
    tl.store(out + BETA2, beta2.to(tl.float32), mask=there)
    tl.store(out + ONE_MINUS_BETA2, (1 - beta2).to(tl.float32), mask=there)
    tl.store(out + EPS, eps.to(tl.float32), mask=there)


@triton.jit
def _pointer(entry, column, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = tl.load(entry + column).to(tl.pointer_type(dtype))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _round(value, bits, dtype: tl.constexpr, STOCHASTIC: tl.constexpr):
    """Round a float32 value to dtype.

    Rounding is to nearest, except if STOCHASTIC is true and dtype is bfloat16. In that case, it is
    the stochastic rounding of `reference.round_stochastically`. The random numbers `bits` are
    uint32, uniform in [0, 2^16), with the shape of `value`, which is float32.
    """
    if STOCHASTIC and dtype == tl.bfloat16:
        word = value.to(tl.uint32, bitcast=True) + bits
        # Without this, the addition could carry into the sign bit of a NaN.
        word = tl.where(value == value, word, 0x7FFFFFFF)
        rounded = (word >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        rounded = value.to(dtype)
    return rounded


@triton.jit
def _update(
    param, grad, exp_avg, exp_avg_sq, master,  # pointers to the elements of the block
    mask,  # None for a full block
    scalars,  # pointer to the row of scalars of the tensor
    word,  # uint32 of random bits for each element
    PARAM_DTYPE: tl.constexpr, STATE_DTYPE: tl.constexpr,
    HAS_MASTER: tl.constexpr, STOCHASTIC: tl.constexpr,
):  # fmt: skip
    decay = tl.load(scalars + DECAY)
    step_size = tl.load(scalars + STEP_SIZE)
    rsqrt_correction = tl.load(scalars + RSQRT_CORRECTION)
    one_minus_beta1 = tl.load(scalars + ONE_MINUS_BETA1)
    beta2 = tl.load(scalars + BETA2)
    one_minus_beta2 = tl.load(scalars + ONE_MINUS_BETA2)
    eps = tl.load(scalars + EPS)

    g = tl.load(grad, mask=mask).to(tl.float32)
    m = tl.load(exp_avg, mask=mask).to(tl.float32)
    v = tl.load(exp_avg_sq, mask=mask).to(tl.float32)
    if HAS_MASTER:
        w = tl.load(master, mask=mask)
    else:
        w = tl.load(param, mask=mask).to(tl.float32)

    m = m + (g - m) * one_minus_beta1
    v = v * beta2 + (g * one_minus_beta2) * g
    w = w * decay
    if STATE_DTYPE == tl.float32:  # noqa: SIM300 (no constant)
        w = w - tl.div_rn(m * step_size, tl.sqrt_rn(v) * rsqrt_correction + eps)
    else:
        w = w - m * step_size / (tl.sqrt(v) * rsqrt_correction + eps)

    if HAS_MASTER:
        tl.store(master, w, mask=mask)
        tl.store(param, w.to(PARAM_DTYPE), mask=mask)
    else:
        tl.store(param, _round(w, word & 0xFFFF, PARAM_DTYPE, STOCHASTIC), mask=mask)
    third = (word * tl.full((), GOLDEN, tl.uint32)) >> 16
    tl.store(exp_avg, _round(m, word >> 16, STATE_DTYPE, STOCHASTIC), mask=mask)
    tl.store(exp_avg_sq, _round(v, third, STATE_DTYPE, STOCHASTIC), mask=mask)


@triton.jit
def adamw_kernel(
    table, scalars, keys, blocks,
    PARAM_DTYPE: tl.constexpr, GRAD_DTYPE: tl.constexpr, STATE_DTYPE: tl.constexpr,
    HAS_MASTER: tl.constexpr, STOCHASTIC: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Update one block of a parameter and of its optimizer state in each program.

    advance_kernel must run first, because it writes the scalars and the keys. It describes them and
    the table, whose rows here are parameters. With ALIGNED, all addresses are multiples of 16.
    STATE_DTYPE is that of both moments. Grid: (programs,).

    Args:
        blocks: int32 (programs, 2): the row of a program's parameter in the table, and the index of
            its block in the parameter.
        STOCHASTIC: whether to round bfloat16 tensors without a float32 copy stochastically.
        BLOCK: elements per block, a power of two, so that the indices of all elements of a block
            have the same upper 32 bits.
    """
    row = tl.load(blocks + 2 * tl.program_id(0)).to(tl.int64)
    block = tl.load(blocks + 2 * tl.program_id(0) + 1).to(tl.int64)
    entry = table + row * COLUMNS
    start = block * BLOCK  # int64, because it exceeds 2^31 in large tensors
    offset = tl.arange(0, BLOCK)

    param = _pointer(entry, PARAM, PARAM_DTYPE, ALIGNED) + start + offset
    grad = _pointer(entry, GRAD, GRAD_DTYPE, ALIGNED) + start + offset
    exp_avg = _pointer(entry, EXP_AVG, STATE_DTYPE, ALIGNED) + start + offset
    exp_avg_sq = _pointer(entry, EXP_AVG_SQ, STATE_DTYPE, ALIGNED) + start + offset
    master = param
    if HAS_MASTER:
        master = _pointer(entry, MASTER, tl.float32, ALIGNED) + start + offset

    word = offset.to(tl.uint32)
    if STOCHASTIC:
        key = tl.load(keys + row) ^ mix((start >> 32).to(tl.uint32))
        word = mix((word + start.to(tl.uint32)) ^ key)

    remaining = tl.load(entry + NUMEL) - start
    if remaining >= BLOCK:
        _update(
            param, grad, exp_avg, exp_avg_sq, master, None, scalars + row * SCALARS, word,
            PARAM_DTYPE, STATE_DTYPE, HAS_MASTER, STOCHASTIC,
        )  # fmt: skip
    else:
        _update(
            param, grad, exp_avg, exp_avg_sq, master, offset < remaining,
            scalars + row * SCALARS, word, PARAM_DTYPE, STATE_DTYPE, HAS_MASTER, STOCHASTIC,
        )  # fmt: skip
