"""Selection, order and distribution of the tests, and fixtures for all tests."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests import unchanged

pytest.register_assert_rewrite("tests.systems.kernels.adamw_cases")
if TYPE_CHECKING:
    from torch import Tensor

    from tests.jobs.launch.slurm_cluster import SlurmCluster

if "PYTEST_XDIST_WORKER" in os.environ:
    # Several processes share the CPU. OpenMP threads wait for each other by spinning, which wastes
    # CPU time if there are fewer cores than threads.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
if "ATEN_CPU_CAPABILITY" in os.environ:
    # The cache of torch.compile does not distinguish code for different vector instruction sets.
    cache = f"torchinductor_{os.getuid()}_{os.environ['ATEN_CPU_CAPABILITY']}"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(tempfile.gettempdir(), cache)))
if not os.access(Path.home(), os.W_OK):  # as in some containers
    os.environ.setdefault("TRITON_HOME", f"{tempfile.gettempdir()}/triton_{os.getuid()}")
# Otherwise torch.compile compiles six test programs (13 s) for each empty cache, to find out which
# vector instructions the CPU has.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

# Tests submit from the project's root folder. The user's last submission must not change, also not
# if the tests are killed.
os.environ["JOBS_LATEST_NAME"] = ".latest-of-tests.json"

# A shell without job control starts background commands with SIGINT ignored, nohup with SIGHUP, and
# their processes inherit this. Commands that tests interrupt would then not stop. A handler is not
# inherited.
if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: None)

with contextlib.suppress(ModuleNotFoundError):  # the tests of kernels on a GPU need none
    from hypothesis import HealthCheck, settings

    # A busy machine makes any example slow.
    settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("busy")

INTERPRETED = Path(__file__).parent / "interpreted"

# The files that take longest, which start first. Some of them mostly wait, others compute. Of the
# files that share ranks, one is enough here, because all run in the same process.
FIRST = [
    "test_slurm.py",
    "test_slurm_interruptions.py",
    "test_studies.py",
    "test_flash_pytorch.py",
    "test_fsdp.py",
    "test_stop.py",
    "test_gradients.py",
    "test_torchrun.py",
    "test_memory.py",
    "test_local.py",
    "test_worker.py",
]
# Files whose tests share no expensive fixture, so that their tests can run in different processes
INDEPENDENT = (
    "tests/interpreted/",
    "tests/systems/kernels/test_flash_hopper",
    "tests/systems/kernels/test_flash_margins.py",
    "tests/systems/kernels/test_flash_random.py",
    "tests/systems/kernels/test_flash_triton_gpu.py",
    "tests/systems/training/test_training_gpu.py",
    "tests/test_examples.py",
    "tests/test_studies.py",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    unchanged.add_option(parser)


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption(unchanged.OPTION) == "record" and not hasattr(config, "workerinput"):
        config.pluginmanager.register(unchanged.Recorder())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Select interpreted or compiled tests, and run the longest files first.

    Triton decides when it is imported whether it interprets kernels, so one process cannot run both
    kinds of tests.
    """
    interprets = os.environ.get("TRITON_INTERPRET") == "1"
    others = [item for item in items if item.path.is_relative_to(INTERPRETED) != interprets]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if item.path.is_relative_to(INTERPRETED) == interprets]
    unchanged.skip_unchanged(config, items)
    places = {name: place for place, name in enumerate(FIRST)}
    items.sort(key=lambda item: places.get(item.path.name, len(FIRST)))


@pytest.fixture(autouse=True)
def gpu_memory_for_other_processes(request: pytest.FixtureRequest) -> Iterator[None]:
    """Return free GPU memory after a test, because processes of xdist share the GPU."""
    yield
    if request.node.get_closest_marker("gpu"):
        import torch

        torch.cuda.empty_cache()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Distribute the tests over several processes (make test), whole files at a time.

    All files whose tests need ranks go to the same process, and so do those that need the Slurm
    cluster. The tests of `INDEPENDENT` files are distributed one by one.
    """
    from xdist.scheduler import LoadScopeScheduling

    config.option.loadscopereorder = False  # do not sort the files by their number of tests

    scheduler = LoadScopeScheduling(config, log)
    scheduler._split_scope = _scope
    return scheduler


def _scope(nodeid: str) -> str:
    """Return the scope of a test. All tests of a scope run in the same process."""
    if nodeid.startswith(INDEPENDENT):
        return nodeid
    file = nodeid.partition("::")[0]
    return _shared(file) or file


@functools.cache
def _shared(file: str) -> str | None:
    """Return the name of the session fixture that the tests of a file share, if there is one."""
    text = (Path(__file__).parents[1] / file).read_text()
    words = {"ranks": "parallel.ranks import", "slurm": "mark.slurm"}
    return next((name for name, word in words.items() if word in text), None)


@pytest.fixture(scope="session")
def slurm_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """A real Slurm cluster of three emulated nodes, the same for all test files of a process.

    If no cluster can be started on this machine, the test is skipped, or fails if REQUIRE_SLURM=1.
    """
    from tests.jobs.launch.slurm_cluster import SlurmCluster, unsupported_reason

    reason = unsupported_reason()
    if reason is not None:
        if os.environ.get("REQUIRE_SLURM") == "1":
            pytest.fail(f"REQUIRE_SLURM=1, but no cluster can be started: {reason}")
        pytest.skip(reason)
    with SlurmCluster(tmp_path_factory.mktemp("slurm"), max_array_size=3) as cluster:
        yield cluster


@pytest.fixture
def outputs_hold_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill new tensors with NaN, so that elements that a kernel fails to write are noticed."""
    import torch

    makers = [(torch, name) for name in ("empty", "empty_like", "empty_strided")]
    for owner, name in (*makers, (torch.Tensor, "new_empty_strided")):
        monkeypatch.setattr(owner, name, _filled_with_nan(getattr(owner, name)))


@pytest.fixture
def blocks_of_96_keys(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let `d192_backward_kernel` compute all gradients that it can, also where it is slower."""
    from systems.kernels.flash_attention.hopper import backward_launch

    monkeypatch.setattr(backward_launch, "D192_STEP_TIME", 0.0)
    backward_launch._backward_plan.cache_clear()
    yield
    backward_launch._backward_plan.cache_clear()


def _filled_with_nan(empty: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def filled(*args: Any, **kwargs: Any) -> Tensor:
        tensor = empty(*args, **kwargs)
        if tensor.is_floating_point() and not tensor.is_meta:
            tensor.detach().fill_(math.nan)  # checkpointing in torch 2.11 needs leaf tensors
        return tensor

    return filled
