"""Dtypes, parameters, gradients and float64 comparisons for the tests of FusedAdamW."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from systems.kernels.adamw import FusedAdamW
from systems.kernels.adamw.reference import Operands, adamw_reference, stream

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
SIZES = [1, 1023, 1025, 4097, 0]
# (param, state, master): the three typical cases, then other combinations of options.
USES = {
    "fp32": (F32, F32, False),
    "bf16_master": (BF16, F32, True),
    "bf16": (BF16, BF16, False),
    "fp16_master": (F16, F32, True),
    "bf16_fp32_state": (BF16, F32, False),
    "bf16_state_master": (BF16, BF16, True),
    "fp32_bf16_state": (F32, BF16, False),
}
HYPER: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
STEPS = 10
# Limits of the relative L2 error of the moments after STEPS steps, and of the change of the weights
# that results from the moments. In bfloat16 a moment is rounded once per step, by up to two unit
# roundoffs (stochastic rounding). In float32 a step has a dozen roundings. The error of n roundings
# grows with sqrt(n).
TOLERANCE = {BF16: 2 * STEPS**0.5 * 2**-8, F32: (12 * STEPS) ** 0.5 * 2**-24}


def randn(n: int, seed: int, dtype: torch.dtype, device: str = "cpu") -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, generator=generator, dtype=torch.float64).to(dtype).to(device)


def make_parameters(dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> list[Parameter]:
    return [Parameter(randn(n, 10**6 * seed + i, dtype, device)) for i, n in enumerate(SIZES)]


def set_grads(parameters: Iterable[Parameter], step: int, seed: int = 0) -> None:
    """Set gradients of two magnitudes, in place if gradients exist."""
    for i, p in enumerate(parameters):
        scale = 1.0 if i % 2 else 1e-2
        drawn = randn(p.numel(), 10**6 * seed + 1000 * step + i, torch.float64)
        grad = (scale * drawn).to(p.device, p.dtype)
        if p.grad is None:
            p.grad = grad.view(p.shape)
        else:
            p.grad.copy_(grad.view(p.shape))


def make_optimizer(
    use: str, parameters: Iterable[Parameter] | None = None, device: str = "cpu", **options: Any
) -> FusedAdamW:
    """Return an optimizer of these parameters, by default of those of `make_parameters`."""
    dtype, state, master = USES[use]
    if parameters is None:
        parameters = make_parameters(dtype, device)
    return FusedAdamW(parameters, **{**HYPER, **options}, state_dtype=state, master_weights=master)


def parameters_of(optimizer: Optimizer) -> list[Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def take_steps(optimizer: Optimizer, numbers: Iterable[int]) -> None:
    """Take a step with the gradients of each of these numbers."""
    for step in numbers:
        set_grads(parameters_of(optimizer), step)
        optimizer.step()


def float64_shares(use: str, device: str, seed: int = 0) -> dict[str, float]:
    """Run STEPS steps of FusedAdamW and of torch's AdamW in float64, and return the errors.

    Parameters with a single element are not compared, because their change may cancel to zero.

    Returns:
        Errors of weights, exp_avg and exp_avg_sq of each parameter, each divided by its limit.
    """
    dtype, state_dtype, has_master = USES[use]
    ours = make_parameters(dtype, device, seed)
    exact = [Parameter(p.detach().double()) for p in ours]
    start = [p.detach().clone() for p in exact]
    optimizer = make_optimizer(use, ours, seed=seed)
    other = torch.optim.AdamW(exact, **HYPER)
    for step in range(STEPS):
        set_grads(ours, step, seed)
        for p, q in zip(ours, exact, strict=True):
            assert p.grad is not None
            q.grad = p.grad.double()
        optimizer.step()
        other.step()
    tolerance, stored = TOLERANCE[state_dtype], F32 if has_master else dtype
    shares = {}
    for p, q, before in zip(ours, exact, start, strict=True):
        state, known = optimizer.state[p], other.state[q]
        assert int(state["step"]) == STEPS
        assert ("master" in state) == has_master
        if has_master:
            assert torch.equal(state["master"].to(dtype), p)
        if p.numel() < 2:
            continue
        # The error of a weight has two parts: the error of its change, which results from the
        # moments, and one rounding per step of the stored weight, by less than one unit in the last
        # place, which is two unit roundoffs.
        rounding = 2 * STEPS**0.5 * torch.finfo(stored).eps / 2
        weight = (state["master"] if has_master else p.detach()).double()
        limit = tolerance * (q - before).norm() + rounding * q.norm()
        shares[f"weights of {p.numel()}"] = ((weight - q).norm() / limit).item()
        for name in ("exp_avg", "exp_avg_sq"):
            assert state[name].dtype == state_dtype
            error, limit = (state[name] - known[name]).norm(), tolerance * known[name].norm()
            shares[f"{name} of {p.numel()}"] = (error / limit).item()
    return shares


def assert_against_float64(use: str, device: str) -> None:
    shares = float64_shares(use, device)
    assert all(share <= 1 for share in shares.values()), shares


def assert_same(a: FusedAdamW, b: FusedAdamW) -> None:
    """Check that parameters and state of two optimizers are bitwise equal."""
    for p, q in zip(parameters_of(a), parameters_of(b), strict=True):
        assert torch.equal(p, q)
        assert a.state[p].keys() == b.state[q].keys()
        for name, tensor in a.state[p].items():
            assert tensor.dtype == b.state[q][name].dtype
            assert torch.equal(tensor, b.state[q][name])


def _set_data(p: Tensor, data: Tensor) -> None:
    p.data, p.grad = data, torch.ones_like(data)


def _change_grad(p: Tensor, change: Callable[[Tensor], Tensor]) -> None:
    assert p.grad is not None
    p.grad.data = change(p.grad.data)


Change = Callable[[Parameter, dict[str, Any]], Any]
# Change of a bfloat16 parameter of shape (4, 4) or of its state, and the message of the next step.
MISFITS: dict[str, tuple[Change, str]] = {
    "data grew": (
        lambda p, s: _set_data(p, torch.ones(90, 90, dtype=BF16)),
        r"exp_avg of parameter 1 \(w\) must be torch.float32 of shape \(90, 90\).* \(4, 4\)",
    ),
    "data cast": (
        lambda p, s: _set_data(p, p.data.float()),
        "master .* must be none, got torch.fl",
    ),
    "float64": (
        lambda p, s: _set_data(p, p.data.double()),
        r"parameter 1 \(w\) must be contiguous, with a dtype in .* got torch.float64",
    ),
    "data transposed": (lambda p, s: _set_data(p, p.data.t()), r"with strides \(1, 4\)"),
    "data negated": (lambda p, s: _set_data(p, torch._neg_view(-p.data)), "lazily negated"),
    "data freed": (lambda p, s: p.data.untyped_storage().resize_(0), "without memory"),
    "gradient shrank": (lambda p, s: _change_grad(p, lambda g: g[:2]), r"gradient .* \(2, 4\)"),
    "gradient sparse": (
        lambda p, s: setattr(p, "grad", torch.zeros(4, 4, dtype=BF16).to_sparse()),
        r"parameter 1 \(w\) must be dense, got torch\.sparse_coo",
    ),
    "gradient cast": (lambda p, s: _change_grad(p, Tensor.double), "gradient .* torch.float64"),
    "moment shrank": (lambda p, s: s.update(exp_avg_sq=s["exp_avg_sq"][:1]), r"_sq .* \(1, 4\)"),
    "moment cast": (
        lambda p, s: s.update(exp_avg_sq=s["exp_avg_sq"].half()),
        "_sq .* torch.float16",
    ),
    "moment moved": (lambda p, s: s.update(exp_avg=s["exp_avg"].to("meta")), "exp_avg .* on meta"),
    "moment expanded": (lambda p, s: s.update(exp_avg=torch.ones(1, 4).expand(4, 4)), "strides"),
    "master shrank": (lambda p, s: s.update(master=s["master"][:1]), r"master .* \(1, 4\)"),
    "no master": (lambda p, s: s.pop("master"), "master .* got none"),
    "step cast": (lambda p, s: s.update(step=s["step"].float()), "step .* must be torch.int64"),
}


def assert_misfit_is_refused(change: str) -> None:
    """Check that a step names the tensor that does not fit its parameter, and updates nothing."""
    first, p = (Parameter(torch.ones(4, 4, dtype=BF16)) for _ in range(2))
    optimizer = FusedAdamW([("v", first), ("w", p)], lr=0.1)
    for q in (first, p):
        q.grad = torch.ones_like(q)
    optimizer.step()
    before = first.detach().clone()
    function, message = MISFITS[change]
    function(p, optimizer.state[p])
    for _ in range(2):
        with pytest.raises(RuntimeError, match=message):
            optimizer.step()
    assert torch.equal(first, before)
    if change == "data grew":
        del optimizer.state[p]
        optimizer.step()
        assert int(optimizer.state[p]["step"]) == 1 and int(optimizer.state[first]["step"]) == 2


def _make_operands(use: str, n: int, device: str, offset: int) -> Operands:
    """Return operands that start `offset` elements after an aligned address."""
    dtype, state_dtype, has_master = USES[use]

    def tensor(values: Tensor, dtype: torch.dtype) -> Tensor:
        room = torch.empty(n + offset, dtype=dtype, device=device)
        return room[offset:].copy_(values)

    values, zeros = randn(n, 3, F32), torch.zeros(n)
    return Operands(
        param=tensor(values, dtype),
        grad=tensor(zeros, dtype),
        exp_avg=tensor(zeros, state_dtype),
        exp_avg_sq=tensor(zeros, state_dtype),
        master=tensor(values, F32) if has_master else None,
        step=torch.zeros((), dtype=torch.int64, device=device),
        hyper=hyper_tensor(device),
        stream=0,
        stochastic=True,
    )


def hyper_tensor(device: str) -> Tensor:
    values = [HYPER["lr"], *HYPER["betas"], HYPER["eps"], HYPER["weight_decay"]]
    return torch.tensor(values, dtype=torch.float64, device=device)


def kernel_step(operands: Operands) -> None:
    """Run one step on one parameter with the kernels."""
    from systems.kernels.adamw.kernel import Tables, layout_of

    Tables(layout_of([operands]), operands.param.device).launch()


def assert_kernel_is_reference(use: str, n: int, device: str, offset: int) -> None:
    """Check three steps of the kernel against its reference.

    Results are bitwise equal, because both round the same operations once. The exception is
    bfloat16 state on a GPU, where division is approximate; `kernel.py` documents its error.
    """
    dtype, state_dtype, _ = USES[use]
    ours, known = (_make_operands(use, n, device, offset) for _ in range(2))
    approximates = device != "cpu" and state_dtype == BF16
    one_unit = {F32: 2**-20, BF16: 2**-7, F16: 2**-10}
    for step in range(3):
        grad = randn(n + offset, step, dtype).to(device)[offset:]
        for function, operands in ((kernel_step, ours), (adamw_reference, known)):
            function(operands._replace(grad=grad, stream=stream(9, step % 2)))
        for name, a, b in zip(Operands._fields, ours, known, strict=True):
            if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
                continue
            if approximates and name in ("param", "master"):
                torch.testing.assert_close(a, b, rtol=one_unit[a.dtype], atol=1e-8)
                if n and a.dtype == BF16:
                    assert (a != b).double().mean().item() <= 1e-3
                b.copy_(a)  # so that the next step has the same start
            else:
                assert torch.equal(a, b), f"{name} at step {step}"
