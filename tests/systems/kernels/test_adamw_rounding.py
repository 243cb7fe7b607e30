"""Stochastic rounding in FusedAdamW is unbiased, reproducible, and keeps small updates."""

from __future__ import annotations

import pytest
import torch

from systems.kernels.adamw import FusedAdamW
from systems.kernels.adamw.reference import random_bits, round_stochastically, stream
from tests.systems.kernels.adamw_cases import BF16, F32, make_optimizer, parameters_of, take_steps


@pytest.mark.parametrize("value", [1.0 + 2**-10, -3.14159, 1e-3, -1e-40, 6.5e4])
def test_rounding_is_unbiased_and_within_one_unit(value):
    n = 1 << 18
    x = torch.full((n,), value)
    low_bits = x.view(torch.int32) >> 16 << 16
    low, high = low_bits.view(F32), (low_bits + (1 << 16)).view(F32)  # neighbours in bfloat16
    for bits in random_bits(n, stream(1, 2), 3):
        rounded = round_stochastically(x, bits).float()
        assert ((rounded == low) | (rounded == high)).all()
        # The standard error of a mean of two values is at most half their distance over sqrt(n).
        standard_error = (high - low).abs()[0].item() / 2 / n**0.5
        assert abs(rounded.double().mean().item() - x[0].item()) <= 5 * standard_error


def test_representable_values_infinities_and_nan_stay():
    words = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    x = words.view(BF16)  # all bfloat16 values
    most = torch.full((len(x),), 0xFFFF, dtype=torch.int32)
    rounded = round_stochastically(x.float(), most)
    assert torch.equal(rounded.isnan(), x.isnan())
    assert torch.equal(rounded[~x.isnan()].view(torch.int16), words[~x.isnan()])
    nan = torch.tensor([0x7FFFFFFF, -1, 0x7F800001], dtype=torch.int32).view(F32)
    assert round_stochastically(nan, most[:3]).isnan().all()


def test_random_bits_are_uniform_independent_and_counted():
    n = 1 << 17
    drawn = random_bits(n, stream(1, 0), 1)
    for bits in drawn:
        assert bits.min() >= 0 and bits.max() < 1 << 16
        counts = torch.bincount(bits >> 8, minlength=256).double()
        chi2 = ((counts - n / 256) ** 2 / (n / 256)).sum().item()
        assert 150 < chi2 < 380  # 255 degrees of freedom, about five standard deviations
    unit = [b.double() / (1 << 16) - 0.5 for b in (*drawn, *random_bits(n, stream(1, 0), 2))]
    for i, a in enumerate(unit):
        assert abs((a[1:] * a[:-1]).mean().item() * 12) < 5 / n**0.5
        for b in unit[:i]:
            assert abs((a * b).mean().item() * 12) < 5 / n**0.5
    whole = random_bits(100, stream(1, 0), 1, start=(1 << 32) - 50)
    part = random_bits(50, stream(1, 0), 1, start=1 << 32)
    for a, b, first in zip(whole, part, drawn, strict=True):
        assert torch.equal(a[50:], b)  # independent of the start
        assert not torch.equal(b, first[:50])  # element 2^32 has other bits than element 0


def test_a_seed_gives_the_same_bits_and_another_seed_others():
    results = []
    for seed in (1, 1, 2):
        optimizer = make_optimizer("bf16", seed=seed)
        take_steps(optimizer, range(3))
        results.append(torch.cat([p.detach() for p in parameters_of(optimizer)]))
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


@pytest.mark.parametrize("stochastic", [True, False])
def test_updates_below_half_a_unit_move_the_parameter_on_average(stochastic):
    n, steps, lr, ulp = 1 << 14, 50, 2.0**-12, 2.0**-7  # ulp of bfloat16 in [1, 2)
    p = torch.nn.Parameter(torch.full((n,), 1.5, dtype=BF16))
    optimizer = FusedAdamW(
        [p], lr=lr, betas=(0.0, 0.0), weight_decay=0.0, state_dtype=BF16,
        stochastic_rounding=stochastic,
    )  # fmt: skip
    p.grad = torch.ones_like(p)  # with betas of 0, each update is lr
    for _ in range(steps):
        optimizer.step()
    moved = 1.5 - p.double().mean().item()
    if stochastic:
        # In a step, one of ulp / lr elements moves by ulp. The standard deviation of the number of
        # such rare events is its square root.
        assert moved == pytest.approx(steps * lr, rel=5 * (ulp / lr / steps / n) ** 0.5)
    else:
        assert moved == 0


def test_exp_avg_sq_decays_in_bfloat16():
    p = torch.nn.Parameter(torch.ones(1 << 14, dtype=BF16))
    optimizer = FusedAdamW([p], lr=0.0, state_dtype=BF16)
    p.grad = torch.zeros_like(p)
    optimizer.step()
    optimizer.state[p]["exp_avg_sq"].fill_(1.0)
    for _ in range(100):
        optimizer.step()
    mean = optimizer.state[p]["exp_avg_sq"].double().mean().item()
    assert mean == pytest.approx(0.999**100, rel=1e-3)
