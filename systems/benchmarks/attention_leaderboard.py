"""Attention, timed as in the leaderboard of assignment 2 of Stanford CS336.

    python -m jobs.submit sweeps/flash_leaderboard.yaml --local

The leaderboard times forward and backward of causal attention in bfloat16, with batch size 1, 16
heads, 16,384 tokens and head_dim 64. `triton.testing.do_bench(warmup=1000, rep=10000)` returns the
mean time. The function is compiled with torch.compile. The loss is the sum of the output, so the
gradient of the output is one number, expanded. Gradients are never cleared, so each call adds to
them. The benchmark `attention` measures the same call with this project's own timing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from systems.benchmark import AttentionName, BenchmarkParams, Unsupported

if TYPE_CHECKING:
    from torch import Tensor

VERSION = 1
PRELOAD = ("torch.fx.experimental.symbolic_shapes",)  # imported by a process's first backward


class Params(BenchmarkParams):
    """Parameters of the leaderboard's case. The defaults are those of the leaderboard."""

    implementation: Literal[AttentionName]  # name in `systems.kernels.flash_attention.ATTENTIONS`
    num_heads: Annotated[int, Field(ge=1)] = 16  # heads of q, k and v
    seq_len: Annotated[int, Field(ge=1)] = 16_384  # tokens
    head_dim: Annotated[int, Field(ge=1)] = 64  # elements per head
    warmup_ms: Annotated[int, Field(ge=1)] = 1000  # `warmup` of do_bench, in milliseconds
    rep_ms: Annotated[int, Field(ge=1)] = 10_000  # `rep` of do_bench, the timed part, milliseconds


def run(params: Params) -> dict[str, Any]:
    """Check the call, then time it. The only sample of forward_backward is the mean of do_bench.

    Raises:
        Unsupported: if there is no GPU, or the implementation does not support the inputs.
        WrongOutput: if the error of an output or a gradient is above `attention.TOLERANCE`.
    """
    import torch
    from triton.testing import do_bench

    from systems import accounting
    from systems.benchmarks.attention import relative_errors, require_right
    from systems.kernels.flash_attention import ATTENTIONS, unsupported_reason

    if not torch.cuda.is_available():
        raise Unsupported("triton.testing.do_bench needs a GPU; this machine has none")
    device = torch.device("cuda")
    torch.manual_seed(0)
    shape = (1, params.num_heads, params.seq_len, params.head_dim)
    q, k, v = (
        torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    )
    reason = unsupported_reason(q, k, v, True, params.implementation)
    if reason:
        raise Unsupported(reason)
    attention = ATTENTIONS[params.implementation]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, is_causal=True)

    # flex calls torch.compile itself. Inside another torch.compile it would rebuild its block mask
    # in every call.
    function = attend if params.implementation == "flex" else torch.compile(attend)

    expanded = torch.ones((), dtype=q.dtype, device=device).expand(shape)
    errors = relative_errors(lambda: function(q, k, v), q, k, v, expanded, True)
    require_right(errors, params.implementation, "bf16")

    def forward_backward() -> None:
        function(q, k, v).sum().backward()

    mean = do_bench(forward_backward, warmup=params.warmup_ms, rep=params.rep_ms)
    sizes = (1, params.num_heads, params.seq_len, params.head_dim)
    return {
        "samples_ms": {"forward_backward": [mean]},
        "flops": {"forward_backward": accounting.attention_flops("forward_backward", *sizes, True)},
        "facts": {"relative_error": errors},
    }
