"""Tests of the all-reduce benchmark's check and of its errors. tests/jobs has tests that run it."""

from __future__ import annotations

import pytest
import torch

from systems.benchmarks.all_reduce import PERIOD, Params, _count_wrong, _fill, run


# The last is more than one piece, and more than the integers that float32 represents.
@pytest.mark.parametrize("elements", [1, PERIOD, 2**24 + 12_345])
def test_the_check_finds_a_single_wrong_sum(elements):
    buffer = torch.empty(elements)
    _fill(buffer, 21)  # the sum of six ranks: 1 + ... + 6
    exact = torch.arange(elements).remainder(PERIOD) * 21
    assert torch.equal(buffer.long(), exact)
    assert _count_wrong(buffer, 21) == 0
    assert _count_wrong(buffer, 15) == int((buffer != 0).sum())
    buffer[-1] += 1
    assert _count_wrong(buffer, 21) == 1


def test_sums_of_the_pattern_are_exact():
    parts = []
    for rank in range(6):
        part = torch.empty(5000)
        _fill(part, rank + 1)
        parts.append(part)
    assert _count_wrong(torch.stack(parts).sum(0), 21) == 0


def test_without_torchrun_it_says_what_to_set(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(RuntimeError, match="variables are not set: RANK, WORLD_SIZE, LOCAL_RANK;"):
        run(Params(backend="gloo", size_mb=1, world_size=2))


@pytest.fixture
def rank_of_one(monkeypatch):
    """Environment of torchrun for one rank, with a store on a port that the system chooses."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # connect to the existing store
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    yield
    if torch.distributed.is_initialized():  # true after a run that failed
        torch.distributed.destroy_process_group()
    del store


def test_a_world_of_another_size_is_refused(rank_of_one):
    with pytest.raises(RuntimeError, match=r"world_size must be 1, .* got 2"):
        run(Params(backend="gloo", size_mb=1, world_size=2))


def test_one_rank_sums_with_itself(rank_of_one):
    facts = run(Params(backend="gloo", size_mb=1, world_size=1, measure_s=0.05))
    assert facts["bytes"]["latency"] == 10**6 and facts["bus_bytes"]["latency"] == 0
    assert len(facts["samples_ms"]["latency"]) >= 3
