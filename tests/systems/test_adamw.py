"""Fused AdamW: the optimizer against torch's in float64, the kernel against the reference, both
roundings, state, and what the compiler makes of the kernel.

Tests named `interpreted` run the kernel on a CPU; Triton decides that at import, so they run in a
process of their own, or by `TRITON_INTERPRET=1 pytest tests/systems/test_adamw.py -k interpreted`.
"""

from __future__ import annotations

import copy
import os
import pathlib
import pickle
import re
import subprocess
import sys

import pytest
import torch

from systems.kernels.adamw import FusedAdamW, adamw_reference, fused_adamw
from systems.kernels.adamw import reference as reference_module
from systems.kernels.adamw.fused import BLOCK_SIZE, _Tables, constants, num_warps
from systems.kernels.adamw.reference import random_bits, round_stochastically
from tests.hopper import compile_for_hopper, resources

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

interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="runs in a process with TRITON_INTERPRET=1"
)
compiled = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter has no compiler"
)


def _randn(n: int, seed: int, dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, generator=generator, dtype=torch.float64).to(dtype).to(device)


def _parameters(dtype: torch.dtype, device: str = "cpu") -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(_randn(n, i, dtype, device)) for i, n in enumerate(SIZES)]


def _set_grads(parameters, step: int) -> None:
    """Gradients of two magnitudes, into those that exist."""
    for i, p in enumerate(parameters):
        scale = 1.0 if i % 2 else 1e-2
        grad = (scale * _randn(p.numel(), 1000 * step + i, torch.float64)).to(p.device, p.dtype)
        if p.grad is None:
            p.grad = grad.view(p.shape)
        else:
            p.grad.copy_(grad.view(p.shape))


def _make(use: str, parameters, **options) -> FusedAdamW:
    _, state, master = USES[use]
    return FusedAdamW(parameters, **{**HYPER, **options}, state_dtype=state, master_weights=master)


def _check_against_float64(use: str, device: str) -> None:
    dtype, state_dtype, has_master = USES[use]
    ours = _parameters(dtype, device)
    exact = [torch.nn.Parameter(p.detach().double()) for p in ours]
    start = [p.detach().clone() for p in exact]
    optimizer = _make(use, ours)
    other = torch.optim.AdamW(exact, **HYPER)
    for step in range(10):
        _set_grads(ours, step)
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


@pytest.mark.parametrize("use", USES)
def test_ten_steps_against_float64(use):
    _check_against_float64(use, "cpu")


def test_reference_is_the_formula_worked_by_hand():
    param, m, v = torch.tensor([2.0]), torch.zeros(1), torch.zeros(1)
    step = torch.zeros((), dtype=torch.int64)
    adamw_reference(
        param, torch.tensor([0.5]), m, v, None, step, lr=0.1, betas=(0.9, 0.99), eps=0.0,
        weight_decay=0.5, stochastic_rounding=False,
    )  # fmt: skip
    # Bias correction makes the first update lr sign(g); decay by lr weight_decay comes before it
    assert param.item() == pytest.approx(2.0 * 0.95 - 0.1, rel=1e-6)
    assert m.item() == pytest.approx(0.05) and v.item() == pytest.approx(0.0025)
    assert int(step) == 1


def test_groups_have_their_own_options_and_missing_gradients_stand_still():
    def groups(parameters):
        return [
            {"params": parameters[:2], "lr": 0.1, "weight_decay": 0.0},
            {"params": parameters[2:], "betas": (0.5, 0.9), "eps": 1e-3},
        ]

    ours = _parameters(F32)
    exact = [torch.nn.Parameter(p.detach().double()) for p in ours]
    optimizer = FusedAdamW(groups(ours), **HYPER)
    other = torch.optim.AdamW(groups(exact), **HYPER)
    for step in range(6):
        optimizer.param_groups[0]["lr"] = other.param_groups[0]["lr"] = 0.1 / (step + 1)
        _set_grads(ours, step)
        if step % 2:
            ours[1].grad = None
        for p, q in zip(ours, exact, strict=True):
            q.grad = None if p.grad is None else p.grad.double()
        optimizer.step()
        other.step()
    assert [int(optimizer.state[p]["step"]) for p in ours] == [6, 3, 6, 6, 6]
    for p, q in zip(ours, exact, strict=True):
        torch.testing.assert_close(p.double(), q.double(), rtol=1e-5, atol=1e-6)


def test_a_closure_is_called_with_gradients_on():
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = FusedAdamW([p])

    def closure():
        optimizer.zero_grad()
        loss = (p**2).sum()
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) == 3.0
    assert (p < 1).all()


def test_a_strided_gradient_is_taken_as_it_is_meant():
    base = _randn(12, 0, F32).view(3, 4)
    ours, known = torch.nn.Parameter(base.clone()), torch.nn.Parameter(base.clone())
    grad = _randn(12, 1, F32).view(4, 3).t()
    assert not grad.is_contiguous()
    ours.grad, known.grad = grad, grad.contiguous()
    FusedAdamW([ours]).step()
    FusedAdamW([known]).step()
    assert torch.equal(ours, known)


# ---- stochastic rounding -------------------------------------------------------------------------


def _neighbours(value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The bfloat16 next to each value towards zero, and the one past it, in float32."""
    low = value.view(torch.int32) >> 16 << 16
    return low.view(F32), (low + (1 << 16)).view(F32)


@pytest.mark.parametrize("value", [1.0 + 2**-10, -3.14159, 1e-3, -1e-40, 6.5e4])
def test_rounding_is_unbiased_and_within_one_unit(value):
    n = 1 << 18
    x = torch.full((n,), value)
    low, high = _neighbours(x)
    for bits in random_bits(n, reference_module.key(1, 2, 3)):
        rounded = round_stochastically(x, bits).float()
        assert ((rounded == low) | (rounded == high)).all()
        # The standard error of a mean of two values is at most half their distance over root n
        standard_error = (high - low).abs()[0].item() / 2 / n**0.5
        assert abs(rounded.double().mean().item() - x[0].item()) <= 5 * standard_error


def test_rounding_over_seeds_is_unbiased_too():
    x = torch.tensor([1.0 + 2**-9 / 3])
    bits = torch.stack(
        [torch.stack(random_bits(1, reference_module.key(s, 0, 1))) for s in range(3000)]
    )
    for one in bits.unbind(1):
        mean = round_stochastically(x.expand(3000), one).double().mean().item()
        assert abs(mean - x.item()) <= 5 * 2**-8 / 3000**0.5


def test_representable_values_infinities_and_nan_stay():
    words = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    x = words.view(BF16)  # all that there are
    most = torch.full((len(x),), 0xFFFF, dtype=torch.int32)
    rounded = round_stochastically(x.float(), most)
    assert torch.equal(rounded.isnan(), x.isnan())
    assert torch.equal(rounded[~x.isnan()].view(torch.int16), words[~x.isnan()])
    nan = torch.tensor([0x7FFFFFFF, -1, 0x7F800001], dtype=torch.int32).view(F32)
    assert round_stochastically(nan, most[:3]).isnan().all()


def test_random_bits_are_uniform_independent_and_counted():
    n = 1 << 17
    drawn = random_bits(n, 7)
    for bits in drawn:
        assert bits.min() >= 0 and bits.max() < 1 << 16
        counts = torch.bincount(bits >> 8, minlength=256).double()
        chi2 = ((counts - n / 256) ** 2 / (n / 256)).sum().item()
        assert 150 < chi2 < 380  # 255 degrees of freedom, about five standard deviations
    unit = [b.double() / (1 << 16) - 0.5 for b in (*drawn, *random_bits(n, 8))]
    for i, a in enumerate(unit):
        assert abs((a[1:] * a[:-1]).mean().item() * 12) < 5 / n**0.5
        for b in unit[:i]:
            assert abs((a * b).mean().item() * 12) < 5 / n**0.5
    whole = random_bits(100, 7, start=(1 << 32) - 50)
    part = random_bits(50, 7, start=1 << 32)
    for a, b, first in zip(whole, part, drawn, strict=True):
        assert torch.equal(a[50:], b)  # whatever the start
        assert not torch.equal(b, first[:50])  # past 2^32 they are others


def _bf16_run(seed: int) -> FusedAdamW:
    parameters = _parameters(BF16)
    optimizer = _make("bf16", parameters, seed=seed)
    for step in range(3):
        _set_grads(parameters, step)
        optimizer.step()
    return optimizer


def test_a_seed_gives_the_same_bits_and_another_seed_others():
    one, two, other = (
        torch.cat([p.detach() for p in _bf16_run(seed).param_groups[0]["params"]])
        for seed in (1, 1, 2)
    )
    assert torch.equal(one, two)
    assert not torch.equal(one, other)


@pytest.mark.parametrize("stochastic", [True, False])
def test_updates_below_half_a_unit_move_the_parameter_on_average(stochastic):
    n, steps, lr, ulp = 1 << 14, 50, 2.0**-12, 2.0**-7  # of bfloat16 between 1 and 2
    p = torch.nn.Parameter(torch.full((n,), 1.5, dtype=BF16))
    optimizer = FusedAdamW(
        [p], lr=lr, betas=(0.0, 0.0), weight_decay=0.0, state_dtype=BF16,
        stochastic_rounding=stochastic,
    )  # fmt: skip
    p.grad = torch.ones_like(p)  # with betas of 0 each update is lr
    for _ in range(steps):
        optimizer.step()
    moved = 1.5 - p.double().mean().item()
    if stochastic:
        # A step moves one in ulp / lr by ulp: the deviation of so many rare events is their root
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


# ---- state ---------------------------------------------------------------------------------------


def _assert_same(a: FusedAdamW, b: FusedAdamW) -> None:
    owned = [[p for g in o.param_groups for p in g["params"]] for o in (a, b)]
    for p, q in zip(*owned, strict=True):
        assert torch.equal(p, q)
        assert a.state[p].keys() == b.state[q].keys()
        for name, tensor in a.state[p].items():
            assert tensor.dtype == b.state[q][name].dtype
            assert torch.equal(tensor, b.state[q][name])


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("way", ["fresh", "in place", "pickle", "torch.save", "deepcopy"])
def test_a_loaded_optimizer_goes_on_alike(use, way, tmp_path):
    parameters = _parameters(USES[use][0])
    optimizer = _make(use, parameters, seed=5)
    for step in range(3):
        _set_grads(parameters, step)
        optimizer.step()
    if way in ("pickle", "deepcopy"):
        other = pickle.loads(pickle.dumps(optimizer)) if way == "pickle" else None
        other = other or copy.deepcopy(optimizer)
        twins = other.param_groups[0]["params"]
    else:
        twins = [torch.nn.Parameter(p.detach().clone()) for p in parameters]
        other = _make(use, twins)
        addresses = {}
        if way == "in place":
            _set_grads(twins, 99)
            other.step()
            addresses = {p: {k: t.data_ptr() for k, t in other.state[p].items()} for p in twins}
            for p, q in zip(twins, parameters, strict=True):
                p.data.copy_(q.data)
        state_dict = optimizer.state_dict()
        if way == "torch.save":
            torch.save(state_dict, tmp_path / "state.pt")
            state_dict = torch.load(tmp_path / "state.pt", weights_only=True)
        other.load_state_dict(state_dict)
        for p, known in addresses.items():
            assert known == {k: t.data_ptr() for k, t in other.state[p].items()}
    _assert_same(optimizer, other)
    for step in range(3, 6):
        _set_grads(parameters, step)
        _set_grads(twins, step)
        optimizer.step()
        other.step()
    _assert_same(optimizer, other)


def test_the_state_of_torchs_adamw_loads():
    theirs = [torch.nn.Parameter(p.detach().float()) for p in _parameters(BF16)]
    other = torch.optim.AdamW(theirs, **HYPER)
    _set_grads(theirs, 0)
    other.step()
    ours = [torch.nn.Parameter(p.detach().bfloat16()) for p in theirs]
    optimizer = FusedAdamW(ours)
    optimizer.load_state_dict(other.state_dict())
    for p, q in zip(ours, theirs, strict=True):
        assert torch.equal(optimizer.state[p]["exp_avg"], other.state[q]["exp_avg"])
        assert torch.equal(optimizer.state[p]["master"], p.float())
        assert int(optimizer.state[p]["step"]) == 1
    assert optimizer.param_groups[0]["lr"] == HYPER["lr"]


def test_masters_keep_what_the_cast_lost():
    exact = _randn(1000, 0, F32)
    p, plain = (torch.nn.Parameter(exact.bfloat16()) for _ in range(2))
    optimizer = FusedAdamW([p, plain])
    optimizer.load_master({p: exact})
    p.grad, plain.grad = torch.zeros_like(p), torch.zeros_like(p)
    optimizer.prepare()
    assert torch.equal(optimizer.state[p]["master"], exact)
    assert torch.equal(optimizer.state[plain]["master"], plain.float())
    assert torch.equal(p, exact.bfloat16())


def test_load_master_names_every_error_and_changes_nothing():
    p, q = torch.nn.Parameter(torch.ones(3, dtype=BF16)), torch.nn.Parameter(torch.ones(2))
    optimizer = FusedAdamW([p, q])
    stranger = torch.ones(4)
    with pytest.raises(ValueError) as error:
        optimizer.load_master({p: torch.zeros(5), q: torch.zeros(2), stranger: torch.zeros(4)})
    for part in ("float32 of shape (5,)", "shape (2,) has no master", "shape (4,) is no parameter"):
        assert part in str(error.value)
    assert not optimizer.state


def test_a_state_that_does_not_fit_changes_nothing():
    optimizer = _bf16_run(0)
    before = copy.deepcopy(optimizer)
    wrong = copy.deepcopy(optimizer.state_dict())
    wrong["state"][1]["exp_avg"] = torch.zeros(7)
    wrong["param_groups"][0]["amsgrad"] = True
    with pytest.raises(ValueError, match="amsgrad is not supported; exp_avg of parameter 1 must"):
        optimizer.load_state_dict(wrong)
    _assert_same(optimizer, before)
    assert "amsgrad" not in optimizer.param_groups[0]


def test_all_options_that_are_not_valid_are_named():
    parameters = [
        torch.nn.Parameter(torch.ones(2, dtype=torch.float64)),
        torch.nn.Parameter(torch.ones(2, dtype=torch.complex64)),
        torch.nn.Parameter(torch.ones(2, 3).t()),
    ]
    with pytest.raises(ValueError) as error:
        FusedAdamW(
            parameters, lr=-1.0, betas=(0.9, 1.0), eps=torch.ones(()), state_dtype=F16, seed=-1
        )
    for part in ("lr", "betas", "eps", "state_dtype", "seed", "float64", "complex64", "contiguous"):
        assert part in str(error.value)


def test_a_group_that_is_not_valid_is_not_added():
    optimizer = FusedAdamW([torch.nn.Parameter(torch.ones(2))])
    with pytest.raises(ValueError, match="lr must be"):
        optimizer.add_param_group({"params": torch.nn.Parameter(torch.ones(2)), "lr": -1})
    assert len(optimizer.param_groups) == 1


def test_a_sparse_gradient_is_refused():
    embedding = torch.nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match=r"parameter 0 is torch\.sparse_coo"):
        FusedAdamW(embedding.parameters()).step()


def test_importing_the_package_leaves_triton_alone():
    code = (
        "import torch, sys; before = set(sys.modules); import systems.kernels.adamw; "
        "print([m for m in set(sys.modules) - before if m.startswith('triton')])"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "[]"


# ---- the kernel, interpreted ---------------------------------------------------------------------


@compiled
def test_the_kernel_in_the_interpreter():
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(
        [*command, "-k", "interpreted"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=pathlib.Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    last = done.stdout.splitlines()[-1]
    assert done.returncode == 0 and "passed" in last and "skipped" not in last, done.stdout


def _tensors(use: str, n: int, device: str, offset: int) -> list[torch.Tensor | None]:
    """param, exp_avg, exp_avg_sq, master, step, `offset` elements past an aligned address."""
    dtype, state_dtype, has_master = USES[use]

    def tensor(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        room = torch.empty(n + offset, dtype=dtype, device=device)
        return room[offset:].copy_(values)

    values = _randn(n, 3, F32)
    master = tensor(values, F32) if has_master else None
    moments = [tensor(torch.zeros(n), state_dtype) for _ in range(2)]
    step = torch.zeros((), dtype=torch.int64, device=device)
    return [tensor(values, dtype), *moments, master, step]


def _check_kernel_against_reference(use: str, n: int, device: str, offset: int) -> None:
    dtype, state_dtype, has_master = USES[use]
    ours, known = (_tensors(use, n, device, offset) for _ in range(2))
    # The interpreter cuts bfloat16 off where a GPU rounds to nearest
    cuts_off = device == "cpu" and dtype == BF16 and has_master
    one_unit = {F32: 2**-20, BF16: 2**-7, F16: 2**-10}
    for step in range(3):
        grad = _randn(n + offset, step, dtype).to(device)[offset:]
        options = {**HYPER, "stochastic_rounding": True, "seed": 9, "index": step % 2}
        for function, (param, *rest) in ((fused_adamw, ours), (adamw_reference, known)):
            function(param, grad, *rest, **options)
        names = ("param", "exp_avg", "exp_avg_sq", "master", "step")
        for name, a, b in zip(names, ours, known, strict=True):
            if a is None:
                continue
            if name in ("param", "master") and (
                state_dtype == BF16 or (cuts_off and name == "param")
            ):
                # Approximate division: fused_adamw says how far it may be off
                torch.testing.assert_close(a, b, rtol=one_unit[a.dtype], atol=1e-8)
                if n and a.dtype == BF16 and not cuts_off:
                    assert (a != b).double().mean().item() <= 1e-3
                b.copy_(a)  # so that the next step starts alike
            else:
                assert torch.equal(a, b), f"{name} at step {step}"


@interpreted
@pytest.mark.parametrize("use", USES)
def test_interpreted_kernel_is_the_reference(use):
    for n, offset in [(1, 0), (1023, 0), (1025, 3), (2049, 0), (0, 0)]:
        _check_kernel_against_reference(use, n, "cpu", offset)


@interpreted
@pytest.mark.parametrize("use", ["fp32", "bf16"])
def test_interpreted_optimizer_against_float64(use):
    _check_against_float64(use, "cpu")


@interpreted
def test_interpreted_step_takes_mixed_dtypes_moving_gradients_and_groups():
    """One table, three variants, one of them unaligned; the reference has no table to get wrong."""

    def parameters():
        unaligned = torch.nn.Parameter(_randn(1030, 4, F32)[1:])
        return [*_parameters(F32)[:3], *_parameters(F16), unaligned]

    ours, known = parameters(), parameters()
    optimizers = [
        FusedAdamW([{"params": p[:4]}, {"params": p[4:], "lr": 0.5, "seed": 3}], **HYPER)
        for p in (ours, known)
    ]
    kept = []  # old gradients, so that the next ones lie elsewhere
    for step in range(5):
        for p in (ours, known):
            if step != 3:
                kept.append([q.grad for q in p])
                for q in p:
                    q.grad = None
            _set_grads(p, step)
            if step == 2:
                p[1].grad = None
        optimizers[0].step()
        for index, p in enumerate(known):
            if p.grad is None:
                continue
            group = optimizers[1].param_groups[index >= 4]
            state = optimizers[1]._state(p, group)
            adamw_reference(
                p, p.grad, state["exp_avg"], state["exp_avg_sq"], state.get("master"),
                state["step"], stochastic_rounding=False, seed=group["seed"], index=index,
                **{name: group[name] for name in HYPER},
            )  # fmt: skip
    _assert_same(*optimizers)
    assert len(optimizers[0]._tables[torch.device("cpu")].blocks) == 3


@interpreted
def test_interpreted_prepare_changes_no_parameter():
    parameters = _parameters(BF16)
    _set_grads(parameters, 0)
    before = [p.detach().clone() for p in parameters]
    optimizer = _make("bf16", parameters)
    optimizer.prepare()
    assert all(torch.equal(p, b) for p, b in zip(parameters, before, strict=True))
    assert all(int(optimizer.state[p]["step"]) == 0 for p in parameters)


@interpreted
def test_interpreted_tables_are_kept_until_an_address_changes(monkeypatch):
    made = []
    init = _Tables.__init__

    def count(*args, **kwargs):
        made.append(1)
        init(*args, **kwargs)

    monkeypatch.setattr(_Tables, "__init__", count)
    parameters = _parameters(F32)
    optimizer = _make("fp32", parameters)
    for step in range(3):
        _set_grads(parameters, step)
        optimizer.step()
    assert len(made) == 1
    parameters[0].grad = parameters[0].grad.clone()
    optimizer.step()
    assert len(made) == 2


# ---- the kernel, compiled for a GPU that need not be here ----------------------------------------


@compiled
@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("use", ["fp32", "bf16_master", "bf16"])
def test_compiled_for_hopper_it_moves_16_bytes_and_spills_nothing(use, aligned, tmp_path):
    pytest.importorskip("triton")
    from systems.kernels.adamw import kernel

    dtype, state_dtype, master = USES[use]
    made = compile_for_hopper(
        kernel.adamw_kernel,
        {"table": "*i64", "scalars": "*fp32", "keys": "*u32", "blocks": "*i32"},
        constants(dtype, dtype, state_dtype, master, state_dtype == BF16, aligned),
        num_warps(dtype, dtype, state_dtype, master, BLOCK_SIZE),
        enable_fp_fusion=False,
    )
    used = resources(made, tmp_path)
    assert used["STACK"] == used["LOCAL"] == 0
    # 6 programs, of 256 threads or of 128, in the 65,536 registers of a multiprocessor
    assert not aligned or used["REG"] <= (80 if use == "bf16" else 40)
    # A change of layout would pass through shared memory
    assert made.metadata.shared == 0 and "convert_layout" not in made.asm["ttgir"]
    ptx = made.asm["ptx"]
    found = [len(re.findall(rf"{op}\.global\.v4\.b32", ptx)) for op in ("ld", "st")]
    if not aligned:
        assert found == [0, 0]
    elif use == "bf16_master":  # a thread takes 4 elements: 8 bytes of the gradient and the copy
        assert found == [3, 3]
        assert [ptx.count(f"{op}.global.v2.b32") for op in ("ld", "st")] == [1, 1]
    else:
        assert found == [4, 3]


@compiled
def test_compiled_for_hopper_advance_spills_nothing(tmp_path):
    pytest.importorskip("triton")
    from systems.kernels.adamw import kernel

    signature = {"table": "*i64", "scalars": "*fp32", "keys": "*u32", "n_rows": "i32"}
    made = compile_for_hopper(
        kernel.advance_kernel, signature, {"ROWS": kernel.ROWS}, 4, enable_fp_fusion=False
    )
    used = resources(made, tmp_path)
    assert used["STACK"] == used["LOCAL"] == 0
    assert "sqrt.rn.f64" in made.asm["ptx"]


# ---- on a GPU ------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("use", USES)
def test_gpu_against_float64(use):
    _check_against_float64(use, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("offset", [0, 3])
@pytest.mark.parametrize("n", [*SIZES, 1_000_003])
@pytest.mark.parametrize("use", USES)
def test_gpu_kernel_is_the_reference(use, n, offset):
    _check_kernel_against_reference(use, n, "cuda", offset)


@pytest.mark.gpu
@pytest.mark.parametrize("use", ["fp32", "bf16_master", "bf16"])
def test_gpu_block_size_changes_no_bit(use):
    results = []
    for block_size in (256, 1024, 4096):
        parameters = _parameters(USES[use][0], "cuda")
        optimizer = _make(use, parameters)
        optimizer.block_size = block_size
        for step in range(3):
            _set_grads(parameters, step)
            optimizer.step()
        results.append(optimizer)
    _assert_same(results[0], results[1])
    _assert_same(results[0], results[2])


@pytest.mark.gpu
@pytest.mark.parametrize("use", USES)
def test_gpu_replays_equal_eager_steps(use):
    eager, captured = _parameters(USES[use][0], "cuda"), _parameters(USES[use][0], "cuda")
    optimizer, other = _make(use, eager), _make(use, captured)
    _set_grads(captured, 0)
    other.prepare()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        other.step()
    assert all(int(other.state[p]["step"]) == 0 for p in captured)
    for step in range(5):
        for o in (optimizer, other):
            o.param_groups[0]["lr"] = 1e-2 / (step + 1)
        other.update_hyperparameters()
        _set_grads(eager, step)
        _set_grads(captured, step)
        optimizer.step()
        graph.replay()
    _assert_same(optimizer, other)
    # What is loaded is what the graph goes on with
    checkpoint = copy.deepcopy(optimizer.state_dict())
    values = [p.detach().clone() for p in eager]
    optimizer.step()
    graph.replay()
    graph.replay()
    other.load_state_dict(checkpoint)
    for p, value in zip(captured, values, strict=True):
        p.data.copy_(value)
    graph.replay()
    _assert_same(optimizer, other)


@pytest.mark.gpu
def test_gpu_a_graph_keeps_its_tables_whatever_eager_steps_make():
    parameters = _parameters(F32, "cuda")
    twins = [torch.nn.Parameter(p.detach().clone()) for p in parameters]
    optimizer, other = _make("fp32", parameters), _make("fp32", twins)
    _set_grads(parameters, 0)
    graphs_own = [p.grad for p in parameters]  # where the graph reads gradients
    optimizer.prepare()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    for p in parameters:
        p.grad = None
    _set_grads(parameters, 1)
    optimizer.step()
    filler = [torch.full((1 << 16,), -1, dtype=torch.int64, device="cuda") for _ in range(16)]
    graph.replay()
    _set_grads(twins, 1)
    other.step()
    for q, grad in zip(twins, graphs_own, strict=True):
        q.grad.copy_(grad)
    other.step()
    _assert_same(optimizer, other)
    del filler  # it would have overwritten tables that were freed


@pytest.mark.gpu
@pytest.mark.parametrize("what", ["nothing", "gradient", "lr", "state"])
def test_gpu_a_capture_that_is_not_prepared_is_refused(what):
    parameters = _parameters(F32, "cuda")
    optimizer = _make("fp32", parameters)
    _set_grads(parameters, 0)
    kept = parameters[1].grad
    if what == "state":
        parameters[1].grad = None
    if what != "nothing":
        optimizer.prepare()
    if what == "gradient":
        parameters[1].grad = kept.clone()
    elif what == "lr":
        optimizer.param_groups[0]["lr"] = 0.5
    elif what == "state":
        parameters[1].grad = kept
    told = {
        "nothing": "parameter 0 .* no state",
        "gradient": "moved since .*: gradient of parameter 1;",
        "lr": r"group 0 changed from \[0.01, .* to \[0.5,",
        "state": "parameter 1 .* no state",
    }
    with (
        pytest.raises(RuntimeError, match=told[what]),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        optimizer.step()


@pytest.mark.gpu
def test_gpu_eager_steps_never_wait_for_the_device():
    parameters = _parameters(BF16, "cuda")
    optimizer = _make("bf16_master", parameters)
    _set_grads(parameters, 0)
    optimizer.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for p in parameters:
            p.grad = p.grad.clone()
        optimizer.param_groups[0]["lr"] = 0.5
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_gpu_past_two_to_the_32_elements():
    n = (1 << 32) + 4097  # offsets past an int32, and random bits past the 32 of a counter
    if torch.cuda.mem_get_info()[0] < 9 * n:
        pytest.skip("needs 39 GB of GPU memory")
    param = torch.full((n,), 1.5, dtype=BF16, device="cuda")
    grad = torch.ones_like(param)
    moments = [torch.zeros_like(param) for _ in range(2)]
    step = torch.zeros((), dtype=torch.int64, device="cuda")
    options = {**HYPER, "stochastic_rounding": True, "seed": 1, "index": 0}
    fused_adamw(param, grad, *moments, None, step, **options)
    for place in (0, 1 << 31, 1 << 32):
        piece = slice(max(0, place - 5000), place + 4097)
        count = piece.stop - piece.start
        bits = random_bits(count, reference_module.key(1, 0, 1), start=piece.start)
        for tensor, value, drawn in (
            (param, 1.5 * (1 - 1e-3) - 1e-2, bits[0]),
            (moments[0], 0.1, bits[1]),
            (moments[1], 0.01, bits[2]),
        ):
            known = round_stochastically(torch.full((count,), value), drawn)
            # The last bit of float32 decides one in 2^16 roundings; other bits would change half
            assert (tensor[piece].cpu() != known).double().mean().item() < 1e-2
