"""Time attention in the same way as the leaderboard of assignment 2 of Stanford CS336.

Run it on this machine, without Slurm:

    python -m jobs.submit sweeps/flash_leaderboard.yaml --local

The leaderboard times forward and backward of causal attention in bfloat16, with batch size 1, 16
heads, 16,384 tokens and head_dim 64. The result is the mean time that
`triton.testing.do_bench(warmup=1000, rep=10000)` returns. This benchmark keeps the times whose mean
that is, so a table with `statistic: mean` shows the leaderboard's result. Details:

- The attention function is compiled with torch.compile.
- The loss is the sum of the output. So the gradient of the output is one number, 1, expanded to the
  shape of the output with strides of zero.
- Gradients are never cleared, so the time includes adding new gradients to old ones.

The benchmark `attention` times the same operations with `systems.measure.timing`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from systems import implementation_sources
from systems.benchmark import (
    AttentionChoice,
    BenchmarkParams,
    Sources,
    Unsupported,
    round_options,
)

if TYPE_CHECKING:
    from torch import Tensor

VERSION = 1
PRELOAD = ("torch.fx.experimental.symbolic_shapes",)


class Params(BenchmarkParams):
    """Parameters of causal attention in bf16. The defaults are those of the CS336 leaderboard."""

    # Key of `systems.kernels.flash_attention.ATTENTIONS`, or FILE.py:NAME.
    implementation: AttentionChoice
    num_heads: Annotated[int, Field(ge=1)] = 16  # number of heads of q, k and v
    seq_len: Annotated[int, Field(ge=1)] = 16_384  # number of tokens
    head_dim: Annotated[int, Field(ge=1)] = 64  # number of elements per head
    warmup_ms: Annotated[int, Field(ge=1)] = 1000  # warm-up time, in milliseconds
    rep_ms: Annotated[int, Field(ge=1)] = 10_000  # duration of the timed calls, in milliseconds


def sources(params: Params) -> Sources:
    """Return the modules that count for the results of a run with these parameters."""
    return implementation_sources.without_other_attentions(params.implementation)


def run(params: Params) -> dict[str, Any]:
    """Time forward and backward with `do_bench`, then check attention against float64.

    The results of the first call, which are kept in host memory, and results for new values in the
    same buffers are checked. In a block, only the trial includes the check.

    The calls follow each other for `warmup_ms` and `rep_ms`, by default 11 seconds. So this is a
    sustained time, and there is no phase forward_backward_sustained.

    Phases:
        forward_backward: time of each call.

    Facts:
        relative_error: as in the benchmark `attention`. Missing if attention was not checked.

    Raises:
        Unsupported: if there is no GPU, or the implementation does not support the inputs.
        WrongOutput: as in the benchmark `attention` with bf16.
    """
    import torch
    from triton.testing import do_bench

    from systems import accounting
    from systems.check.attention_accuracy import call_once, check_attention, refill
    from systems.kernels.flash_attention.call import Call
    from systems.measure.windows import during, window
    from systems.training.attention_choice import attention_function

    if not torch.cuda.is_available():
        raise Unsupported("triton.testing.do_bench needs a GPU; this machine has no GPU")
    device = torch.device("cuda")
    torch.manual_seed(0)
    shape = (1, params.num_heads, params.seq_len, params.head_dim)
    q, k, v = (
        torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    )
    attention = attention_function(params.implementation, q, k, v, Call(True))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, is_causal=True)

    # The implementation `flex` already calls torch.compile. Inside another torch.compile it would
    # build its block mask again in every call.
    function = attend if params.implementation == "flex" else torch.compile(attend)

    expanded = torch.ones((), dtype=q.dtype, device=device).expand(shape)

    def forward() -> Tensor:
        return function(q, k, v)

    def forward_backward() -> None:
        forward().sum().backward()

    options = round_options()
    values = ((q, k, v), expanded, True, params.implementation, "bf16")
    first = call_once(forward, (q, k, v), expanded, on_host=True) if options.check else None
    budget = {"warmup": params.warmup_ms, "rep": params.rep_ms}
    with during("forward_backward"), window("forward_backward"):
        times = do_bench(forward_backward, **budget, return_mode="all")
    facts: dict[str, Any] = {}
    if first is not None:
        with during("check"):
            q.grad = k.grad = v.grad = None
            facts["relative_error"] = check_attention(first, *values).total
            for seed, some_rows in ((1, False), (2, True)):
                refill((q, k, v), seed=seed, some_rows=some_rows)
                check_attention(forward, *values, "after timing")
    sizes = (1, params.num_heads, params.seq_len, params.head_dim)
    return {
        "samples_ms": {"forward_backward": [round(ms, 6) for ms in times]},
        "flops": {"forward_backward": accounting.attention_flops("forward_backward", *sizes, True)},
        "facts": facts,
    }
