"""Attention by implementation: forward, backward and both, checked against float64, then timed.

python -m jobs.submit sweeps/quickstart.yaml --local
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import Field

from systems import accounting
from systems.benchmark import AttentionName, BenchmarkParams, Unsupported, WrongOutput

# 1: the peak memory of forward held the graph of another call. 2: backward kept its graph, and so
# the probabilities, to be called again. 3: no wall time, nothing under a CUDA graph.
VERSION = 4
PRELOAD = ("torch.fx.experimental.symbolic_shapes",)  # a first backward imports it
Positive = Annotated[int, Field(ge=1)]
LAUNCH_BOUND = 1024  # tokens up to which it matters what a launch costs the host
# Largest relative L2 error that counts as right, outputs and gradients alike. A dtype's unit
# roundoff is 2^-8, 2^-11 and 2^-24; naive attention rounds the scores themselves, some 3 to 5
# roundoffs of relative error in the softmax of a long row.
TOLERANCE = {"bf16": 2e-2, "fp16": 4e-3, "fp32": 5e-5}


class Params(BenchmarkParams):
    """Self-attention of (batch_size, num_heads, seq_len, head_dim) q, k, v of unit variance."""

    implementation: Literal[AttentionName, "naive_compiled"]
    seq_len: Positive
    head_dim: Positive
    batch_size: Positive = 1
    num_heads: Positive = 1
    dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
    causal: bool = True
    warmup_ms: Annotated[float, Field(gt=0)] = 25.0
    measure_ms: Annotated[float, Field(gt=0)] = 100.0
    seed: int = 0


def predict(params: Params) -> dict[str, Any]:
    """Bytes that the materialised implementation needs, whether it got them or not."""
    if params.implementation != "naive":
        return {}
    sizes = (params.batch_size, params.num_heads, params.seq_len, params.head_dim)
    alive = accounting.materialised_attention_bytes(*sizes, params.dtype, params.causal)
    return {f"{moment}_bytes": count for moment, count in alive.items()}


def run(params: Params) -> dict[str, Any]:
    """Facts of one point: samples_ms, peak_memory_bytes, flops and bytes by phase, and errors.

    Raises:
        Unsupported: the implementation does not take this dtype, shape or device.
        WrongOutput: an output or gradient is further from float64 than TOLERANCE.
    """
    import torch

    from systems.kernels.flash_attention import ATTENTIONS, naive, unsupported_reason
    from systems.measure.timing import host_ms, peak_memory_bytes, time_ms, wall_ms

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[params.dtype]
    generator = torch.Generator(device).manual_seed(params.seed)
    shape = (params.batch_size, params.num_heads, params.seq_len, params.head_dim)
    q, k, v, dout = (
        torch.randn(shape, generator=generator, device=device).to(dtype) for _ in range(4)
    )
    q, k, v = (tensor.requires_grad_() for tensor in (q, k, v))

    function: Callable[..., torch.Tensor] = naive
    if params.implementation == "naive_compiled":
        function = torch.compile(naive, fullgraph=True, dynamic=False)
    elif params.implementation != "naive":
        reason = unsupported_reason(q, k, v, params.causal, params.implementation)
        if reason:
            raise Unsupported(reason)
        function = ATTENTIONS[params.implementation]
    compiles = params.implementation in ("naive_compiled", "flex") or (
        params.implementation == "flash_pytorch" and device.type == "cuda"
    )

    def forward() -> torch.Tensor:
        return function(q, k, v, is_causal=params.causal)

    def clear_gradients() -> None:
        q.grad = k.grad = v.grad = None

    started = time.perf_counter()
    if compiles:
        forward().backward(dout)
        clear_gradients()
    compiling = time.perf_counter() - started
    started = time.perf_counter()
    errors = relative_errors(forward, q, k, v, dout, params.causal)
    require_right(errors, params.implementation, params.dtype)
    checking = time.perf_counter() - started

    out: torch.Tensor | None = None

    def new_graph() -> None:
        nonlocal out
        out = None  # the last one's memory must be free before the next takes its own
        clear_gradients()
        out = forward()

    def backward() -> None:
        assert out is not None
        out.backward(dout)

    phases: dict[str, tuple[Callable[[], object], Callable[[], None]]] = {
        "forward": (forward, clear_gradients),
        "backward": (backward, new_graph),
        "forward_backward": (lambda: forward().backward(dout), clear_gradients),
    }
    samples, peaks, hosts = {}, {}, {}
    facts: dict[str, Any] = {}
    for phase, (fn, before) in phases.items():
        if device.type == "cuda" and phase == "backward":
            before()
            facts["before_backward_bytes"] = torch.cuda.memory_allocated(device)
        peak = peak_memory_bytes(fn, device, before=before)
        if peak is not None:
            peaks[phase] = peak
            hosts[phase] = host_ms(fn, device, before=before)
        samples[phase] = time_ms(
            fn,
            device,
            before=before,
            warmup_ms=params.warmup_ms,
            measure_ms=params.measure_ms,
        )
        out = None
    if device.type == "cuda" and params.seq_len <= LAUNCH_BOUND:
        both = phases["forward_backward"]
        facts["wall_ms"] = {"forward_backward": wall_ms(both[0], device, before=both[1])}
        samples["forward_backward_graph"] = time_ms(
            _captured(lambda: torch.autograd.grad(forward(), (q, k, v), dout)), device
        )
    sizes = (params.batch_size, params.num_heads, params.seq_len, params.head_dim)
    return {
        "samples_ms": samples,
        "peak_memory_bytes": peaks,
        "flops": {p: accounting.attention_flops(p, *sizes, params.causal) for p in phases},
        "bytes": {p: accounting.attention_bytes(p, *sizes, params.dtype) for p in phases},
        "compiling_seconds": compiling if compiles else None,
        "facts": facts
        | {
            "relative_error": errors,
            "checking_seconds": checking,
            "host_ms": hosts,  # on a GPU: what a call costs the host
        },
    }


def _captured(fn: Callable[[], object]) -> Callable[[], None]:
    """fn as a CUDA graph, to be replayed: without what its launches cost the host."""
    import torch

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            fn()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fn()
    return graph.replay


def require_right(errors: dict[str, float], implementation: str, dtype: str) -> None:
    """Raise WrongOutput where one of `relative_errors` is above TOLERANCE."""
    # NaN is wrong too, and has no place in an order
    wrong = [name for name, error in errors.items() if not error <= TOLERANCE[dtype]]
    if wrong:
        told = ", ".join(f"{name} {errors[name]:.2e}" for name in wrong)
        raise WrongOutput(
            f"{implementation}: relative L2 error against float64 is {told}; "
            f"at most {TOLERANCE[dtype]:.0e} is right for {dtype}"
        )


def relative_errors(
    forward: Any, q: Any, k: Any, v: Any, dout: Any, causal: bool
) -> dict[str, float]:
    """||x - reference|| / ||reference|| of out, dq, dk and dv, over every element."""
    import torch

    from systems.kernels.flash_attention import attention_reference

    out = forward()
    out.backward(dout)
    reference = attention_reference(q, k, v, dout, is_causal=causal)
    given = {"out": out.detach(), "dq": q.grad, "dk": k.grad, "dv": v.grad}
    errors = {}
    scale = torch.linalg.vector_norm(dout.double()).item()
    for name, tensor in given.items():
        exact = getattr(reference, name)
        norm = torch.linalg.vector_norm(exact).item()
        # Of one visible key dq and dk are zero: then rounding is held against dout.
        norm = norm if norm > 1e-9 * scale else scale
        errors[name] = torch.linalg.vector_norm(tensor.double() - exact).item() / norm
    q.grad = k.grad = v.grad = None
    return errors
