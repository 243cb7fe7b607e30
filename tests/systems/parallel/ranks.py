"""Ranks of a process group: processes that run one test case after the other.

Importing torch takes longer than all cases together, so processes are forked from a server that has
done it, and one group serves every test of a world size. A race may show in one run of many, so
each case runs several times over: REPEATS in the environment says how often.
"""

from __future__ import annotations

import contextlib
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
TIMEOUT_S = 60.0  # of a collective; a case that is right takes a fraction of a second
PATIENCE_S = 120.0  # of a case, and of the start of all ranks
READY = "ready"


class RankContext(NamedTuple):
    """Where a case runs."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def backend(self) -> str:
        return "gloo" if self.device.type == "cpu" else "nccl"

    @property
    def tolerance(self) -> float:
        """For weights after a few steps in float32, absolute and relative: 16 unit roundoffs.
        Weights are about 1 and are rounded once a step; gradients are summed in another order. A
        GPU gets ten times as much: it sums in blocks and fuses operations."""
        return 1e-6 if self.device.type == "cpu" else 1e-5


Case = Callable[..., Any]  # (RankContext, *arguments), importable by name

# For what does not depend on how many there are: four ranks share two cores at five times the cost.
two_ranks = pytest.mark.parametrize(
    "ranks",
    [
        pytest.param(("gloo", 2), id="2_ranks"),
        pytest.param(("nccl", 2), id="2_gpus", marks=pytest.mark.gpu),
    ],
    indirect=True,
)


class Ranks:
    """A world of processes. A case that fails on one rank ends the world; the next call of `run`
    starts another."""

    def __init__(self, backend: str, world_size: int, timeout_s: float = TIMEOUT_S):
        self.backend, self.world_size, self.timeout_s = backend, world_size, timeout_s
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None  # of the store

    def assert_passes(self, case: Case, *arguments: Any, repeats: int = REPEATS) -> None:
        """Every rank runs the case; an exception on any of them fails with its traceback."""
        errors = [
            f"rank {rank} of {self.world_size}: {outcome}"
            for rank, outcome in enumerate(self.outcomes(case, *arguments, repeats=repeats))
            if outcome not in ("ok", READY)
        ]
        if errors:
            raise AssertionError("\n".join(errors))

    def assert_one_death_ends_all(self, case: Case, *arguments: Any) -> None:
        """Rank 1 exits with 9 in the case; the others hear of it before a collective times out."""
        start = time.monotonic()
        outcomes = self.outcomes(case, *arguments)
        assert time.monotonic() - start < TIMEOUT_S
        assert outcomes.pop(1) == "died with exit code 9"
        assert all("RuntimeError" in outcome for outcome in outcomes), outcomes

    def outcomes(self, case: Case, *arguments: Any, repeats: int = 1) -> list[str]:
        """How the case ended on each rank: ok, a traceback, "died with exit code N", or hangs;
        READY where another rank could not join."""
        answers = [READY] * self.world_size
        if not self._processes:
            self._start()
            answers = self._receive()
        if all(answer == READY for answer in answers):
            for pipe in self._pipes:
                with contextlib.suppress(ConnectionError):  # _receive says how it died
                    pipe.send((case, arguments, repeats))
            answers = self._receive()
        if any(answer != "ok" for answer in answers):
            self.close()
        return answers

    def _receive(self) -> list[str]:
        """The next message of each rank."""
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
            theirs.close()  # so that its end is seen here
            self._processes.append(process)
            self._pipes.append(ours)


@contextlib.contextmanager
def world(backend: str, world_size: int, timeout_s: float = TIMEOUT_S) -> Iterator[Ranks]:
    """Ranks for the tests inside; the test is skipped where NCCL has too few GPUs."""
    if backend == "nccl" and torch.cuda.device_count() < world_size:
        pytest.skip(f"needs {world_size} GPUs, {torch.cuda.device_count()} visible")
    ranks = Ranks(backend, world_size, timeout_s)
    try:
        yield ranks
    finally:
        ranks.close()


def _serve(
    backend: str, rank: int, world_size: int, timeout_s: float, store: str, pipe: Connection
) -> None:
    """The main function of a rank: sends READY, then runs cases until it receives None."""
    try:
        here = _join(backend, rank, world_size, timeout_s, store)
        pipe.send(READY)
        while (task := pipe.recv()) is not None:
            case, arguments, repeats = task
            for _ in range(repeats):
                case(here, *arguments)
            pipe.send("ok")
    except BaseException:
        with contextlib.suppress(ConnectionError):  # the tests have ended
            pipe.send(traceback.format_exc())
        os._exit(1)  # the others must not wait for a rank that has left the case
    dist.destroy_process_group()


def _join(backend: str, rank: int, world_size: int, timeout_s: float, store: str) -> RankContext:
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", rank)
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
