"""Tests of the FusedAdamW kernel in Triton's interpreter, against its reference."""

from __future__ import annotations

import pytest
import torch

from systems.kernels.adamw import FusedAdamW
from tests.systems.kernels.adamw_cases import (
    BF16,
    F16,
    F32,
    HYPER,
    MISFITS,
    USES,
    assert_kernel_is_reference,
    assert_misfit_is_refused,
    assert_same,
    make_optimizer,
    make_parameters,
    randn,
    set_grads,
)

CPU = torch.device("cpu")


@pytest.mark.parametrize("use", USES)
def test_kernel_is_the_reference(use):
    for n, offset in [(1, 0), (1023, 0), (1025, 3), (2049, 0), (0, 0)]:
        assert_kernel_is_reference(use, n, "cpu", offset)


def test_step_takes_mixed_dtypes_moving_gradients_and_groups(monkeypatch):
    """A table with four kernel variants, one of them unaligned, gives the reference's results."""

    def optimizer():
        unaligned = torch.nn.Parameter(randn(1030, 4, F32)[1:])
        groups = [
            {"params": [*make_parameters(F32)[:3], *make_parameters(F16)[:1]]},
            {"params": [*make_parameters(F16), unaligned], "lr": 0.5},
            {"params": make_parameters(BF16), "state_dtype": BF16, "seed": 3},
        ]
        return FusedAdamW(groups, **HYPER)

    ours, known = optimizer(), optimizer()
    kept = []  # keeps old gradients alive, so that new ones have other addresses
    for step in range(5):
        for one in (ours, known):
            parameters = [p for group in one.param_groups for p in group["params"]]
            if step != 3:
                kept.append([p.grad for p in parameters])
                one.zero_grad()
            set_grads(parameters, step)
            if step == 2:
                parameters[1].grad = None
        if step % 2 == 0:
            ours.prepare()  # changes no parameter
        tables = ours._tables[CPU]
        ours.step()
        assert (ours._tables[CPU] is tables) == (step % 2 == 0)  # until an address changes
        with monkeypatch.context() as patch:
            patch.setattr("systems.kernels.adamw.optimizer.runs_kernels", lambda device: False)
            known.step()
    assert_same(ours, known)
    assert len(ours._tables[CPU].updates) == 4


@pytest.mark.parametrize("view", [lambda x: torch._neg_view(-x), lambda x: x.t().contiguous().t()])
def test_a_gradient_that_is_a_view_is_taken_as_it_is_meant(view):
    ours, known = (torch.nn.Parameter(torch.ones(3, 4)) for _ in range(2))
    known.grad = randn(12, 1, F32).view(3, 4)
    ours.grad = view(known.grad)
    FusedAdamW([ours]).step()
    FusedAdamW([known]).step()
    assert torch.equal(ours, known)


def test_default_dtype_and_device_change_nothing():
    optimizers = []
    for dtype, device in ((F32, "cpu"), (BF16, "meta")):
        parameters = make_parameters(F32)
        set_grads(parameters, 0)
        optimizers.append(make_optimizer("fp32", parameters))
        torch.set_default_dtype(dtype)
        try:
            with torch.device(device):
                optimizers[-1].step()
        finally:
            torch.set_default_dtype(F32)
    assert_same(*optimizers)


@pytest.mark.parametrize("change", MISFITS)
def test_a_tensor_that_does_not_fit_its_parameter_is_named(change):
    assert_misfit_is_refused(change)


def test_a_backward_with_the_weights_of_before_a_step_is_refused():
    weight = torch.nn.Parameter(randn(4, 0, F32))
    loss = weight.square().sum()
    weight.grad = torch.ones(4)
    FusedAdamW([weight]).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
