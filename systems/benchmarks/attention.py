"""Measure time and peak memory of attention, in forward and in backward.

After the measurement, the output and the gradients of the first call and of a timed call are
compared with a float64 reference, and then those for new values in the same buffers.

Run it on this machine, without Slurm:

    python -m jobs.submit sweeps/quickstart.yaml --local
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_args

from pydantic import Field

from systems import accounting, implementation_sources
from systems.benchmark import (
    AttentionName,
    BenchmarkParams,
    Sources,
    Unsupported,
    round_options,
)
from systems.external.parameter import Implementation
from systems.external.reference import is_reference

if TYPE_CHECKING:
    import torch

    from systems.kernels.flash_attention import AttentionReference
    from systems.measure.attention_accuracy import AttentionErrors, AttentionResult

# Records of versions before 4 lack wall_ms and the samples of the CUDA graph. In records of
# versions before 3, peak memory of backward includes a retained autograd graph with the
# probabilities. In records of version 1, peak memory of forward includes the autograd graph of
# another call.
VERSION = 4
# torch imports this module in the first backward of a process. The import takes time.
PRELOAD = ("torch.fx.experimental.symbolic_shapes",)
Positive = Annotated[int, Field(ge=1)]
Result = TypeVar("Result")
PHASES = ("forward", "backward", "forward_backward")
# Largest seq_len for which wall_ms and the phase forward_backward_graph are measured. They show the
# launch overhead, which matters only for short sequences.
LAUNCH_BOUND = 1024


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


def sources(params: Params) -> Sources:
    """Return the modules that count for the results of a run with these parameters."""
    return implementation_sources.without_other_attentions(params.implementation)


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
    """Measure time and peak memory of each phase of attention, then check its results.

    Results of the first call and of a timed call are kept in host memory. They are compared with
    float64 after the measurement, because this heats the GPU and fragments its memory. Then results
    for new values in the same buffers are compared. In a block, only the first round includes the
    check.

    Phases:
        forward, backward, forward_backward: measured separately. Peak memory is measured only on a
            GPU.
        forward_backward_graph: replay of a CUDA graph of forward and backward. It is measured only
            on a GPU and only for short sequences: seq_len must be at most 1024, the value of the
            constant LAUNCH_BOUND. Peak memory is not measured.
        forward_sustained, backward_sustained, forward_backward_sustained: the phases called back to
            back for seconds, if the round of a block asks for it, see `sustained_ms`.

    Returns:
        Measurements, see `systems.benchmark`. `facts` has these keys:
            relative_error: relative L2 error of the output (`out`), and of the gradients `dq`, `dk`
                and `dv`, in the first call, against float64.
            rows_error: as relative_error, but the largest error of a few consecutive rows.
            relative_error_after, rows_error_after: the same errors for new values in the same
                buffers.
            checking_seconds: duration of the check of the first call and of a timed call. This and
                the errors are missing in later rounds of a block.
            host_ms: launch overhead of each phase: the time that the call takes on the host, in
                milliseconds. Empty without a GPU.
            hold_ms: the longest time for which the GPU is kept busy before a timed call. Missing
                without a GPU.
            sustained_calls: number of calls in each sustained phase, to divide the energy by.
                backward_sustained is left out, because its energy includes forward.
            before_backward_bytes: GPU memory that is allocated when backward starts. Missing
                without a GPU.
            graph_error: why the code of a user cannot be captured in a CUDA graph. Then there is no
                phase forward_backward_graph.
            wall_ms: time of forward_backward from the call until the GPU is idle again, in
                milliseconds. Only on a GPU and only if seq_len is at most LAUNCH_BOUND.

    Raises:
        Unsupported: if the implementation does not support this dtype, shape or device.
        WrongOutput: if the output or a gradient is not accurate enough, see
            `systems.measure.attention_accuracy.require_right`.
        BadReference: if `implementation` is a reference that names no attention function.
    """
    import torch

    from systems.measure.windows import during

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    options = round_options()
    try:
        call = _Call(params, device)
        compiling = call.compile()
        first = call.first(keep=options.check)
    except NotImplementedError as error:
        raise Unsupported(f"{params.implementation}: {error}") from error
    measured, facts = _measure(call, params, device, keep=options.check)
    sizes = (params.batch_size, params.num_heads, params.seq_len, params.head_dim)
    flops = {p: accounting.attention_flops(p, *sizes, params.causal) for p in PHASES}
    if options.sustained_s:
        facts["sustained_calls"] = _add_sustained(call, options.sustained_s, measured["samples_ms"])
        flops |= {f"{phase}_sustained": count for phase, count in flops.items()}
    if first is not None:
        with during("check"):
            facts |= _check(call, first)
    if device.type == "cuda" and params.seq_len <= LAUNCH_BOUND:
        with during("forward_backward_graph"):
            _add_graph(call, measured["samples_ms"], facts, options.check)
    return {
        **measured,
        "flops": flops,
        "bytes": {p: accounting.attention_bytes(p, *sizes, params.dtype) for p in PHASES},
        "compiling_seconds": compiling,
        "facts": facts,
    }


def _check(call: _Call, first: AttentionResult) -> dict[str, Any]:
    """Check the results of attention for the timed values and for new ones in the same buffers.

    Args:
        call: the attention, after `_measure`.
        first: results of its first call.

    Returns:
        The facts relative_error, rows_error, relative_error_after, rows_error_after and
        checking_seconds, see `run`.
    """
    from systems.kernels.flash_attention import attention_reference

    assert call.timed is not None
    started = time.perf_counter()
    exact = attention_reference(*call.inputs, call.dout, is_causal=call.causal)
    before = call.check("", first, exact)
    call.check("in the timed calls", call.timed, exact)
    checking = time.perf_counter() - started
    del exact
    call.refill()
    new = call.check("after timing")
    call.refill(some_rows=True)
    call.check("after timing")
    return {
        "relative_error": before.total,
        "rows_error": before.rows,
        "relative_error_after": new.total,
        "rows_error_after": new.rows,
        "checking_seconds": checking,
    }


def _add_sustained(call: _Call, seconds: float, samples: dict[str, list[float]]) -> dict[str, int]:
    """Measure each phase back to back, and add the phases forward_sustained etc. to `samples`.

    Returns:
        The number of calls by phase. Without backward_sustained, because forward runs between its
        calls.
    """
    from systems.measure.sustained import sustained_ms
    from systems.measure.windows import during

    calls: dict[str, int] = {}
    for phase, (fn, before) in call.phases().items():
        name = f"{phase}_sustained"
        with during(name):
            samples[name], calls[name] = sustained_ms(
                fn, call.dout.device, seconds, before=before, phase=name
            )
        call.out = None
    del calls["backward_sustained"]
    return calls


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
        self.params, self.causal = params, params.causal
        self._seed = params.seed
        self.out: torch.Tensor | None = None
        self.timed: AttentionResult | None = None  # results of a timed call, in host memory

    def forward(self) -> torch.Tensor:
        return self.function(*self.inputs, is_causal=self.causal)

    def backward(self) -> None:
        assert self.out is not None
        self.out.backward(self.dout)

    def forward_backward(self) -> None:
        self.forward().backward(self.dout)

    def phases(self) -> dict[str, tuple[Callable[[], object], Callable[[], None]]]:
        """Return, for each phase, the function to time and the function to call before it."""
        return {
            "forward": (self.forward, self.clear_gradients),
            "backward": (self.backward, self.new_graph),
            "forward_backward": (self.forward_backward, self.clear_gradients),
        }

    def output_and_gradients(self) -> AttentionResult:
        """Run forward and backward without setting `grad` of the inputs."""
        import torch

        from systems.measure.attention_accuracy import AttentionResult

        out = self.forward()
        return AttentionResult(out, *torch.autograd.grad(out, self.inputs, self.dout))

    def refill(self, some_rows: bool = False) -> None:
        """Write new values into the buffers of q, k, v and of the gradient of the output.

        Args:
            some_rows: whether only some rows get new values.
        """
        from systems.measure.attention_accuracy import refill

        self.out = None
        self.clear_gradients()
        self._seed += 1
        refill((*self.inputs, self.dout), self._seed, some_rows)

    def check(
        self,
        when: str = "",
        result: AttentionResult | None = None,
        exact: AttentionReference | None = None,
    ) -> AttentionErrors:
        """Compare output and gradients with float64, for the present values in the buffers.

        Args:
            when: when the results were computed, for the error message.
            result: output and gradients for these values. None calls the function.
            exact: float64 result for these values. None computes it.

        Returns:
            The errors.

        Raises:
            WrongOutput: if the output or a gradient is not accurate enough.
        """
        from systems.measure.attention_accuracy import call_once, errors_of, require_right

        result = result or call_once(self.forward, self.inputs, self.dout)
        errors = errors_of(result, self.inputs, self.dout, self.causal, exact)
        require_right(errors, self.params.implementation, self.params.dtype, when)
        return errors

    def compile(self) -> float | None:
        """Call a compiled implementation once.

        Returns:
            The time that it takes, in seconds. None if the implementation is not compiled.
        """
        name, device = self.params.implementation, self.dout.device
        compiles = name in ("naive_compiled", "flex")
        if not compiles and not (name == "flash_pytorch" and device.type == "cuda"):
            return None
        started = time.perf_counter()
        self.first(keep=False)
        return time.perf_counter() - started

    def first(self, keep: bool) -> AttentionResult | None:
        """Run forward and backward once, so that the function compiles and allocates what it needs.

        Args:
            keep: whether to return the results.

        Returns:
            Output and gradients in host memory, because they must not take GPU memory during the
            measurement. None if `keep` is False.
        """
        from systems.measure.attention_accuracy import call_once
        from systems.measure.windows import during

        if keep:
            return call_once(self.forward, self.inputs, self.dout, on_host=True)
        with during("forward"):
            out = self.forward()
        with during("backward"):
            out.backward(self.dout)
        self.clear_gradients()
        return None

    def keep_timed(self) -> None:
        """Keep the results of the last call of `backward`, and of the forward before it."""
        from systems.measure.attention_accuracy import AttentionResult, take_gradients

        assert self.out is not None
        out = self.out.detach().to("cpu", copy=True)
        self.timed = AttentionResult(out, *take_gradients(self.inputs, on_host=True))

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

    from systems.kernels.flash_attention import naive
    from systems.training.attention_choice import attention_function

    if params.implementation == "naive":
        return naive
    if params.implementation == "naive_compiled":
        return torch.compile(naive, fullgraph=True, dynamic=False)
    return attention_function(params.implementation, q, k, v, params.causal)


def _measure(
    call: _Call, params: Params, device: torch.device, keep: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Measure the time and, on a GPU, the peak memory of each phase.

    Args:
        call: the attention.
        params: parameters of the benchmark.
        device: device of the attention.
        keep: whether to keep the results of a timed call in `call.timed`.

    Returns:
        Two dicts. The first has the keys samples_ms and peak_memory_bytes, with a value for each
        phase. The second has the keys host_ms, before_backward_bytes and wall_ms, see `run`.
    """
    import torch

    from systems.measure.peak_memory import peak_memory_by_phase
    from systems.measure.timing import hold_ms, host_ms, time_ms, wall_ms
    from systems.measure.windows import during

    on_gpu = device.type == "cuda"
    phases = call.phases()
    budget = {"warmup_ms": params.warmup_ms, "measure_ms": params.measure_ms}
    samples: dict[str, list[float]] = {}
    peaks: dict[str, int] = {}
    hosts: dict[str, float] = {}
    facts: dict[str, Any] = {"host_ms": hosts}
    for phase, (fn, before) in phases.items():
        with during(phase):
            if on_gpu:
                before()
                if phase == "backward":
                    facts["before_backward_bytes"] = torch.cuda.memory_allocated(device)
                gc.collect()
                peaks |= peak_memory_by_phase({phase: fn}, device)
                hosts[phase] = host_ms(fn, device, before=before)
            samples[phase] = time_ms(
                fn, device, before=before, launch_ms=hosts.get(phase), phase=phase, **budget
            )
            if keep and phase == "backward":
                call.keep_timed()
        call.out = None
    if on_gpu:
        facts["hold_ms"] = max(map(hold_ms, hosts.values()))
    if on_gpu and params.seq_len <= LAUNCH_BOUND:
        fn, before = phases["forward_backward"]
        facts["wall_ms"] = {"forward_backward": wall_ms(fn, device, before=before)}
    return {"samples_ms": samples, "peak_memory_bytes": peaks}, facts


def _add_graph(
    call: _Call, samples: dict[str, list[float]], facts: dict[str, Any], check: bool
) -> None:
    """Time a CUDA graph of forward and backward and, if `check` is True, check its results.

    Adds the phase forward_backward_graph to `samples`. If the code of a user cannot be captured,
    adds graph_error to `facts`.
    """
    from systems.measure.timing import time_ms

    try:
        replay, result = _captured(call.output_and_gradients)
    except RuntimeError as error:  # for example, the code waits for the GPU
        if not is_reference(call.params.implementation):
            raise
        facts["graph_error"] = str(error).splitlines()[0]
        return
    name = "forward_backward_graph"
    samples[name] = time_ms(replay, call.dout.device, phase=name)
    if check:
        call.refill()
        replay()
        call.check("in a CUDA graph, after timing", result)


def _captured(fn: Callable[[], Result]) -> tuple[Callable[[], None], Result]:
    """Capture `fn` as a CUDA graph.

    Returns:
        A function that replays the graph with one launch, and the result of `fn`, whose tensors
        each replay overwrites.
    """
    import torch

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            fn()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = fn()
    return graph.replay, result
