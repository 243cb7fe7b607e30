"""Triton kernels for one AdamW step on many parameters, with the arithmetic of `reference.py`.

A step takes two launches, whatever the number of parameters, if all parameters have the same
dtypes, the same rounding and the same alignment (a variant; each further one takes one more):

    advance_kernel   increments the step t of each parameter, and computes its scalars: values that
                     depend only on t and the hyperparameters
    adamw_kernel     updates parameters and state, with one program for each block of elements

Both kernels read a table in device memory. A row of the table has the addresses of a parameter, its
gradient and its state. So the kernels are not recompiled if the number or the shapes of tensors
change. `Tables` makes the table and launches the kernels.

adamw_kernel is memory-bound, which determines its design:

- Only the last block of a parameter loads and stores with a mask. The mask depends on the number of
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
  to 2 units in the last place of float32, and updates with errors of up to 3. A parameter that is
  rounded to bfloat16 may then differ from the reference by one unit in the last place of bfloat16.
"""

# Arguments of Triton kernels have no type annotations.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from systems.kernels.adamw import reference
from systems.kernels.adamw.reference import Operands
from systems.kernels.device import on

BLOCK_SIZE = 1024  # number of elements per program of adamw_kernel; a power of two
ROWS = 128  # number of rows of the table per program of advance_kernel

# Columns of the table (int64): addresses of the tensors in `reference.Operands`, the number of
# elements of the parameter, and its random stream
PARAM, GRAD, EXP_AVG, EXP_AVG_SQ, MASTER, STEP, HYPER = map(tl.constexpr, range(7))
NUMEL, STREAM, COLUMNS = map(tl.constexpr, range(7, 10))  # the last is the number of columns

# Columns of the scalars (float32), the values in the formula of the update that depend only on the
# step t and the hyperparameters
DECAY, STEP_SIZE, RSQRT_CORRECTION, ONE_MINUS_BETA1 = map(tl.constexpr, range(4))
BETA2, ONE_MINUS_BETA2, EPS = map(tl.constexpr, range(4, 7))
SCALARS = tl.constexpr(8)  # number of columns: 7 and one unused, so that a row is 32 bytes

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
    """Increment the step t of each parameter, and compute its scalars and its random key for it.

    Scalars are computed in float64 and rounded to float32. Grid: (ceil(n_rows / ROWS),).

    Args:
        table: int64 (n_rows, COLUMNS). The constants above (PARAM, GRAD, ...) are the columns.
        scalars: output, float32 (n_rows, SCALARS); DECAY, STEP_SIZE, ... are the columns.
        keys: output, uint32 (n_rows,); the key in `reference.random_bits`.
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
    """Round float32 to dtype, to nearest or as `reference.round_stochastically`."""
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

    advance_kernel describes the table, and runs first to write the scalars and the keys. With
    ALIGNED, all addresses are multiples of 16. Grid: (programs,).

    Args:
        blocks: int32 (programs, 2): the row of a program's parameter in the table, and the index of
            its block in the parameter.
        STOCHASTIC: as `reference.Operands.stochastic`.
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


class Layout(NamedTuple):
    """What `Tables` creates its tensors from. It shows whether existing ones can be used again."""

    rows: list[tuple[int, ...]]  # of the table
    # Variant of each parameter (the arguments of `launch_options`), its number of elements, whether
    # it is contiguous, and the sizes of its gradient and its state. A tensor can be replaced by a
    # smaller one at the same address.
    forms: list[tuple[Any, ...]]


def layout_of(params: list[Operands]) -> Layout:
    """Return the layout of the tables of parameters on one device."""
    rows: list[tuple[int, ...]] = []
    forms: list[tuple[Any, ...]] = []
    # Unpacked, because each access to a field would take time in every step.
    for param, grad, first, second, master, step, hyper, stream, stochastic in params:
        p, g, m, v = param.data_ptr(), grad.data_ptr(), first.data_ptr(), second.data_ptr()
        w, weights = (0, 0) if master is None else (master.data_ptr(), master.nbytes)
        aligned, numel = (p | g | m | v | w) % 16 == 0, param.numel()
        variant = (param.dtype, grad.dtype, first.dtype, master is not None, stochastic, aligned)
        sizes = (numel, param.is_contiguous(), grad.numel(), first.nbytes, second.nbytes, weights)
        forms.append((variant, *sizes))
        rows.append((p, g, m, v, w, step.data_ptr(), hyper.data_ptr(), numel, stream))
    return Layout(rows, forms)


class Tables:
    """Tensors with which the kernels run one AdamW step on many parameters of one device.

    Captured CUDA graphs read them, so new addresses need new Tables.
    """

    table: Tensor  # int64 (rows, COLUMNS)
    scalars: Tensor  # float32 (rows, SCALARS)
    keys: Tensor  # uint32 (rows,)
    updates: list[tuple[Tensor, dict[str, Any]]]  # launches of adamw_kernel: blocks and options

    def __init__(self, layout: Layout, device: torch.device, like: Tables | None = None) -> None:
        """Create the tensors, or share those with `like` that do not depend on addresses."""
        self.layout, self.device = layout, device
        self.table = _upload(torch.tensor(layout.rows, dtype=torch.int64, device="cpu"), device)
        if like is not None and like.layout.forms == layout.forms:
            self.scalars, self.keys, self.updates = like.scalars, like.keys, like.updates
            return
        rows = len(layout.rows)
        self.scalars = torch.empty(rows, SCALARS.value, dtype=torch.float32, device=device)
        self.keys = torch.empty(rows, dtype=torch.uint32, device=device)
        self.updates = []
        for variant in dict.fromkeys(form[0] for form in layout.forms):
            counts = torch.tensor(
                [-(-form[1] // BLOCK_SIZE) * (form[0] == variant) for form in layout.forms],
                device="cpu",
            )
            row = torch.arange(rows, device="cpu").repeat_interleave(counts)
            first = (counts.cumsum(0) - counts).repeat_interleave(counts)
            block = torch.arange(len(row), device="cpu") - first
            if len(row):  # no blocks if all tensors are empty
                blocks = _upload(torch.stack([row, block], dim=1).to(torch.int32), device)
                self.updates.append((blocks, launch_options(*variant)))

    def launch(self, dry: bool = False) -> None:
        """Run one AdamW step on all parameters in the table.

        A dry launch only compiles and loads the kernels. It precedes the capture of a CUDA graph,
        because kernels cannot be loaded during a capture.
        """
        rows = 0 if dry else len(self.layout.rows)
        with on(self.device):
            advance_kernel[(max(1, -(-rows // ROWS)),)](
                self.table, self.scalars, self.keys, rows, ROWS=ROWS, enable_fp_fusion=False
            )
            for blocks, options in self.updates:
                if dry:  # a block after the end of its parameter
                    blocks = torch.tensor([[0, 2**31 - 1]], dtype=torch.int32, device=self.device)
                adamw_kernel[(len(blocks),)](self.table, self.scalars, self.keys, blocks, **options)


def launch_options(
    param: torch.dtype, grad: torch.dtype, state: torch.dtype,
    master: bool, stochastic: bool, aligned: bool,
) -> dict[str, Any]:  # fmt: skip
    """Return the compile-time arguments of adamw_kernel for a variant of parameters, by name."""
    widest = max(4 if master else 0, param.itemsize, grad.itemsize, state.itemsize)
    return {
        "PARAM_DTYPE": _triton_dtype(param),
        "GRAD_DTYPE": _triton_dtype(grad),
        "STATE_DTYPE": _triton_dtype(state),
        "HAS_MASTER": master,
        "STOCHASTIC": stochastic,
        "ALIGNED": aligned,
        "BLOCK": BLOCK_SIZE,
        "num_warps": BLOCK_SIZE * widest // 512,  # 16 bytes for each of the 32 threads of a warp
        "enable_fp_fusion": False,
    }


def _triton_dtype(dtype: torch.dtype) -> Any:
    return getattr(tl, str(dtype).removeprefix("torch."))


def _upload(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy to the device asynchronously, from pinned memory, which torch reuses only afterwards."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
