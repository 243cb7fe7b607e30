"""Tests of the FusedAdamW kernel in Triton's interpreter, against its reference."""

from __future__ import annotations

import pytest
import torch

from systems.kernels.adamw import FusedAdamW
from systems.kernels.adamw.kernel import Tables
from systems.kernels.adamw.reference import Operands, adamw_reference
from tests.systems.kernels.adamw_cases import (
    BF16,
    F16,
    F32,
    HYPER,
    MISFITS,
    USES,
    assert_against_float64,
    assert_kernel_is_reference,
    assert_misfit_is_refused,
    assert_same,
    hyper_tensor,
    make_optimizer,
    make_parameters,
    randn,
    set_grads,
)


@pytest.mark.parametrize("use", USES)
def test_kernel_is_the_reference(use):
    for n, offset in [(1, 0), (1023, 0), (1025, 3), (2049, 0), (0, 0)]:
        assert_kernel_is_reference(use, n, "cpu", offset)


@pytest.mark.slow
@pytest.mark.depends
@pytest.mark.parametrize("use", ["fp32", "bf16"])
def test_optimizer_against_float64(use):
    assert_against_float64(use, "cpu")


def test_step_takes_mixed_dtypes_moving_gradients_and_groups():
    """A table with three kernel variants, one of them unaligned, gives the reference's results."""

    def parameters():
        unaligned = torch.nn.Parameter(randn(1030, 4, F32)[1:])
        return [*make_parameters(F32)[:3], *make_parameters(F16), unaligned]

    ours, known = parameters(), parameters()
    optimizers = [
        FusedAdamW([{"params": p[:4]}, {"params": p[4:], "lr": 0.5, "seed": 3}], **HYPER)
        for p in (ours, known)
    ]
    kept = []  # keeps old gradients alive, so that new ones have other addresses
    for step in range(5):
        for p in (ours, known):
            if step != 3:
                kept.append([q.grad for q in p])
                for q in p:
                    q.grad = None
            set_grads(p, step)
            if step == 2:
                p[1].grad = None
        optimizers[0].step()
        for index, p in enumerate(known):
            if p.grad is None:
                continue
            group = optimizers[1].param_groups[index >= 4]
            state = optimizers[1].state[p] or optimizers[1]._new_state(p, group)
            hyper = hyper_tensor(**{name: group[name] for name in HYPER})
            adamw_reference(
                Operands(
                    p, p.grad, state["exp_avg"], state["exp_avg_sq"], state.get("master"),
                    state["step"], hyper, stream=0, stochastic=False,
                )
            )  # fmt: skip
    assert_same(*optimizers)
    assert len(optimizers[0]._tables[torch.device("cpu")].updates) == 3


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


@pytest.mark.slow
@pytest.mark.depends
def test_prepare_changes_no_parameter():
    parameters = make_parameters(BF16)
    set_grads(parameters, 0)
    before = [p.detach().clone() for p in parameters]
    optimizer = make_optimizer("bf16", parameters)
    optimizer.prepare()
    assert all(torch.equal(p, b) for p, b in zip(parameters, before, strict=True))
    assert all(int(optimizer.state[p]["step"]) == 0 for p in parameters)


def test_tables_are_kept_until_an_address_changes(monkeypatch):
    made = []
    init = Tables.__init__

    def count(*args, **kwargs):
        made.append(1)
        init(*args, **kwargs)

    monkeypatch.setattr(Tables, "__init__", count)
    parameters = make_parameters(F32)
    optimizer = make_optimizer("fp32", parameters)
    for step in range(3):
        set_grads(parameters, step)
        optimizer.step()
    assert len(made) == 1
    parameters[0].grad = parameters[0].grad.clone()
    optimizer.step()
    assert len(made) == 2
