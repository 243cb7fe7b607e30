"""Compare the latency of short attention with that of torch's function, in turn in one process.

Run it on a machine with a GPU, without Slurm:

    python -m jobs.submit sweeps/flash_latency.yaml --local

With short sequences, a call takes as long as Python, autograd and the CUDA driver need to launch
its kernels. That time depends on the host and on other processes on it. The benchmark therefore
calls the two functions in turn, and returns the ratio of their latencies.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from systems.attentions import ATTENTIONS
from systems.benchmark import BenchmarkParams, Unsupported, round_options

VERSION = 1
PRELOAD = ("torch.fx.experimental.symbolic_shapes",)
Positive = Annotated[int, Field(ge=1)]
if TYPE_CHECKING:
    Name = str
else:
    Name = Literal[("auto", "torch", *ATTENTIONS)]


class Params(BenchmarkParams):
    """Parameters of self-attention on random q, k and v with unit variance.

    q, k and v have shape (batch_size, num_heads, seq_len, head_dim).
    """

    # Argument `implementation` of `systems.kernels.flash_attention.flash_attention`: auto lets it
    # choose. Or torch, for torch's function itself: its ratio shows how far that of equal functions
    # is from 1.
    implementation: Name
    seq_len: Positive  # number of tokens
    head_dim: Positive = 64  # number of elements per head
    batch_size: Positive = 1  # number of sequences
    num_heads: Positive = 1  # number of heads of q, k and v
    dtype: Literal["bf16", "fp16", "fp32"] = "bf16"  # dtype of q, k, v, output and gradients
    causal: bool = True  # whether to apply the causal mask
    rounds: Positive = 500  # number of timed calls of each function


def run(params: Params) -> dict[str, Any]:
    """Time synchronized calls of forward and backward, then check them against float64.

    A call starts while the device is idle, and ends when it is idle again. Gradients are cleared
    before each call. In a block, only the trial includes the check.

    Phases:
        forward_backward: `flash_attention` with the given implementation.
        torch: torch.nn.functional.scaled_dot_product_attention, which chooses its backend.

    Facts:
        latency_over_torch: median over the rounds of the ratio of the two latencies. Below 1, the
            implementation is faster than torch.
        relative_error: as in the benchmark `attention`.

    Raises:
        Unsupported, WrongOutput: as in the benchmark `attention`.
    """
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    from systems.check.attention_accuracy import check_attention, refill
    from systems.dtypes import TORCH_DTYPES
    from systems.kernels.flash_attention import Call, flash_attention, unsupported_reason
    from systems.measure.latency import latency_ms_in_turn
    from systems.measure.windows import during

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    shape = (params.batch_size, params.num_heads, params.seq_len, params.head_dim)
    q, k, v, dout = (
        torch.randn(shape, device=device).to(TORCH_DTYPES[params.dtype]) for _ in "qkvo"
    )
    inputs = q.requires_grad_(), k.requires_grad_(), v.requires_grad_()

    if params.implementation in ATTENTIONS:
        reason = unsupported_reason(q, k, v, params.implementation, Call(params.causal))
        if reason:
            raise Unsupported(reason)

    def of_torch() -> torch.Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=params.causal)

    def own() -> torch.Tensor:
        return flash_attention(q, k, v, params.causal, implementation=params.implementation)

    forward = of_torch if params.implementation == "torch" else own

    def clear_gradients() -> None:
        q.grad = k.grad = v.grad = None

    functions = {
        "forward_backward": lambda: forward().backward(dout),
        "torch": lambda: of_torch().backward(dout),
    }
    samples = latency_ms_in_turn(functions, device, before=clear_gradients, rounds=params.rounds)
    clear_gradients()
    pairs = zip(samples["forward_backward"], samples["torch"], strict=True)
    facts: dict[str, Any] = {
        "latency_over_torch": statistics.median(own_ms / torch_ms for own_ms, torch_ms in pairs)
    }
    if round_options().check:
        with during("check"):
            values = inputs, dout, params.causal, params.implementation, params.dtype
            facts["relative_error"] = check_attention(forward, *values).total
            refill((*inputs, dout), seed=1)
            check_attention(forward, *values, "after timing")
    return {"samples_ms": samples, "facts": facts}
