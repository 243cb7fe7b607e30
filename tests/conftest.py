"""Which tests run, in which order and process; fixtures of all tests."""

from __future__ import annotations

import functools
import math
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.register_assert_rewrite("tests.systems.kernels.adamw_cases")
if TYPE_CHECKING:
    from torch import Tensor

if "PYTEST_XDIST_WORKER" in os.environ:
    # Several processes share the processor. OpenMP's threads wait for each other by spinning: where
    # they do not run at once, two of them took nine times the processor time of one.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
if "ATEN_CPU_CAPABILITY" in os.environ:
    # torch.compile's cache does not tell apart code that it made for different vector units
    cache = f"torchinductor_{os.getuid()}_{os.environ['ATEN_CPU_CAPABILITY']}"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(tempfile.gettempdir(), cache)))
# With each empty cache torch.compile builds six programs, in 13 s, to learn what the processor's
# flags say.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

INTERPRETED = Path(__file__).parent / "interpreted"

# Files that begin first, the longest ones: some mostly wait, some compute. One of those that share
# ranks stands for all of them.
FIRST = [
    "test_slurm.py",
    "test_flash_pytorch.py",
    "test_fsdp.py",
    "test_stop.py",
    "test_gradient_check.py",
    "test_torchrun.py",
    "test_memory.py",
    "test_local.py",
    "test_worker.py",
]
# Files without anything that is shared by their tests and takes long to make
INDEPENDENT = (
    "tests/interpreted/",
    "tests/systems/kernels/test_flash_hopper",
    "tests/systems/kernels/test_flash_margins.py",
    "tests/systems/kernels/test_flash_triton_gpu.py",
    "tests/systems/training/test_training_gpu.py",
    "tests/test_studies.py",
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the interpreted tests, or all others: Triton decides at import whether it
    interprets, so a process runs one kind. Run what takes long first."""
    interprets = os.environ.get("TRITON_INTERPRET") == "1"
    others = [item for item in items if item.path.is_relative_to(INTERPRETED) != interprets]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if item.path.is_relative_to(INTERPRETED) == interprets]
    places = {name: place for place, name in enumerate(FIRST)}
    items.sort(key=lambda item: places.get(item.path.name, len(FIRST)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Where several processes share the tests (make test), one of them has all of a file, and
    all of the files whose tests need the same ranks."""
    from xdist.scheduler import LoadScopeScheduling

    config.option.loadscopereorder = False  # by the number of tests

    scheduler = LoadScopeScheduling(config, log)
    scheduler._split_scope = _scope
    return scheduler


def _scope(nodeid: str) -> str:
    """What the tests that one process runs have in common."""
    if nodeid.startswith(INDEPENDENT):
        return nodeid
    file = nodeid.partition("::")[0]
    return "ranks" if _needs_ranks(file) else file


@functools.cache
def _needs_ranks(file: str) -> bool:
    return "(ranks" in (Path(__file__).parents[1] / file).read_text()


@pytest.fixture
def outputs_hold_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill new tensors with NaN, so that what a kernel does not write shows."""
    import torch

    makers = [(torch, name) for name in ("empty", "empty_like", "empty_strided")]
    for owner, name in (*makers, (torch.Tensor, "new_empty_strided")):
        monkeypatch.setattr(owner, name, _filled_with_nan(getattr(owner, name)))


def _filled_with_nan(empty: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def filled(*args: Any, **kwargs: Any) -> Tensor:
        tensor = empty(*args, **kwargs)
        if tensor.is_floating_point() and not tensor.is_meta:
            tensor.detach().fill_(math.nan)  # torch 2.11 asks for leaves under a checkpoint
        return tensor

    return filled
