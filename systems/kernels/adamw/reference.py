"""AdamW of one tensor in plain torch, with stochastic rounding: the reference of the kernel.

Every operation is one correctly rounded float32 operation, in the order of the kernel, so that both
can be bitwise equal.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TypeVar

import torch
from torch import Tensor

Word = TypeVar("Word", int, Tensor)

MASK = 0xFFFFFFFF
# Multipliers of lowbias32, the 32-bit finaliser of least bias that Wellons found by search:
# https://nullprogram.com/blog/2018/07/31/
MIX_1, MIX_2 = 0x7FEB352D, 0x846CA68B
GOLDEN = 0x9E3779B1  # odd and near 2^32 / phi: spreads low bits into high ones (Knuth, TAOCP 6.4)


def mix(word: Word) -> Word:
    """Hash a 32-bit word: a bijection in which every bit depends on every bit of the argument.

    Args:
        word: in [0, 2^32); an int, or an int64 tensor of such (a product past 2^63 wraps, which
            leaves its low 32 bits right).
    """
    word = ((word ^ (word >> 16)) * MIX_1) & MASK
    word = ((word ^ (word >> 15)) * MIX_2) & MASK
    return word ^ (word >> 16)


def stream(seed: int, index: int) -> int:
    """Return 32 bits that distinguish the random numbers of one tensor from those of others."""
    return mix((mix(seed) + index) & MASK)


def key(seed: int, index: int, step: int) -> int:
    """Return 32 bits that distinguish the random numbers of one tensor and step from all others."""
    return mix((stream(seed, index) + step) & MASK)


def random_bits(
    numel: int, key: int, *, start: int = 0, device: torch.device | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw three uniform 16-bit numbers for each element from `start` to `start + numel - 1`.

    They are a hash of the element's index and the key, so they do not depend on order or grid. One
    32-bit hash gives all three: its halves, and the high half of its product with an odd number,
    which for either fixed half is a bijection of the other or equidistributed to within one count.
    Any two of the three are as good as independent, and no more is needed.

    Returns:
        int32 tensors (numel,) with values in [0, 2^16): for the parameter, exp_avg, exp_avg_sq.
    """
    element = torch.arange(start, start + numel, dtype=torch.int64, device=device)
    word = mix((element & MASK) ^ mix(element >> 32) ^ key)
    third = ((word * GOLDEN) & MASK) >> 16
    low, high, third = ((bits & 0xFFFF).int() for bits in (word, word >> 16, third))
    return low, high, third


def round_stochastically(value: Tensor, bits: Tensor) -> Tensor:
    """Round float32 to bfloat16, up in magnitude with the probability that preserves the mean.

    A bfloat16 is a float32 without its low 16 bits. Adding a uniform 16-bit number carries into
    the kept bits exactly as often as the dropped ones are large; representable values stay, and
    no value moves by a unit in the last place or more. A value within that of the largest finite
    bfloat16 may round to infinity.

    Args:
        value: float32, any shape.
        bits: int32 of as many elements, uniform in [0, 2^16).

    Returns:
        bfloat16, of value's shape.
    """
    words = value.contiguous().view(torch.int32) + bits.view(value.shape)
    # A NaN whose mantissa is all ones would carry into its sign and come out as a zero.
    words = torch.where(value.isnan(), 0x7FFFFFFF, words)
    return (words >> 16).to(torch.int16).view(torch.bfloat16)


@torch.no_grad()
def adamw_reference(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    master: Tensor | None,
    step: Tensor,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    stochastic_rounding: bool,
    seed: int = 0,
    index: int = 0,
) -> None:
    """Run one step of AdamW in place.

    Decoupled Weight Decay Regularization (Loshchilov & Hutter 2019), algorithm 2, with the
    schedule multiplier in lr, and epsilon where torch.optim.AdamW has it, after the bias
    correction:

        w = (1 - lr weight_decay) w
        m = m + (1 - beta1) (g - m)
        v = beta2 v + (1 - beta2) g^2
        w = w - lr / (1 - beta1^t) m / (sqrt(v / (1 - beta2^t)) + eps)

    computed in float32, with terms of t alone in float64. w is the master weight if there is one,
    else the parameter. m and v enter the last line before they are rounded to their dtype.

    Args:
        param: float32, bfloat16 or float16, any shape, contiguous like all that follow. With a
            master it is written (the master, rounded to nearest) and never read.
        grad: of param's shape, any of these dtypes.
        exp_avg, exp_avg_sq: m and v, of param's shape, both float32 or both bfloat16.
        master: float32 of param's shape, or None.
        step: int64 of no dimension on param's device, t - 1 on entry, t on return.
        lr, betas, eps, weight_decay: as in torch.optim.AdamW.
        stochastic_rounding: round bfloat16 tensors that hold the only copy (m, v, and param if it
            has no master) stochastically instead of to nearest.
        seed, index: in [0, 2^32): with t and the place of an element they make its random bits;
            index is the parameter's place in its optimizer.
    """
    step += 1
    t = int(step)
    beta1, beta2 = betas
    step_size = lr / (1 - beta1**t)
    rsqrt_correction = 1 / math.sqrt(1 - beta2**t)

    bits: Iterator[Tensor | None] = iter((None, None, None))
    if stochastic_rounding:
        bits = iter(random_bits(param.numel(), key(seed, index, t), device=param.device))
    w = (param if master is None else master).float()
    g = grad.float()
    m = exp_avg.float()
    m = m + (g - m) * (1 - beta1)
    v = exp_avg_sq.float() * beta2 + (g * (1 - beta2)) * g
    w = w * (1 - lr * weight_decay)
    # Through float64, whose square root rounded once more is the float32 root correctly rounded
    # (Figueroa 1995); torch's own float32 root on a CPU, from MKL, is not.
    root = v.double().sqrt().float()
    w = w - (m * step_size) / (root * rsqrt_correction + eps)

    _write(param, w, None if master is not None else next(bits))
    if master is not None:
        master.copy_(w)
        next(bits)
    _write(exp_avg, m, next(bits))
    _write(exp_avg_sq, v, next(bits))


def _write(target: Tensor, value: Tensor, bits: Tensor | None) -> None:
    if bits is not None and target.dtype == torch.bfloat16:
        value = round_stochastically(value, bits)
    target.copy_(value)
