"""Measure time and peak memory of attention, in forward and in backward.

Run it on this machine, without Slurm:

    python -m jobs.submit sweeps/quickstart.yaml --local
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import Field, model_validator

from systems import accounting, implementation_sources
from systems.attentions import ATTENTIONS
from systems.benchmark import (
    BenchmarkParams,
    Sources,
    Unsupported,
    round_options,
)
from systems.external.parameter import Implementation
from systems.external.reference import is_reference

if TYPE_CHECKING:
    import torch

    from systems.check.attention_accuracy import AttentionResult
    from systems.check.attention_call import AttentionCall

VERSION = 4
PRELOAD = ("torch.fx.experimental.symbolic_shapes",)
Positive = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Result = TypeVar("Result")
PHASES = ("forward", "backward", "forward_backward")
# Largest seq_len for which wall_ms and the phase forward_backward_graph are measured. They show the
# launch overhead, which matters only for short sequences.
LAUNCH_BOUND = 1024


class Params(BenchmarkParams):
    """Parameters of attention on random q, k and v with unit variance.

    q, k and v have shape (batch_size, num_heads, seq_len, head_dim). The parameters from
    num_kv_heads to packed change this shape, the mask or the scores. Their defaults are plain
    self-attention.
    """

    # Key of `systems.kernels.flash_attention.ATTENTIONS`, or naive_compiled, which is the
    # implementation `naive` compiled with torch.compile, or FILE.py:NAME.
    implementation: Annotated[str, Implementation("attention", (*ATTENTIONS, "naive_compiled"))]
    seq_len: Positive  # number of queries, and of keys, in each sequence
    head_dim: Positive  # number of elements per head
    batch_size: Positive = 1  # number of sequences
    num_heads: Positive = 1  # number of heads of q; also of k and v if num_kv_heads is null
    dtype: Literal["bf16", "fp16", "fp32"] = "bf16"  # dtype of q, k, v, output and gradients
    causal: bool = True  # whether to apply the causal mask
    # Name of the case, for example of a model that has such heads. It changes nothing.
    model: str | None = None
    num_kv_heads: Positive | None = None  # number of heads of k and v; null: num_heads
    value_dim: Positive | None = None  # head dimension of v; null: head_dim
    num_queries: Positive | None = None  # number of queries in each sequence; null: seq_len
    window_left: Natural | None = None  # keys before its position that a query sees; null: all
    window_right: Natural | None = None  # keys after its position that a query sees; null: all
    # With lower_right, the last query has the position of the last key of its sequence.
    alignment: Literal["upper_left", "lower_right"] = "upper_left"
    softcap: Annotated[float, Field(gt=0)] | None = None  # each score s becomes c tanh(s / c)
    # Whether sequences of different lengths are packed, without padding. There are batch_size *
    # seq_len rows, and the longest sequence has seq_len of them. The other lengths are an eighth, a
    # quarter, a half and three quarters of it in turn; the last one has the rest.
    packed: bool = False
    warmup_ms: Annotated[float, Field(gt=0)] = 25.0  # warm-up time of each phase, in milliseconds
    # Sampling time of each phase, in milliseconds. At least 10 and at most 100 samples are taken.
    measure_ms: Annotated[float, Field(gt=0)] = 100.0
    seed: int = 0  # seed of the random inputs

    @model_validator(mode="after")
    def _fits(self) -> Params:
        if self.num_heads % (self.num_kv_heads or self.num_heads):
            raise ValueError(
                f"num_kv_heads must divide num_heads, {self.num_heads}, got {self.num_kv_heads}"
            )
        if self.packed and self.num_queries is not None:
            raise ValueError("num_queries must be null with packed, because each query is a key")
        return self

    @property
    def lengths(self) -> list[tuple[int, int]]:
        """Number of queries and number of keys of each sequence."""
        if not self.packed:
            return [(self.num_queries or self.seq_len, self.seq_len)] * self.batch_size
        return [(n, n) for n in accounting.packed_lengths(self.batch_size, self.seq_len)]

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Shapes of q, k, v and the gradient of the output, in memory."""
        queries, dim = self.num_queries or self.seq_len, self.value_dim or self.head_dim
        kv_heads = self.num_kv_heads or self.num_heads
        plain = [
            (self.num_heads, queries, self.head_dim),
            (kv_heads, self.seq_len, self.head_dim),
            (kv_heads, self.seq_len, dim),
            (self.num_heads, queries, dim),
        ]
        if self.packed:
            return [(self.batch_size * rows, heads, width) for heads, rows, width in plain]
        return [(self.batch_size, *shape) for shape in plain]

    @property
    def is_plain(self) -> bool:
        """Whether this is self-attention with at most a causal mask, without other features."""
        return self.model_copy(update=PLAIN) == self


# Values of the parameters that add features to plain self-attention, without these features
PLAIN: dict[str, Any] = {
    "num_kv_heads": None, "value_dim": None, "num_queries": None, "window_left": None,
    "window_right": None, "alignment": "upper_left", "softcap": None, "packed": False,
}  # fmt: skip


def sources(params: Params) -> Sources:
    """Return the modules that count for the results of a run with these parameters."""
    return implementation_sources.without_other_attentions(params.implementation)


def predict(params: Params) -> dict[str, Any]:
    """Predict the memory of the implementation `naive`, which materializes the score matrix.

    `saved_bytes` is the memory in use between forward and backward. The result is empty for other
    implementations and features.
    """
    if params.implementation != "naive" or not params.is_plain:
        return {}
    sizes = (params.batch_size, params.num_heads, params.seq_len, params.head_dim)
    alive = accounting.materialised_attention_bytes(*sizes, params.dtype, params.causal)
    return {f"{moment}_bytes": count for moment, count in alive.items()}


def run(params: Params) -> dict[str, Any]:
    """Measure time and peak memory of each phase of attention, then check its results.

    Results of the first call and of a timed call are kept in host memory. They are compared with
    float64 after the measurement, because this heats the GPU and fragments its memory. Then results
    for new values in the same buffers are compared. In a block, only the trial includes the check.

    Phases:
        forward, backward, forward_backward: measured separately. Peak memory only on a GPU.
        forward_backward_graph: replay of a CUDA graph of forward and backward. Only on a GPU, and
            if seq_len is at most LAUNCH_BOUND. Peak memory is not measured.
        forward_sustained, backward_sustained, forward_backward_sustained: the phases called back to
            back for seconds, if the round of a block asks for it, see `sustained_ms`.

    Facts:
        relative_error: relative L2 error of the output (`out`), and of the gradients `dq`, `dk` and
            `dv`, in the first call, against float64.
        rows_error: as relative_error, but the largest error of a few consecutive rows.
        relative_error_after, rows_error_after: the same errors for new values in the same buffers.
        checking_seconds: duration of the check of the first call and of a timed call. This and the
            errors are missing in rounds of a block, see `jobs.block`.
        host_ms: launch overhead of each phase: milliseconds that the call takes on the host. Empty
            without a GPU.
        hold_ms: the longest time for which the GPU is kept busy before a timed call. Missing
            without a GPU.
        sustained_calls: number of calls in each sustained phase, to divide the energy by.
            backward_sustained is left out, because its energy includes forward.
        launch_bound: the sustained phases in which the host issued the calls not faster than the
            GPU executed them. Missing if there are none.
        before_backward_bytes: GPU memory that is allocated when backward starts. Missing without a
            GPU.
        graph_error: why the code of a user cannot be captured in a CUDA graph. Then there is no
            phase forward_backward_graph.
        wall_ms: milliseconds of forward_backward from the call until the GPU is idle again. Only on
            a GPU and only if seq_len is at most LAUNCH_BOUND.

    Raises:
        Unsupported: if the implementation does not support this dtype, shape or device.
        WrongOutput: if the output or a gradient is not accurate enough, see
            `systems.check.attention_accuracy.check_attention`.
        BadReference: if `implementation` is a reference that names no attention function.
    """
    import torch

    from systems.check.attention_call import AttentionCall
    from systems.measure.windows import during

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    options = round_options()
    try:
        call = AttentionCall(params, device)
        compiling = call.compile()
        first = call.first(keep=options.check)
    except NotImplementedError as error:
        raise Unsupported(f"{params.implementation}: {error}") from error
    measured, facts = _measure(call, params, device, keep=options.check)
    flops, moved = _predicted_work(params)
    if first is not None:
        with during("check"):
            facts |= _check(call, first)
    if device.type == "cuda" and params.seq_len <= LAUNCH_BOUND:
        with during("forward_backward_graph"):
            _add_graph(call, measured["samples_ms"], facts, options.check)
    if options.sustained_s:  # after all other phases, because it heats the GPU
        facts |= _add_sustained(call, options.sustained_s, measured["samples_ms"])
        flops |= {f"{phase}_sustained": count for phase, count in flops.items()}
    return {
        **measured,
        "flops": flops,
        "bytes": moved,
        "compiling_seconds": compiling,
        "facts": facts,
    }


def _predicted_work(params: Params) -> tuple[dict[str, int], dict[str, int]]:
    """Return the FLOPs and the bytes of each phase (see `systems.accounting.attention`)."""
    if params.is_plain:
        sizes = (params.batch_size, params.num_heads, params.seq_len, params.head_dim)
        flops = {p: accounting.attention_flops(p, *sizes, params.causal) for p in PHASES}
        return flops, {p: accounting.attention_bytes(p, *sizes, params.dtype) for p in PHASES}
    right = 0 if params.causal else params.window_right
    scores = sum(
        accounting.visible_scores(
            n_queries, n_keys, params.window_left, right, params.alignment == "lower_right"
        )
        for n_queries, n_keys in params.lengths
    )
    dims = params.head_dim, params.value_dim or params.head_dim
    rows_q, rows_k = (sum(column) for column in zip(*params.lengths, strict=True))
    heads = params.num_heads, params.num_kv_heads or params.num_heads
    return (
        {p: accounting.scores_flops(p, params.num_heads * scores, *dims) for p in PHASES},
        {p: accounting.tensors_bytes(p, rows_q, rows_k, heads, dims, params.dtype) for p in PHASES},
    )


def _check(call: AttentionCall, first: AttentionResult) -> dict[str, Any]:
    """Check the results for the timed values, then for new ones in the same buffers."""
    assert call.timed is not None
    started = time.perf_counter()
    exact = call.reference()
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


def _add_sustained(
    call: AttentionCall, seconds: float, samples: dict[str, list[float]]
) -> dict[str, Any]:
    """Add the phases forward_sustained etc. to `samples`; return their facts, see `run`."""
    from systems.measure.sustained import Sustained, facts_of, sustained_ms
    from systems.measure.windows import during

    measured: dict[str, Sustained] = {}
    for phase, (fn, before) in call.phases().items():
        name = f"{phase}_sustained"
        with during(name):
            measured[name] = sustained_ms(fn, call.dout.device, seconds, before=before, phase=name)
        samples[name] = measured[name].samples_ms
        call.out = None
    facts = facts_of(measured)
    del facts["sustained_calls"]["backward_sustained"]  # forward runs between its calls
    return facts


def _measure(
    call: AttentionCall, params: Params, device: torch.device, keep: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return samples_ms and peak_memory_bytes of each phase, and facts.

    With `keep`, the results of a timed call stay in `call.timed`.
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
    call: AttentionCall, samples: dict[str, list[float]], facts: dict[str, Any], check: bool
) -> None:
    """Add the phase forward_backward_graph to `samples`, or graph_error to `facts`."""
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
    """Capture `fn` as a CUDA graph; return its replay, and the result that replays overwrite."""
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
