"""Ranks of a process group: processes that run the tests marked `on_ranks` one after the other.

Importing torch takes longer than all tests together. So processes are forked from a server that has
imported it, and one process group serves all tests of a world_size.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

REPEATS = int(os.environ.get("REPEATS", "2"))
TIMEOUT_S = 60.0  # for a collective, in seconds; a correct case takes a fraction of a second
PATIENCE_S = 240.0  # for a case, with the start of all ranks, in seconds


class RankContext(NamedTuple):
    """Rank, world_size and device on which a case runs."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def backend(self) -> str:
        return "gloo" if self.device.type == "cpu" else "nccl"

    @property
    def tolerance(self) -> float:
        """Absolute and relative tolerance for weights after a few steps in float32.

        It is about 16 unit roundoffs: weights are about 1 and are rounded once per step, and
        gradients are summed in another order. On a GPU, which sums in blocks and fuses operations,
        it is ten times as large.
        """
        return 1e-6 if self.device.type == "cpu" else 1e-5


Case = Callable[..., Any]  # function (RankContext, *arguments) that is importable by name

# On two cores, four ranks take five times as long as two. They are for cases in which more ranks
# than a model has rows or tensors, or an uneven share, may matter.
TWO, THREE, FOUR = (pytest.param(("gloo", n), id=f"{n}_ranks") for n in (2, 3, 4))
GPUS = pytest.param(("nccl", 2), id="2_gpus", marks=pytest.mark.gpu)


def on_ranks(*groups: Any, repeats: int = REPEATS) -> Callable[[Case], Callable[..., None]]:
    """Return a decorator: every rank of each group runs the test, which gets its `RankContext`.

    A race may appear in only a few of many runs, so the test is repeated; the environment variable
    REPEATS sets the number of runs.
    """

    def decorate(case: Case) -> Callable[..., None]:
        @functools.wraps(case)
        def test(ranks: Ranks, **arguments: Any) -> None:
            ranks.assert_passes(test, repeats=repeats, **arguments)

        first, *others = inspect.signature(case).parameters.values()
        signature = inspect.Signature([first.replace(name="ranks"), *others])
        test.__signature__ = signature  # type: ignore[attr-defined]
        return pytest.mark.parametrize("ranks", groups, indirect=True)(test)

    return decorate


class Ranks:
    """Processes of a process group that run cases.

    A case that fails on one rank ends all processes. The next case then starts new ones.
    """

    def __init__(self, backend: str, world_size: int, timeout_s: float = TIMEOUT_S):
        self.backend, self.world_size, self.timeout_s = backend, world_size, timeout_s
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None  # folder of the file store

    def assert_passes(self, case: Case, repeats: int = 1, **arguments: Any) -> None:
        """Run the case on every rank, and fail with the traceback of every exception."""
        errors = [
            f"rank {rank} of {self.world_size}: {outcome}"
            for rank, outcome in enumerate(self.outcomes(case, repeats, **arguments))
            if outcome != "ok"
        ]
        if errors:
            raise AssertionError("\n".join(errors))

    def outcomes(self, case: Case, repeats: int = 1, **arguments: Any) -> list[str]:
        """Run the case on every rank and return how it ended on each.

        Returns:
            For each rank: "ok", a traceback, "died with exit code N", or "hangs".
        """
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            with contextlib.suppress(ConnectionError):  # _receive reports how it ended
                pipe.send((case, arguments, repeats))
        answers = self._receive()
        if any(answer != "ok" for answer in answers):
            self.close()
        return answers

    def _receive(self) -> list[str]:
        """Return the next message of each rank."""
        answers = ["hangs"] * self.world_size
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        deadline = time.monotonic() + PATIENCE_S
        while waiting and time.monotonic() < deadline:
            for pipe in wait(list(waiting), timeout=max(0, deadline - time.monotonic())):
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                try:
                    answers[rank] = pipe.recv()
                except (EOFError, ConnectionError):
                    self._processes[rank].join(10)
                    answers[rank] = f"died with exit code {self._processes[rank].exitcode}"
        return answers

    def close(self) -> None:
        for pipe in self._pipes:
            with contextlib.suppress(ConnectionError):
                pipe.send(None)
            pipe.close()
        deadline = time.monotonic() + 10
        for process in self._processes:
            process.join(max(0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        self._processes, self._pipes = [], []
        if self._folder is not None:
            self._folder.cleanup()

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        # torch.optim imports torch._dynamo on first use.
        context.set_forkserver_preload(
            ["pytest", "torch._dynamo", "tests.systems.parallel.parallel_models"]
        )
        self._folder = tempfile.TemporaryDirectory()
        store = str(Path(self._folder.name) / "store")
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            arguments = (self.backend, rank, self.world_size, self.timeout_s, store, theirs)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()  # so that this process detects when the rank exits
            self._processes.append(process)
            self._pipes.append(ours)


@contextlib.contextmanager
def world(backend: str, world_size: int, timeout_s: float = TIMEOUT_S) -> Iterator[Ranks]:
    """Start ranks for the block; skip the test if NCCL has no GPU."""
    if backend == "nccl" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    with contextlib.closing(Ranks(backend, world_size, timeout_s)) as ranks:
        yield ranks


def _serve(
    backend: str, rank: int, world_size: int, timeout_s: float, store: str, pipe: Connection
) -> None:
    """Main function of a rank: run cases until None is received."""
    try:
        here = _join(backend, rank, world_size, timeout_s, store)
        while (task := pipe.recv()) is not None:
            case, arguments, repeats = task
            for _ in range(repeats):
                inspect.unwrap(case)(here, **arguments)
            pipe.send("ok")
    except BaseException:
        with contextlib.suppress(ConnectionError):  # the test process has ended
            pipe.send(traceback.format_exc())
        os._exit(1)  # so that other ranks do not wait for this one
    dist.destroy_process_group()


def _join(backend: str, rank: int, world_size: int, timeout_s: float, store: str) -> RankContext:
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if backend == "nccl":
        gpus = torch.cuda.device_count()
        if gpus < world_size:  # without these, NCCL and symmetric memory refuse a shared GPU
            os.environ["NCCL_HOSTID"] = str(rank)
            os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
        device = torch.device("cuda", rank % gpus)
        torch.cuda.set_device(device)
        torch.backends.cudnn.allow_tf32 = False
    dist.init_process_group(
        backend,
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
        device_id=device if backend == "nccl" else None,
    )
    return RankContext(rank, world_size, device)
