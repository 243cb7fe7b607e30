"""Measure time and peak memory of attention, in forward and in backward.

Before the measurement, the output and the gradients are checked against a float64 reference.

Run it on this machine, without Slurm:

    python -m jobs.submit sweeps/quickstart.yaml --local
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from pydantic import Field

from systems import accounting
from systems.benchmark import AttentionName, BenchmarkParams, Unsupported, WrongOutput
from systems.external.parameter import Implementation

if TYPE_CHECKING:
    import torch

# Records of versions before 4 lack wall_ms and the samples of the CUDA graph. In records of
# versions before 3, peak memory of backward includes a retained autograd graph with the
# probabilities. In records of version 1, peak memory of forward includes the autograd graph of
# another call.
VERSION = 4
# torch imports this module in the first backward of a process. The import takes time.
PRELOAD = ("torch.fx.experimental.symbolic_shapes",)
Positive = Annotated[int, Field(ge=1)]
PHASES = ("forward", "backward", "forward_backward")
# Largest seq_len for which wall_ms and the phase forward_backward_graph are measured. They show the
# launch overhead, which matters only for short sequences.
LAUNCH_BOUND = 1024
# Maximum relative L2 error of the output and of each gradient, by dtype. The unit roundoffs of
# these dtypes are 2^-8, 2^-11 and 2^-24. Naive attention rounds the scores to the dtype, which
# causes a relative error of about 3 to 5 unit roundoffs in the softmax of a long row.
TOLERANCE = {"bf16": 2e-2, "fp16": 4e-3, "fp32": 5e-5}


class Params(BenchmarkParams):
    """Parameters of self-attention on random q, k and v with unit variance.

    q, k and v have shape (batch_size, num_heads, seq_len, head_dim).
    """

    # Key of `systems.kernels.flash_attention.ATTENTIONS`, or naive_compiled, which is the
    # implementation `naive` compiled with torch.compile, or FILE.py:NAME.
    implementation: Annotated[
        str, Implementation("attention", (*get_args(AttentionName), "naive_compiled"))
    ]
    seq_len: Positive  # number of queries, and of keys, in each sequence
    head_dim: Positive  # number of elements per head
    batch_size: Positive = 1  # number of sequences
    num_heads: Positive = 1  # number of heads of q, k and v
    dtype: Literal["bf16", "fp16", "fp32"] = "bf16"  # dtype of q, k, v, output and gradients
    causal: bool = True  # whether to apply the causal mask
    warmup_ms: Annotated[float, Field(gt=0)] = 25.0  # warm-up time of each phase, in milliseconds
    # Sampling time of each phase, in milliseconds. At least 10 and at most 100 samples are taken.
    measure_ms: Annotated[float, Field(gt=0)] = 100.0
    seed: int = 0  # seed of the random inputs


def predict(params: Params) -> dict[str, Any]:
    """Predict the memory of the implementation `naive`, which materializes the score matrix.

    Returns:
        A dict with the following keys. For other implementations it is empty.
        forward_peak_bytes: peak memory of forward.
        saved_bytes: memory in use between forward and backward.
        backward_peak_bytes: peak memory of backward.
    """
    if params.implementation != "naive":
        return {}
    sizes = (params.batch_size, params.num_heads, params.seq_len, params.head_dim)
    alive = accounting.materialised_attention_bytes(*sizes, params.dtype, params.causal)
    return {f"{moment}_bytes": count for moment, count in alive.items()}


def run(params: Params) -> dict[str, Any]:
    """Check the results of attention, then measure time and peak memory of each phase.

    Phases:
        forward, backward, forward_backward: measured separately. Peak memory is measured only on a
            GPU.
        forward_backward_graph: replay of a CUDA graph of forward and backward. It is measured only
            on a GPU and only for short sequences: seq_len must be at most 1024, the value of the
            constant LAUNCH_BOUND. Peak memory is not measured.

    Returns:
        Measurements, see `systems.benchmark`. `facts` has these keys:
            relative_error: relative L2 error of the output (`out`), and of the gradients `dq`, `dk`
                and `dv`, against float64.
            checking_seconds: duration of the check against float64.
            host_ms: launch overhead of each phase: the time that the call takes on the host, in
                milliseconds. Empty without a GPU.
            before_backward_bytes: GPU memory that is allocated when backward starts. Missing
                without a GPU.
            wall_ms: time of forward_backward from the call until the GPU is idle again, in
                milliseconds. Only on a GPU and only if seq_len is at most LAUNCH_BOUND.

    Raises:
        Unsupported: if the implementation does not support this dtype, shape or device.
        WrongOutput: if the relative error of the output or of a gradient is above the limit for the
            dtype (the constant TOLERANCE).
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
    """An attention function and its random inputs, with a method for each measured phase.

    Call `new_graph` before each `backward`. The method `new_graph` runs forward and keeps the
    autograd graph, which `backward` uses.

    Args:
        params: parameters of the benchmark.
        device: device of the inputs.

    Raises:
        Unsupported: if the implementation does not support this dtype, shape or device.
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
        """Run forward and backward; return the gradients of q, k and v without setting `grad`."""
        import torch

        return torch.autograd.grad(self.forward(), self.inputs, self.dout)

    def clear_gradients(self) -> None:
        for tensor in self.inputs:
            tensor.grad = None

    def new_graph(self) -> None:
        self.out = None  # free the old graph before the new one allocates memory
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
    """Measure the time and, on a GPU, the peak memory of each phase.

    Returns:
        Two dicts. The first has the keys samples_ms and peak_memory_bytes, with a value for each
        phase. The second has the keys host_ms, before_backward_bytes and wall_ms, see `run`.
    """
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
    """Capture `fn` as a CUDA graph; return a function that replays the graph with one launch."""
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
    """Raise an exception if the output or a gradient of attention is not accurate enough.

    Args:
        errors: relative errors by name of the tensor, from `relative_errors`.
        implementation: name of the attention implementation, for the message.
        dtype: dtype of attention, a key of TOLERANCE, the dict of maximum errors.

    Raises:
        WrongOutput: if an error is NaN, or above the limit for `dtype`.
    """
    # "not <=" is also true for NaN, unlike ">".
    wrong = [name for name, error in errors.items() if not error <= TOLERANCE[dtype]]
    if wrong:
        shown = ", ".join(f"{name} {errors[name]:.2e}" for name in wrong)
        raise WrongOutput(
            f"{implementation}: relative L2 error against float64 must be at most "
            f"{TOLERANCE[dtype]:.0e} in {dtype}, got {shown}"
        )


def relative_errors(
    forward: Any, q: Any, k: Any, v: Any, dout: Any, causal: bool
) -> dict[str, float]:
    """Return the relative L2 errors of an attention's output and gradients against float64.

    The error of a tensor x is ||x - reference|| / ||reference||. If the reference is zero, the norm
    of `dout` is the denominator.

    Args:
        forward: function without arguments that computes attention of q, k and v.
        q, k, v: leaf tensors that require gradients. Their `grad` must be None before the call, and
            is None after the call.
        dout: gradient of the output.
        causal: whether `forward` applies the causal mask.

    Returns:
        Errors of the output and of the gradients of q, k and v, with the keys out, dq, dk and dv.
    """
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
        # If each query attends to one key only, dq and dk are zero. Then divide by ||dout||.
        norm = norm if norm > 1e-9 * scale else scale
        errors[name] = torch.linalg.vector_norm(tensor.double() - exact).item() / norm
    q.grad = k.grad = v.grad = None
    return errors
