"""Reference of the AdamW kernels: one step on one parameter in torch, with stochastic rounding.

`FusedAdamW` runs it on a CPU. Each operation is one correctly rounded float32 operation. The
kernels run the same operations in the same order, so their results can be bitwise equal.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple, TypeVar

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


class Operands(NamedTuple):
    """All that a step needs of one parameter. The tensors are contiguous and on one device."""

    param: Tensor  # float32, bfloat16 or float16
    grad: Tensor  # float32, bfloat16 or float16; it and the next three have the shape of param
    exp_avg: Tensor  # float32 or bfloat16
    exp_avg_sq: Tensor  # dtype of exp_avg
    # float32. If given, param is not read, and is set to the new master, rounded to nearest.
    master: Tensor | None
    step: Tensor  # int64 (): t - 1 before and t after step t
    hyper: Tensor  # float64 (5,): lr, beta1, beta2, eps, weight_decay
    stream: int  # random stream of the parameter, from the function `stream`
    stochastic: bool  # whether to round bfloat16 without a float32 copy stochastically


def mix(word: Word) -> Word:
    """Return a 32-bit hash of an int, or of an int64 tensor, with values in [0, 2^32).

    It is a bijection, and each of its bits depends on every bit of the word.
    """
    # Products of tensors may overflow int64, but their low 32 bits are correct.
    word = ((word ^ (word >> 16)) * MIX_1) & MASK
    word = ((word ^ (word >> 15)) * MIX_2) & MASK
    return word ^ (word >> 16)


@functools.lru_cache(maxsize=65_536)
def stream(seed: int, index: int) -> int:
    """Return a 32-bit hash of the seed of an optimizer and the index of a parameter.

    Both are in [0, 2^32). This hash and the number of the step determine all random bits of the
    parameter in a step.
    """
    return mix((mix(seed) + index) & MASK)


def random_bits(
    numel: int, stream: int, t: int, *, start: int = 0, device: torch.device | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return three uniform 16-bit random numbers for each element of a tensor in step t.

    They are a 32-bit hash of the stream, t and the index of the element, whatever the grid or the
    order of execution: its low 16 bits, its high 16 bits, and bits 16 to 31 of its product with the
    odd number GOLDEN. Any two of the three are practically independent, which is sufficient,
    because each of them rounds a different tensor. The third is for this reason: keep the first or
    the second fixed, and let the other take all its 2^16 values. Then the third takes all 2^16
    values equally often, to within one count.

    The first element has the index `start`. The result is three int32 tensors (numel,) with values
    in [0, 2^16), to round the parameter, exp_avg and exp_avg_sq, in this order.
    """
    key = mix((stream + t) & MASK)
    element = torch.arange(start, start + numel, dtype=torch.int64, device=device)
    word = mix((element & MASK) ^ mix(element >> 32) ^ key)
    third = ((word * GOLDEN) & MASK) >> 16
    low, high, third = ((bits & 0xFFFF).int() for bits in (word, word >> 16, third))
    return low, high, third


def round_stochastically(value: Tensor, bits: Tensor) -> Tensor:
    """Round float32 to bfloat16 stochastically, so that the expected result equals the value.

    A bfloat16 is a float32 without the low 16 bits. `bits`, int32 and uniform in [0, 2^16) with as
    many elements, is added to the float32 bits, and then the low 16 bits are dropped. The addition
    carries into the upper 16 bits with a probability that is proportional to the low 16 bits.
    Representable values do not change, and the error is always less than one unit in the last
    place. A value above the largest finite bfloat16 may round to infinity.
    """
    words = value.contiguous().view(torch.int32) + bits.view(value.shape)
    # A NaN whose mantissa is all ones would carry into its sign bit and become zero.
    words = torch.where(value.isnan(), 0x7FFFFFFF, words)
    return (words >> 16).to(torch.int16).view(torch.bfloat16)


@torch.no_grad()
def adamw_reference(operands: Operands) -> None:
    """Run one AdamW step on one parameter in place.

    This is algorithm 2 of Decoupled Weight Decay Regularization (Loshchilov & Hutter 2019). The
    schedule multiplier of the paper is included in lr. As in torch.optim.AdamW, eps is added after
    the bias correction. With w = master, or param without a master weight, g = grad, m = exp_avg
    and v = exp_avg_sq, step t is

        w = (1 - lr weight_decay) w
        m = m + (1 - beta1) (g - m)
        v = beta2 v + (1 - beta2) g^2
        w = w - lr / (1 - beta1^t) m / (sqrt(v / (1 - beta2^t)) + eps)

    The last line uses m and v before they are rounded to their dtype. Terms that depend only on t
    and the hyperparameters are computed in float64, and all others in float32.
    """
    param, grad, exp_avg, exp_avg_sq, master, step, hyper, stream, stochastic = operands
    lr, beta1, beta2, eps, weight_decay = hyper.tolist()
    step += 1
    t = int(step)
    step_size = lr / (1 - beta1**t)
    rsqrt_correction = 1 / math.sqrt(1 - beta2**t)

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

    bits = None
    if master is not None:
        master.copy_(w)
    for number, (target, value) in enumerate(((param, w), (exp_avg, m), (exp_avg_sq, v))):
        only_copy = number > 0 or master is None
        if stochastic and only_copy and target.dtype == torch.bfloat16:
            bits = bits or random_bits(param.numel(), stream, t, device=param.device)
            value = round_stochastically(value, bits[number])
        target.copy_(value)
