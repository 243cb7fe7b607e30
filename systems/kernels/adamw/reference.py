"""Reference of the AdamW kernels: one step on one tensor in torch, with stochastic rounding.

Each operation is one correctly rounded float32 operation. The kernels run the same operations in
the same order, so their results can be bitwise equal to those of the reference.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TypeVar

import torch
from torch import Tensor

Word = TypeVar("Word", int, Tensor)

MASK = 0xFFFFFFFF
# Multipliers of lowbias32, a 32-bit hash function that Wellons found in a search for low bias:
# https://nullprogram.com/blog/2018/07/31/
MIX_1, MIX_2 = 0x7FEB352D, 0x846CA68B
# Odd number near 2^32 / phi, where phi is the golden ratio. Multiplication by this number spreads
# low bits into high bits (Knuth, TAOCP 6.4).
GOLDEN = 0x9E3779B1


def mix(word: Word) -> Word:
    """Return a 32-bit hash of a 32-bit word, an int or int64 tensor with values in [0, 2^32).

    The hash is a bijection, and each bit of the hash depends on every bit of the word.
    """
    # Products of tensors may overflow int64, but their low 32 bits are correct.
    word = ((word ^ (word >> 16)) * MIX_1) & MASK
    word = ((word ^ (word >> 15)) * MIX_2) & MASK
    return word ^ (word >> 16)


def stream(seed: int, index: int) -> int:
    """Return a 32-bit hash of the seed of an optimizer and the index of one of its parameters.

    This hash and the number of the step determine all random bits of the parameter in a step.
    """
    return mix((mix(seed) + index) & MASK)


def key(seed: int, index: int, step: int) -> int:
    """Return a 32-bit hash of a seed, a parameter and a step: the argument `key` of `random_bits`.

    `seed` is of the optimizer and `index` of the parameter in it, both in [0, 2^32).
    """
    return mix((stream(seed, index) + step) & MASK)


def random_bits(
    numel: int, key: int, *, start: int = 0, device: torch.device | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return three uniform 16-bit random numbers for each element of a tensor.

    The numbers of an element depend only on the key and the index of the element. They do not
    depend on the grid or the order of execution. One 32-bit hash of the key and the index gives all
    three numbers:

    1. its low 16 bits,
    2. its high 16 bits,
    3. bits 16 to 31 of its product with the odd number GOLDEN.

    Any two of the three numbers are practically independent. This is sufficient, because each of
    them rounds a different tensor. Number 3 is practically independent of numbers 1 and 2 for this
    reason: keep number 1 or 2 fixed, and let the other take all its 2^16 values. Then number 3
    takes all 2^16 values equally often, to within one count.

    The first element has the index `start`, and the key is from the function `key`. The result is
    three int32 tensors (numel,) with values in [0, 2^16), to round the parameter, exp_avg and
    exp_avg_sq, in this order.
    """
    element = torch.arange(start, start + numel, dtype=torch.int64, device=device)
    word = mix((element & MASK) ^ mix(element >> 32) ^ key)
    third = ((word * GOLDEN) & MASK) >> 16
    low, high, third = ((bits & 0xFFFF).int() for bits in (word, word >> 16, third))
    return low, high, third


def round_stochastically(value: Tensor, bits: Tensor) -> Tensor:
    """Round float32 to bfloat16 stochastically, so that the expected result equals the value.

    A bfloat16 is a float32 without the low 16 bits. A uniform 16-bit random number is added to the
    float32 bits, and then the low 16 bits are dropped. The addition carries into the upper 16 bits
    with a probability that is proportional to the low 16 bits. Representable values do not change,
    and the error is always less than one unit in the last place. A value above the largest finite
    bfloat16 may round to infinity.

    The result has the shape of `value`, which is float32. `bits` is int32 with as many elements,
    uniform in [0, 2^16).
    """
    words = value.contiguous().view(torch.int32) + bits.view(value.shape)
    # A NaN whose mantissa is all ones would carry into its sign bit and become zero.
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
    """Run one AdamW step on one tensor in place.

    This is algorithm 2 of Decoupled Weight Decay Regularization (Loshchilov & Hutter 2019). The
    schedule multiplier of the paper is included in lr. As in torch.optim.AdamW, eps is added after
    the bias correction. The symbols are

        w       master, or param if master is None
        g       grad
        m, v    exp_avg and exp_avg_sq
        t       number of the step

    and the step is

        w = (1 - lr weight_decay) w
        m = m + (1 - beta1) (g - m)
        v = beta2 v + (1 - beta2) g^2
        w = w - lr / (1 - beta1^t) m / (sqrt(v / (1 - beta2^t)) + eps)

    The last line uses m and v before they are rounded to their dtype. Terms that depend only on t
    and the hyperparameters are computed in float64, and all others in float32.

    All tensors are contiguous, and all except `step` have the shape of param.

    Args:
        param: float32, bfloat16 or float16. If master is given, param is not read, and is set to
            the new master weight, rounded to nearest.
        grad: float32, bfloat16 or float16.
        exp_avg, exp_avg_sq: both float32 or both bfloat16.
        master: master weight, float32, or None.
        step: 0-dimensional int64 on the device of param: t - 1 before and t after the call.
        stochastic_rounding: whether to round bfloat16 tensors without a float32 copy (m, v, and
            param without a master weight) stochastically and not to nearest.
        seed, index: in [0, 2^32), of the optimizer and the parameter. They determine the random
            bits.
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
    # A float64 square root that is rounded to float32 is the correctly rounded float32 square root
    # (Figueroa 1995). On a CPU, torch uses MKL for the float32 square root, which is not correctly
    # rounded.
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
