"""Attention as the leaderboard of Stanford CS336's second assignment times it.

    python -m jobs.submit sweeps/flash_leaderboard.yaml --local

Forward and backward of one batch of 16 heads, 16,384 tokens of 64 dimensions, causal, in bfloat16,
by `triton.testing.do_bench(warmup=1000, rep=10000)`, which returns the mean. The function is under
torch.compile, the loss is the sum, whose gradient is one number expanded, and gradients are never
cleared, so that each call adds to them. `attention` measures the same by this project's rules.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from systems.benchmark import AttentionName, BenchmarkParams, Unsupported

if TYPE_CHECKING:
    from torch import Tensor

VERSION = 1
PRELOAD = ("torch.fx.experimental.symbolic_shapes",)  # a first backward imports it


class Params(BenchmarkParams):
    """The leaderboard's case by default; tests use smaller ones."""

    implementation: Literal[AttentionName]
    num_heads: Annotated[int, Field(ge=1)] = 16
    seq_len: Annotated[int, Field(ge=1)] = 16_384
    head_dim: Annotated[int, Field(ge=1)] = 64
    warmup_ms: Annotated[int, Field(ge=1)] = 1000
    rep_ms: Annotated[int, Field(ge=1)] = 10_000


def run(params: Params) -> dict[str, Any]:
    """Return facts; samples_ms of forward_backward is a single number, the mean.

    Raises:
        Unsupported: no GPU, or the implementation does not take this.
        WrongOutput: the error of an output or gradient is above `attention.TOLERANCE`.
    """
    import torch
    from triton.testing import do_bench

    from systems import accounting
    from systems.benchmarks.attention import relative_errors, require_right
    from systems.kernels.flash_attention import ATTENTIONS, unsupported_reason

    if not torch.cuda.is_available():
        raise Unsupported("do_bench needs a GPU")
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

    # flex calls torch.compile itself; inside another one it would make its mask in every call.
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
