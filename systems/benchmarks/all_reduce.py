"""All-reduce by backend, size and number of ranks: latency of one call, bandwidth of many.

python -m jobs.submit sweeps/all_reduce.yaml --local --filter 'backend == gloo'
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from systems.benchmark import BenchmarkParams, WrongOutput

if TYPE_CHECKING:
    import torch

VERSION = 1
PERIOD = 1009  # of the pattern that is summed
PIECE = PERIOD * 10_000  # elements that are filled or checked at once
GLOO_BYTES = 256 * 10**6  # of buffers for calls in flight
Positive = Annotated[int, Field(ge=1)]


class Params(BenchmarkParams):
    """One float32 all-reduce, summed in place."""

    backend: Literal["gloo", "nccl"]
    size_mb: Positive  # MB = 10^6 bytes
    world_size: Positive
    samples: Positive = 50  # at most; fewer, but at least 3, where they would take over measure_s
    # Calls issued back to back in one throughput sample, likewise
    in_flight: Annotated[int, Field(ge=2)] = 20
    measure_s: Annotated[float, Field(gt=0)] = 2.0  # for each of the two phases


def run(params: Params) -> dict[str, Any]:
    """Return this rank's facts. Phases: `latency`, one call after a barrier; `throughput`, the time
    per call of many issued back to back. `in_flight` is how many of them can run at once: all with
    NCCL, with Gloo those that fit in GLOO_BYTES of buffers.

    `bytes` is the buffer's size, so bandwidth is nccl-tests' algorithm bandwidth; `bus_bytes`
    gives its bus bandwidth (nccl-tests, doc/PERFORMANCE.md).

    Raises:
        WrongOutput: a sum is wrong.
        RuntimeError: the number of processes is not `world_size`.
    """
    import torch

    from systems import accounting
    from systems.measure.ranks import rank_process_group

    size = params.size_mb * 10**6
    # NCCL runs calls in the order of its stream, so they can share one buffer, as nccl-tests does.
    # Gloo runs them on threads: each call in flight needs a buffer of its own.
    copies = 1 if params.backend == "nccl" else max(1, min(params.in_flight, GLOO_BYTES // size))
    with rank_process_group(params.backend, params.world_size) as device:
        buffers = [torch.empty(size // 4, device=device) for _ in range(copies)]
        _check(buffers)
        latency, throughput, calls = _samples(params, buffers)
    in_flight = calls if params.backend == "nccl" else min(calls, copies)
    bus = accounting.all_reduce_bus_bytes(size, params.world_size)
    return {
        "samples_ms": {"latency": latency, "throughput": throughput},
        "bytes": {"latency": size, "throughput": size},
        "bus_bytes": {"latency": bus, "throughput": bus},
        "facts": {"calls_a_sample": calls, "in_flight": in_flight},
    }


def _check(buffers: list[torch.Tensor]) -> None:
    """All-reduce a pattern in each buffer; raise WrongOutput if a sum is wrong."""
    import torch.distributed as dist

    rank, world_size = dist.get_rank(), dist.get_world_size()
    for buffer in buffers:
        _fill(buffer, rank + 1)
        dist.all_reduce(buffer)
        wrong = _count_wrong(buffer, world_size * (world_size + 1) // 2)
        if wrong:
            raise WrongOutput(f"rank {rank}: {wrong} of {buffer.numel()} sums are wrong")


def _samples(params: Params, buffers: list[torch.Tensor]) -> tuple[list[float], list[float], int]:
    """Milliseconds per call: of single calls and of calls in a row; and how many are in a row."""
    import torch
    import torch.distributed as dist

    def sample(calls: int) -> float:
        return _ms_per_call(buffers, calls, params.backend)

    sample(1)
    # All ranks must take as many samples: the slowest one's estimate holds for all.
    estimate = torch.tensor([min(sample(1) for _ in range(3))], device=buffers[0].device)
    dist.all_reduce(estimate, dist.ReduceOp.MAX)
    fit = max(1, int(params.measure_s * 1e3 / estimate.item()))
    latency = [sample(1) for _ in range(max(3, min(params.samples, fit)))]
    calls = max(2, min(params.in_flight, fit // 3))
    sample(calls)
    throughput = [sample(calls) for _ in range(max(3, min(params.samples, fit // calls)))]
    return latency, throughput, calls


def _ms_per_call(buffers: list[torch.Tensor], calls: int, backend: str) -> float:
    """Milliseconds per call of `calls` issued before the first is waited for."""
    import torch.distributed as dist

    from systems.measure.ranks import barrier
    from systems.measure.timing import synchronize

    device, copies = buffers[0].device, len(buffers)
    barrier(device)
    pending: deque[Any] = deque()
    start = time.perf_counter()
    for i in range(calls):
        if len(pending) == copies and backend == "gloo":
            pending.popleft().wait()
        pending.append(dist.all_reduce(buffers[i % copies], async_op=True))
    for work in pending:
        work.wait()
    synchronize(device)
    elapsed = time.perf_counter() - start
    for i in range(min(calls, copies)):  # each call multiplied its buffer by world_size
        buffers[i].mul_(float(dist.get_world_size()) ** -len(range(i, calls, copies)))
    return round(elapsed * 1e3 / calls, 6)


def _fill(buffer: torch.Tensor, factor: int) -> None:
    """Fill with small integers times `factor`: their sums are exact in float32, so a check can
    demand equality."""
    import torch

    # A piece at a time: float32 cannot count past 2^24.
    pattern = torch.arange(min(PIECE, buffer.numel()), dtype=buffer.dtype, device=buffer.device)
    pattern.remainder_(PERIOD).mul_(factor)
    for piece in buffer.split(PIECE):
        piece.copy_(pattern[: piece.numel()])


def _count_wrong(buffer: torch.Tensor, factor: int) -> int:
    """Count elements that differ from `_fill(buffer, factor)`, a piece at a time to save memory."""
    import torch

    expected = torch.empty(min(PIECE, buffer.numel()), device=buffer.device)
    _fill(expected, factor)
    return sum(int((piece != expected[: piece.numel()]).sum()) for piece in buffer.split(PIECE))
