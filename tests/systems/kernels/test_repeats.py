"""Tests of launches that are repeated for tensors at the same addresses."""

from __future__ import annotations

import torch

from systems.kernels import kernel_launch
from systems.kernels.kernel_launch import Repeats


def launches(repeats: Repeats, log: list[str], name: str, *tensors: torch.Tensor, stream: int = 0):
    def launch():
        log.append(f"new {name}")
        return [lambda: log.append(f"repeat {name}")]

    repeats(stream, tensors, launch)


def test_repeats_only_at_the_same_addresses_on_the_same_stream():
    x, y = torch.zeros(2, 8)
    repeats, log = Repeats(), []
    launches(repeats, log, "a", x, y)
    launches(repeats, log, "", x, y)
    launches(repeats, log, "b", y, x)
    launches(repeats, log, "c", x, y, stream=1)
    launches(Repeats(), log, "d", x, y)
    launches(repeats, log, "", x, y, stream=1)
    assert log == ["new a", "repeat a", "new b", "new c", "new d", "repeat c"]


def test_a_first_launch_is_not_repeated():
    x, log = torch.zeros(8), []
    repeats = Repeats()
    for _ in range(2):
        repeats(0, [x], lambda: log.append("new") or [log.clear, None])
    assert log == ["new", "new"]


def test_forgets_launches_at_a_limit(monkeypatch):
    monkeypatch.setattr(kernel_launch, "MAX_REPEATS", 3)
    monkeypatch.setattr(kernel_launch, "_repeats", {})
    x, repeats, log = torch.zeros(64), Repeats(), []
    for i in range(5):
        launches(repeats, log, str(i), x[i:])
        assert len(kernel_launch._repeats) <= 3
    launches(repeats, log, "", x[4:])
    assert log[-1] == "repeat 4"
