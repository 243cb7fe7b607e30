"""Gradients that change between synchronization and the update are found, whatever the timing."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from systems.benchmark import WrongOutput
from systems.check import late_gradients


@pytest.mark.parametrize(
    ("at_finish", "at_update"),
    [(1.0, 2.0), (1.0, None), (None, 1.0)],
    ids=["changed", "disappeared", "appeared"],
)
def test_a_late_gradient_is_named(at_finish, at_update, monkeypatch) -> None:
    monkeypatch.setattr(late_gradients, "all_gather_objects", lambda value: [value])
    layer = torch.nn.Linear(2, 1)
    layer.weight.grad = torch.ones(1, 2)

    def set_gradient(value: float | None) -> None:
        layer.bias.grad = None if value is None else torch.full((1,), value)

    training = SimpleNamespace(
        wrapper=layer,
        synchronize_gradients=lambda: set_gradient(at_finish),
        optimizer_step=lambda: None,
    )
    late_gradients.watch_gradients(training)
    for late in (at_finish, at_update):
        training.synchronize_gradients()
        set_gradient(late)
        if late is at_finish:
            training.optimizer_step()
        else:
            with pytest.raises(WrongOutput, match="rank 0: bias"):
                training.optimizer_step()
