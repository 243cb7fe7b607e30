"""FusedAdamW on a CPU, with `adamw_reference`: options, state; steps against float64 AdamW."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from systems.kernels.adamw import FusedAdamW
from tests.systems.kernels.adamw_cases import (
    BF16,
    F16,
    F32,
    HYPER,
    MISFITS,
    USES,
    assert_against_float64,
    assert_misfit_is_refused,
    assert_same,
    make_optimizer,
    make_parameters,
    parameters_of,
    randn,
    set_grads,
    take_steps,
)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("use", USES)
def test_ten_steps_against_float64(use, device):
    assert_against_float64(use, device)


def test_groups_have_their_own_options_and_missing_gradients_stand_still():
    def groups(parameters):
        return [
            {"params": parameters[:2], "lr": 0.1, "weight_decay": 0.0},
            {"params": parameters[2:], "betas": (0.5, 0.9), "eps": 1e-3},
        ]

    ours = make_parameters(F32)
    exact = [torch.nn.Parameter(p.detach().double()) for p in ours]
    optimizer = FusedAdamW(groups(ours), **HYPER)
    other = torch.optim.AdamW(groups(exact), **HYPER)
    for step in range(6):
        optimizer.param_groups[0]["lr"] = other.param_groups[0]["lr"] = 0.1 / (step + 1)
        set_grads(ours, step)
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


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("way", ["fresh", "in place", "torch.save", "pickle"])
def test_a_loaded_optimizer_goes_on_alike(use, way, tmp_path):
    optimizer, other = make_optimizer(use, seed=5), make_optimizer(use)
    take_steps(optimizer, range(3))
    if way == "pickle":
        other = pickle.loads(pickle.dumps(optimizer))
    else:
        if way == "in place":
            take_steps(other, [99])
        for p, q in zip(parameters_of(other), parameters_of(optimizer), strict=True):
            p.data.copy_(q.data)
        places = {
            (p, name): x.data_ptr() for p, state in other.state.items() for name, x in state.items()
        }
        state_dict = optimizer.state_dict()
        if way == "torch.save":
            torch.save(state_dict, tmp_path / "state.pt")
            state_dict = torch.load(tmp_path / "state.pt", weights_only=True)
        other.load_state_dict(state_dict)
        assert all(other.state[p][name].data_ptr() == at for (p, name), at in places.items())
    assert_same(optimizer, other)
    take_steps(optimizer, range(3, 6))
    take_steps(other, range(3, 6))
    assert_same(optimizer, other)


def test_the_state_of_torchs_adamw_loads():
    theirs = [torch.nn.Parameter(p.detach().float()) for p in make_parameters(BF16)]
    other = torch.optim.AdamW(theirs, **HYPER)
    take_steps(other, [0])
    ours = [torch.nn.Parameter(p.detach().bfloat16()) for p in theirs]
    optimizer = FusedAdamW([{"params": ours, "seed": 7}])
    optimizer.load_state_dict(other.state_dict())
    for p, q in zip(ours, theirs, strict=True):
        assert torch.equal(optimizer.state[p]["exp_avg"], other.state[q]["exp_avg"])
        assert torch.equal(optimizer.state[p]["master"], p.float())
        assert int(optimizer.state[p]["step"]) == 1
    assert optimizer.param_groups[0]["lr"] == HYPER["lr"]
    assert optimizer.param_groups[0]["seed"] == 7  # an option that torch's does not have


THEIRS = {
    "foreach": {"foreach": True},
    "loop": {"foreach": False},
    "fused": {"fused": True},
    "tensors": {"lr": torch.tensor(1e-2), "betas": (torch.tensor(0.9), torch.tensor(0.99))},
}


@pytest.mark.parametrize("options", THEIRS)
@pytest.mark.parametrize("after", [(FusedAdamW,), (FusedAdamW, torch.optim.AdamW)])
def test_training_goes_on_with_the_state_of_the_other_optimizer(options, after):
    """From torch to this optimizer, and back."""
    theirs, ours = make_parameters(F32), make_parameters(F32)
    kept = torch.optim.AdamW(theirs, **{**HYPER, **THEIRS[options]})
    now = torch.optim.AdamW(ours, **{**HYPER, **THEIRS[options]})
    for step, kind in enumerate((None, *after)):
        if kind is not None:
            old, now = now, kind(ours)
            now.load_state_dict(old.state_dict())
        take_steps(kept, [step])
        take_steps(now, [step])
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    assert now.param_groups[0]["lr"] == pytest.approx(HYPER["lr"])


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (torch.optim.AdamW, {"amsgrad": True, "maximize": True}, "amsgrad is.*maximize is not"),
        (torch.optim.AdamW, {"differentiable": True}, "differentiable is not supported"),
        (torch.optim.Adam, {"weight_decay": 0.1}, "decoupled_weight_decay=False is not"),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(kind, options, message):
    optimizer = make_optimizer("bf16")
    take_steps(optimizer, [0])
    before, groups = copy.deepcopy(optimizer), optimizer.state_dict()["param_groups"]
    wrong = kind(parameters_of(optimizer), **options).state_dict()
    wrong["state"] = {1: {"exp_avg": torch.zeros(7)}}
    with pytest.raises(ValueError, match=f"{message}.*; exp_avg of parameter 1 must"):
        optimizer.load_state_dict(wrong)
    assert_same(optimizer, before)
    assert optimizer.state_dict()["param_groups"] == groups


def test_adam_without_weight_decay_is_adamw():
    p = torch.nn.Parameter(torch.ones(2))
    optimizer = FusedAdamW([p], lr=0.5)
    optimizer.load_state_dict(torch.optim.Adam([p], lr=0.25).state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert optimizer.param_groups[0]["weight_decay"] == 0


def test_a_loaded_state_goes_where_the_parameter_is():
    """The model has moved or grown, and an old version of torch saved the step as a vector."""
    p, q = (torch.nn.Parameter(torch.ones(n, 2)) for n in (2, 3))
    optimizer, other = FusedAdamW([p]), FusedAdamW([q])
    take_steps(optimizer, [0])
    take_steps(other, [0])
    state_dict = other.state_dict()
    p.data = q.data.clone()
    state = optimizer.state[p]
    state["step"] = state["step"].to("meta")
    given = state_dict["state"][0]
    given["step"] = given["step"].float().reshape(1)
    optimizer.load_state_dict(state_dict)
    assert_same(optimizer, other)
    del given["step"]
    with pytest.raises(ValueError, match=r"step of parameter 0 must .* \(\), got no tensor"):
        optimizer.load_state_dict(state_dict)


@pytest.mark.parametrize("change", MISFITS)
def test_a_tensor_that_does_not_fit_its_parameter_is_named(change):
    assert_misfit_is_refused(change)


@pytest.mark.parametrize(
    "options",
    [
        {"lr": 0.0},
        {"weight_decay": 0.0},
        {"eps": 0.0},
        {"betas": (0.0, 0.0)},
        {"lr": torch.tensor(1e-2)},
        {"lr": 1e-30},
    ],
)
def test_a_schedule_and_a_gradient_scaler_work_as_in_torch(options):
    """Steps with infinite gradients are skipped. A schedule changes an lr tensor in place."""
    results = []
    for kind in (FusedAdamW, torch.optim.AdamW):
        first, second = (torch.nn.Parameter(randn(9, i, F32)) for i in range(2))
        groups = [
            {"params": [first], **copy.deepcopy(options)},
            {"params": [second], "lr": torch.tensor(0.1)},
        ]
        optimizer, calls = kind(groups), []
        optimizer.register_step_post_hook(lambda *_, calls=calls: calls.append(1))
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for factor in (1.0, float("inf"), -3.0, float("nan"), 2.0):
            optimizer.zero_grad()
            scaler.scale((first**2).sum() * factor + second.sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
        results.append((first, second))
        assert len(calls) == int(optimizer.state[first]["step"]) == 3
    for ours, known in zip(*results, strict=True):
        torch.testing.assert_close(ours, known, rtol=1e-5, atol=1e-6)


def test_masters_keep_what_the_cast_lost():
    exact = randn(1000, 0, F32)
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
    for part in (
        "master of parameter 0 must be torch.float32 of shape (3,)",
        "master of parameter 1 must be none, got",
        "master of a tensor that is not a parameter must be none, got",
    ):
        assert part in str(error.value)
    assert not optimizer.state


def test_all_options_that_are_not_valid_are_named():
    parameters = [
        torch.nn.Parameter(torch.ones(2, dtype=torch.float64)),
        torch.nn.Parameter(torch.ones(2, dtype=torch.complex64)),
        torch.nn.Parameter(torch.ones(1, 2, 3, 3).to(memory_format=torch.channels_last)),
        torch.nn.Parameter(TwoTensor(torch.ones(2), torch.ones(2))),  # as a DTensor
    ]
    with pytest.raises(ValueError) as error:
        FusedAdamW(
            parameters, lr=-1.0, betas=(0.9, 1.0), eps=torch.ones(()), state_dtype=F16, seed=-1
        )
    parts = ("lr", "betas", "eps", "state_dtype", "seed", "float64", "complex64")
    for part in (*parts, "strides (18, 1, 6, 2)", "TwoTensor; give its local tensor"):
        assert part in str(error.value)


def test_a_group_that_is_not_valid_is_not_added():
    optimizer = FusedAdamW([torch.nn.Parameter(torch.ones(2))])
    with pytest.raises(ValueError, match="lr must be"):
        optimizer.add_param_group({"params": torch.nn.Parameter(torch.ones(2)), "lr": -1})
    assert len(optimizer.param_groups) == 1
