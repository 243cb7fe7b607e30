"""Tests of the all-reduce benchmark in one rank: its check, and its errors.

tests/test_studies.py runs it on two.
"""

from __future__ import annotations

import pytest
import torch

from systems.benchmark import WrongOutput
from systems.benchmarks.all_reduce import Params, run


def test_without_torchrun_it_says_what_to_set(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(RuntimeError, match="variables are not set: RANK, WORLD_SIZE, LOCAL_RANK;"):
        run(Params(backend="gloo", size_mb=1, world_size=2))


@pytest.fixture
def rank_of_one(monkeypatch):
    """Environment of torchrun for one rank."""
    environment = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    for name, value in (environment | {"MASTER_PORT": "0"}).items():  # 0: a free port
        monkeypatch.setenv(name, value)
    yield
    if torch.distributed.is_initialized():  # true after a run that failed
        torch.distributed.destroy_process_group()


def test_a_world_of_another_size_is_refused(rank_of_one):
    with pytest.raises(RuntimeError, match=r"world_size must be 1, .* got 2"):
        run(Params(backend="gloo", size_mb=1, world_size=2))


def test_one_rank_sums_with_itself(rank_of_one):
    facts = run(Params(backend="gloo", size_mb=1, world_size=1, measure_s=0.05))
    assert facts["bytes"]["latency"] == 10**6 and facts["bus_bytes"]["latency"] == 0
    assert len(facts["samples_ms"]["latency"]) >= 3


def test_a_single_wrong_sum_is_found(rank_of_one, monkeypatch):
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda buffer: buffer[-1].add_(1))
    with pytest.raises(WrongOutput, match=r"rank 0: .* a wrong sum for 1 of 250000 elements"):
        run(Params(backend="gloo", size_mb=1, world_size=1))
