"""Measure latency and bandwidth of all-reduce for a backend, a buffer size and a number of ranks.

Run it on this machine, without Slurm:

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
# Maximum size of all buffers together with Gloo, in bytes. One buffer may be larger.
GLOO_BYTES = 256 * 10**6
Positive = Annotated[int, Field(ge=1)]


class Params(BenchmarkParams):
    """Parameters of an in-place all-reduce that sums float32 numbers."""

    backend: Literal["gloo", "nccl"]  # gloo: on CPUs; nccl: one GPU per rank
    size_mb: Positive  # buffer size in MB (10^6 bytes)
    world_size: Positive  # number of ranks; must equal the number of processes torchrun starts
    # Maximum number of samples in each phase. Fewer samples are taken, but at least 3, if the phase
    # would otherwise take longer than measure_s.
    samples: Positive = 50
    # Maximum number of calls in a throughput sample. Fewer calls are issued, but at least 2, if
    # three samples would otherwise take longer than measure_s.
    in_flight: Annotated[int, Field(ge=2)] = 20
    # Target duration of each phase, in seconds.
    measure_s: Annotated[float, Field(gt=0)] = 2.0


def run(params: Params) -> dict[str, Any]:
    """Check the result of the all-reduce, then time it on this rank.

    Phases:
        latency: time of a single call. All ranks start the call together after a barrier.
        throughput: mean time per call when several calls are issued back to back.

    Returns:
        bytes: size of the buffer. Divided by the time of a call, it is the algorithm bandwidth as
            nccl-tests defines it (in its file doc/PERFORMANCE.md).
        bus_bytes: bytes that each rank sends in a call. Divided by the time of a call, they are the
            bus bandwidth as nccl-tests defines it.

    Facts:
        calls_a_sample: number of calls in a throughput sample.
        in_flight: how many of them are in flight at the same time, at most. With NCCL these are
            all. With Gloo, each call in flight needs a buffer of its own, see GLOO_BYTES.

    Raises:
        WrongOutput: if the all-reduce returns a wrong sum.
        RuntimeError: if the number of processes is not `world_size`.
    """
    import torch

    from systems import accounting
    from systems.measure.ranks import rank_process_group

    size = params.size_mb * 10**6
    # NCCL executes calls in stream order, so all calls can use the same buffer, as in nccl-tests.
    # Gloo executes calls on several threads, so each call in flight needs a separate buffer.
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
    """Check the sums of 1 + rank, which float32 represents exactly."""
    import torch.distributed as dist

    rank, world_size = dist.get_rank(), dist.get_world_size()
    for buffer in buffers:
        buffer.fill_(1 + rank)
        dist.all_reduce(buffer)
        wrong = int((buffer != world_size * (world_size + 1) // 2).sum())
        if wrong:
            raise WrongOutput(
                f"rank {rank}: all-reduce returned a wrong sum for {wrong} of {buffer.numel()} "
                "elements"
            )


def _samples(params: Params, buffers: list[torch.Tensor]) -> tuple[list[float], list[float], int]:
    """Return latency and throughput samples, in milliseconds per call, and calls per sample.

    All ranks must call this function.
    """
    import torch
    import torch.distributed as dist

    def sample(calls: int) -> float:
        return _ms_per_call(buffers, calls, params.backend)

    sample(1)
    # All ranks must take the same number of samples, so all use the estimate of the slowest rank.
    estimate = torch.tensor([min(sample(1) for _ in range(3))], device=buffers[0].device)
    dist.all_reduce(estimate, dist.ReduceOp.MAX)
    fit = max(1, int(params.measure_s * 1e3 / estimate.item()))
    latency = [sample(1) for _ in range(max(3, min(params.samples, fit)))]
    calls = max(2, min(params.in_flight, fit // 3))
    sample(calls)
    throughput = [sample(calls) for _ in range(max(3, min(params.samples, fit // calls)))]
    return latency, throughput, calls


def _ms_per_call(buffers: list[torch.Tensor], calls: int, backend: str) -> float:
    """Issue `calls` asynchronous all-reduces back to back; return the milliseconds per call.

    With Gloo, a call is issued only after the previous call on the same buffer has finished.
    """
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
    # All ranks have equal buffers, so each call has multiplied its buffer by world_size. Divide by
    # the same factor, so that repeated calls do not overflow.
    for i in range(min(calls, copies)):
        buffers[i].mul_(float(dist.get_world_size()) ** -len(range(i, calls, copies)))
    return round(elapsed * 1e3 / calls, 6)
