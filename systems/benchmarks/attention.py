"""Attention by implementation: checks forward and backward against float64, then times them.

python -m jobs.submit sweeps/quickstart.yaml --local
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from systems import accounting
from systems.benchmark import AttentionName, BenchmarkParams, Unsupported, WrongOutput

if TYPE_CHECKING:
    import torch

# 1: the peak memory of forward held the graph of another call. 2: backward kept its graph, and so
# the probabilities, to be called again. 3: no wall time, nothing under a CUDA graph.
VERSION = 4
PRELOAD = ("torch.fx.experimental.symbolic_shapes",)  # a first backward imports it
Positive = Annotated[int, Field(ge=1)]
PHASES = ("forward", "backward", "forward_backward")
LAUNCH_BOUND = 1024  # tokens up to which launches on the host limit the speed
# Largest allowed relative L2 error of outputs and gradients. The unit roundoffs are 2^-8, 2^-11 and
# 2^-24; naive attention rounds the scores themselves, which makes a relative error of about 3 to 5
# roundoffs in the softmax of a long row.
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
    """Predict the bytes of the implementation that materialises its scores, even if it failed."""
    if params.implementation != "naive":
        return {}
    sizes = (params.batch_size, params.num_heads, params.seq_len, params.head_dim)
    alive = accounting.materialised_attention_bytes(*sizes, params.dtype, params.causal)
    return {f"{moment}_bytes": count for moment, count in alive.items()}


def run(params: Params) -> dict[str, Any]:
    """Return facts: samples_ms, peak_memory_bytes, flops and bytes by phase, and errors.

    Raises:
        Unsupported: the implementation does not take this dtype, shape or device.
        WrongOutput: an output or gradient is further from float64 than TOLERANCE.
    """
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    call = _Call(params, device)
    compiles = params.implementation in ("naive_compiled", "flex") or (
        params.implementation == "flash_pytorch" and device.type == "cuda"
    )
    started = time.perf_counter()
    if compiles:
        call.forward_backward()
        call.clear_gradients()
    compiling = time.perf_counter() - started
    started = time.perf_counter()
    errors = relative_errors(call.forward, *call.inputs, call.dout, params.causal)
    require_right(errors, params.implementation, params.dtype)
    checking = time.perf_counter() - started
    measured, facts = _measure(call, params, device)
    sizes = (params.batch_size, params.num_heads, params.seq_len, params.head_dim)
    return {
        **measured,
        "flops": {p: accounting.attention_flops(p, *sizes, params.causal) for p in PHASES},
        "bytes": {p: accounting.attention_bytes(p, *sizes, params.dtype) for p in PHASES},
        "compiling_seconds": compiling if compiles else None,
        "facts": facts | {"relative_error": errors, "checking_seconds": checking},
    }


class _Call:
    """One call of attention, phase by phase; backward runs on the graph of the last `new_graph`.

    Raises:
        Unsupported: the implementation does not take this dtype, shape or device.
    """

    def __init__(self, params: Params, device: torch.device):
        import torch

        from systems.dtypes import TORCH_DTYPES

        generator = torch.Generator(device).manual_seed(params.seed)
        shape = (params.batch_size, params.num_heads, params.seq_len, params.head_dim)
        q, k, v, self.dout = (
            torch.randn(shape, generator=generator, device=device).to(TORCH_DTYPES[params.dtype])
            for _ in range(4)
        )
        self.inputs = q.requires_grad_(), k.requires_grad_(), v.requires_grad_()
        self.function = _implementation(params, *self.inputs)
        self.causal = params.causal
        self.out: torch.Tensor | None = None

    def forward(self) -> torch.Tensor:
        return self.function(*self.inputs, is_causal=self.causal)

    def backward(self) -> None:
        assert self.out is not None
        self.out.backward(self.dout)

    def forward_backward(self) -> None:
        self.forward().backward(self.dout)

    def gradients(self) -> object:
        """Forward and backward that leaves no `grad`."""
        import torch

        return torch.autograd.grad(self.forward(), self.inputs, self.dout)

    def clear_gradients(self) -> None:
        for tensor in self.inputs:
            tensor.grad = None

    def new_graph(self) -> None:
        self.out = None  # the last one's memory must be free before the next takes its own
        self.clear_gradients()
        self.out = self.forward()


def _implementation(
    params: Params, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> Callable[..., torch.Tensor]:
    import torch

    from systems.kernels.flash_attention import ATTENTIONS, naive, unsupported_reason

    if params.implementation == "naive":
        return naive
    if params.implementation == "naive_compiled":
        return torch.compile(naive, fullgraph=True, dynamic=False)
    reason = unsupported_reason(q, k, v, params.causal, params.implementation)
    if reason:
        raise Unsupported(reason)
    return ATTENTIONS[params.implementation]


def _measure(
    call: _Call, params: Params, device: torch.device
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Measure times and peak memory by phase; and on a GPU as facts host_ms, the launch overhead,
    before_backward_bytes, what is allocated when backward begins, and for few tokens wall_ms."""
    import torch

    from systems.measure.peak_memory import peak_memory_by_phase
    from systems.measure.timing import host_ms, time_ms, wall_ms

    on_gpu = device.type == "cuda"
    phases: dict[str, tuple[Callable[[], object], Callable[[], None]]] = {
        "forward": (call.forward, call.clear_gradients),
        "backward": (call.backward, call.new_graph),
        "forward_backward": (call.forward_backward, call.clear_gradients),
    }
    budget = {"warmup_ms": params.warmup_ms, "measure_ms": params.measure_ms}
    samples: dict[str, list[float]] = {}
    peaks: dict[str, int] = {}
    hosts: dict[str, float] = {}
    facts: dict[str, Any] = {"host_ms": hosts}
    for phase, (fn, before) in phases.items():
        if on_gpu:
            before()
            if phase == "backward":
                facts["before_backward_bytes"] = torch.cuda.memory_allocated(device)
            gc.collect()
            peaks |= peak_memory_by_phase({phase: fn}, device)
            hosts[phase] = host_ms(fn, device, before=before)
        samples[phase] = time_ms(fn, device, before=before, **budget)
        call.out = None
    if on_gpu and params.seq_len <= LAUNCH_BOUND:
        fn, before = phases["forward_backward"]
        facts["wall_ms"] = {"forward_backward": wall_ms(fn, device, before=before)}
        samples["forward_backward_graph"] = time_ms(_captured(call.gradients), device)
    return {"samples_ms": samples, "peak_memory_bytes": peaks}, facts


def _captured(fn: Callable[[], object]) -> Callable[[], None]:
    """Capture fn as a CUDA graph and return its replay, which has no launch overhead."""
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
    # NaN is wrong, too
    wrong = [name for name, error in errors.items() if not error <= TOLERANCE[dtype]]
    if wrong:
        shown = ", ".join(f"{name} {errors[name]:.2e}" for name in wrong)
        raise WrongOutput(
            f"{implementation}: relative L2 error against float64 is {shown}; "
            f"at most {TOLERANCE[dtype]:.0e} is right for {dtype}"
        )


def relative_errors(
    forward: Any, q: Any, k: Any, v: Any, dout: Any, causal: bool
) -> dict[str, float]:
    """Return ||x - reference|| / ||reference|| of out, dq, dk and dv."""
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
        # With one visible key dq and dk are zero: then the error is relative to dout.
        norm = norm if norm > 1e-9 * scale else scale
        errors[name] = torch.linalg.vector_norm(tensor.double() - exact).item() / norm
    q.grad = k.grad = v.grad = None
    return errors
