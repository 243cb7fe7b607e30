"""What FusedAdamW's tests share: dtypes and sizes, parameters and gradients, what is right."""

from __future__ import annotations

import torch

from systems.kernels.adamw import FusedAdamW

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
SIZES = [1, 1023, 1025, 4097, 0]
# (param, state, master): the three uses, then what else the options give
USES = {
    "fp32": (F32, F32, False),
    "bf16_master": (BF16, F32, True),
    "bf16": (BF16, BF16, False),
    "fp16_master": (F16, F32, True),
    "bf16_fp32_state": (BF16, F32, False),
    "bf16_state_master": (BF16, BF16, True),
    "fp32_bf16_state": (F32, BF16, False),
}
HYPER = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
# Relative L2 error of what ten steps changed, by the coarsest dtype that is the only copy
TOLERANCE = {F32: 2e-5, BF16: 3e-2}


def randn(n: int, seed: int, dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, generator=generator, dtype=torch.float64).to(dtype).to(device)


def make_parameters(dtype: torch.dtype, device: str = "cpu") -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(randn(n, i, dtype, device)) for i, n in enumerate(SIZES)]


def set_grads(parameters, step: int) -> None:
    """Gradients of two magnitudes, into those that exist."""
    for i, p in enumerate(parameters):
        scale = 1.0 if i % 2 else 1e-2
        grad = (scale * randn(p.numel(), 1000 * step + i, torch.float64)).to(p.device, p.dtype)
        if p.grad is None:
            p.grad = grad.view(p.shape)
        else:
            p.grad.copy_(grad.view(p.shape))


def make_optimizer(use: str, parameters, **options) -> FusedAdamW:
    _, state, master = USES[use]
    return FusedAdamW(parameters, **{**HYPER, **options}, state_dtype=state, master_weights=master)


def bf16_run(seed: int) -> FusedAdamW:
    """An optimizer after three steps."""
    parameters = make_parameters(BF16)
    optimizer = make_optimizer("bf16", parameters, seed=seed)
    for step in range(3):
        set_grads(parameters, step)
        optimizer.step()
    return optimizer


def assert_against_float64(use: str, device: str) -> None:
    """Ten steps: parameters, masters and moments against torch's."""
    dtype, state_dtype, has_master = USES[use]
    ours = make_parameters(dtype, device)
    exact = [torch.nn.Parameter(p.detach().double()) for p in ours]
    start = [p.detach().clone() for p in exact]
    optimizer = make_optimizer(use, ours)
    other = torch.optim.AdamW(exact, **HYPER)
    for step in range(10):
        set_grads(ours, step)
        for p, q in zip(ours, exact, strict=True):
            q.grad = p.grad.double()
        optimizer.step()
        other.step()
    for p, q, before in zip(ours, exact, start, strict=True):
        state, known = optimizer.state[p], other.state[q]
        assert int(state["step"]) == 10
        assert ("master" in state) == has_master
        if has_master:
            assert torch.equal(state["master"].to(dtype), p)
        # Unrounded states move a weight alike; a stored weight is off by its own rounding, and one
        # that was rounded at each of ten steps by about the root of ten units in the last place.
        weight = (state["master"] if has_master else p.detach()).double()
        rounding = 2e-7 if has_master or dtype == F32 else 10**0.5 * 2**-8
        error, moved = (weight - q).norm(), (q - before).norm()
        assert error <= TOLERANCE[state_dtype] * moved + rounding * q.norm()
        for name in ("exp_avg", "exp_avg_sq"):
            assert state[name].dtype == state_dtype
            error = (state[name].double() - known[name]).norm()
            assert error <= TOLERANCE[state_dtype] * known[name].norm()


def assert_same(a: FusedAdamW, b: FusedAdamW) -> None:
    """Parameters and state, bit for bit."""
    owned = [[p for g in o.param_groups for p in g["params"]] for o in (a, b)]
    for p, q in zip(*owned, strict=True):
        assert torch.equal(p, q)
        assert a.state[p].keys() == b.state[q].keys()
        for name, tensor in a.state[p].items():
            assert tensor.dtype == b.state[q][name].dtype
            assert torch.equal(tensor, b.state[q][name])
