"""All-reduce by backend, size and number of ranks: latency of one call, throughput of many.

python -m jobs.submit sweeps/all_reduce.yaml --local --filter 'backend == gloo'
"""

from __future__ import annotations

import time
from collections import deque
from typing import Annotated, Any, Literal

from pydantic import Field

from systems.benchmark import BenchmarkParams, WrongOutput

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
    """This rank's facts. Phases: `latency`, one call timed alone, all ranks having met first;
    `throughput`, the time of one of many calls issued back to back. How many of them are in flight
    at once is a fact: all of NCCL's, and of Gloo's those that fit in GLOO_BYTES of buffers.

    `bytes` is the buffer's size, so bandwidth is nccl-tests' algorithm bandwidth; `bus_bytes`
    gives its bus bandwidth (nccl-tests, doc/PERFORMANCE.md).

    Raises:
        WrongOutput: a sum is not the sum.
        RuntimeError: the number of processes is not `world_size`.
    """
    import torch
    import torch.distributed as dist

    from systems import accounting
    from systems.measure.ranks import barrier, rank_process_group
    from systems.measure.timing import synchronize

    size = params.size_mb * 10**6
    with rank_process_group(params.backend, params.world_size) as device:
        rank, world_size = dist.get_rank(), dist.get_world_size()
        # NCCL runs calls in the order of its stream, so they can share one buffer, as nccl-tests
        # does. Gloo runs them on threads: each call in flight needs a buffer of its own.
        copies = (
            1 if params.backend == "nccl" else max(1, min(params.in_flight, GLOO_BYTES // size))
        )
        buffers = [torch.empty(size // 4, device=device) for _ in range(copies)]
        for buffer in buffers:
            _fill(buffer, rank + 1)
            dist.all_reduce(buffer)
            wrong = _count_wrong(buffer, world_size * (world_size + 1) // 2)
            if wrong:
                raise WrongOutput(f"rank {rank}: {wrong} of {buffer.numel()} sums are wrong")

        def sample(calls: int) -> float:
            """Milliseconds a call, `calls` of them issued before the first is waited for."""
            barrier(device)
            pending: deque[Any] = deque()
            start = time.perf_counter()
            for i in range(calls):
                if len(pending) == copies and params.backend == "gloo":
                    pending.popleft().wait()
                pending.append(dist.all_reduce(buffers[i % copies], async_op=True))
            for work in pending:
                work.wait()
            synchronize(device)
            elapsed = time.perf_counter() - start
            for i in range(min(calls, copies)):  # each call multiplied its buffer by world_size
                buffers[i].mul_(float(world_size) ** -len(range(i, calls, copies)))
            return round(elapsed * 1e3 / calls, 6)

        sample(1)
        # All ranks must take as many samples: the slowest one's estimate holds for all.
        estimate = torch.tensor([min(sample(1) for _ in range(3))], device=device)
        dist.all_reduce(estimate, dist.ReduceOp.MAX)
        fit = max(1, int(params.measure_s * 1e3 / estimate.item()))
        latency = [sample(1) for _ in range(max(3, min(params.samples, fit)))]
        calls = max(2, min(params.in_flight, fit // 3))
        sample(calls)
        rounds = max(3, min(params.samples, fit // calls))
        throughput = [sample(calls) for _ in range(rounds)]
    in_flight = calls if params.backend == "nccl" else min(calls, copies)
    bus = accounting.all_reduce_bus_bytes(size, world_size)
    return {
        "samples_ms": {"latency": latency, "throughput": throughput},
        "bytes": {"latency": size, "throughput": size},
        "bus_bytes": {"latency": bus, "throughput": bus},
        "facts": {"calls_a_sample": calls, "in_flight": in_flight},
    }


def _fill(buffer: Any, factor: int) -> None:
    """Small integers times `factor`: their sums are exact in float32, so a check can ask for
    equality."""
    import torch

    # A piece at a time: float32 cannot count past 2^24.
    pattern = torch.arange(min(PIECE, buffer.numel()), dtype=buffer.dtype, device=buffer.device)
    pattern.remainder_(PERIOD).mul_(factor)
    for piece in buffer.split(PIECE):
        piece.copy_(pattern[: piece.numel()])


def _count_wrong(buffer: Any, factor: int) -> int:
    """How many elements differ from `_fill(buffer, factor)`, a piece at a time to save memory."""
    import torch

    expected = torch.empty(min(PIECE, buffer.numel()), device=buffer.device)
    _fill(expected, factor)
    return sum(int((piece != expected[: piece.numel()]).sum()) for piece in buffer.split(PIECE))
