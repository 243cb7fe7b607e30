"""Before two trainings with the user's attention are compared, the attention is checked."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from systems.benchmark import WrongOutput
from systems.benchmarks import data_parallel, fsdp, sharded_optimizer
from systems.check.parallel_training import check_own_attention
from systems.training.parallel_params import ParallelParams
from tests.systems.training.tiny_training import CPU, PARALLEL


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "own.py"
    path.write_text(
        "from systems.kernels.flash_attention import naive\n"
        "def right(q, k, v, is_causal): return naive(q, k, v, is_causal)\n"
        "def wrong(q, k, v, is_causal): return naive(q, k, v, is_causal) * 1.01\n"
    )
    return path


def test_right_attention_passes(own: Path) -> None:
    check_own_attention(ParallelParams(attention=f"{own}:right", **PARALLEL), CPU)


@pytest.mark.parametrize(
    ("benchmark", "strategy"),
    [(data_parallel, "naive"), (fsdp, "blocks"), (sharded_optimizer, "sharded")],
)
def test_wrong_attention_is_not_measured(own: Path, benchmark: ModuleType, strategy: str) -> None:
    params = benchmark.Params(attention=f"{own}:wrong", strategy=strategy, **PARALLEL)
    with pytest.raises(WrongOutput, match=r"own\.py:wrong: relative L2 error"):
        benchmark.measure(params, CPU)
