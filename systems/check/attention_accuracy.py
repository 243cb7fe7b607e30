"""Compare the output and the gradients of attention with a float64 reference.

The comparison also detects functions that cheat a benchmark:

- Results of earlier calls, cached by the address of the inputs or from the previous call, are
  detected because the inputs get new values in the same memory (`refill`). Results that are cached
  by a few elements of the inputs are detected because only some rows get new values.
- Work on another CUDA stream that the current stream does not wait for is detected because the
  current stream is kept busy before the inputs get their new values. Work that does not wait then
  reads the old values, or its results are read too early.
- Work that is skipped in the first calls, or if the inputs are those of an earlier call, is
  detected because results of the first call and of a timed call are kept and compared, too.
- Missing rows of a long sequence are detected because the error is also computed for every few
  rows. In the error of the whole tensor, the last rows of a long causal sequence hardly count.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from systems.benchmark import WrongOutput
from systems.kernels.flash_attention.call import Call
from systems.kernels.flash_attention.reference import AttentionReference, attention_reference
from systems.measure.windows import during

# Maximum relative L2 error of the output and of each gradient, by dtype. The unit roundoffs of
# these dtypes are 2^-8, 2^-11 and 2^-24. Naive attention rounds the scores to the dtype, which
# causes a relative error of about 3 to 5 unit roundoffs in the softmax of a long row.
TOLERANCE = {"bf16": 2e-2, "fp16": 4e-3, "fp32": 5e-5}
ROWS = 4  # number of consecutive rows whose error is computed separately
# Maximum relative L2 error of ROWS to 2 * ROWS - 1 consecutive rows, as a multiple of TOLERANCE. If
# one of 7 rows is missing, the error is about 1/sqrt(7) = 0.38. Rounding causes about the error of
# the whole tensor, and more in rows where a gradient is a small difference of large terms.
ROWS_FACTOR = 5
BUSY_CYCLES = 50_000_000  # time for which the current stream is kept busy: about 30 ms


class AttentionErrors(NamedTuple):
    """Errors of the output (`out`) and of the gradients `dq`, `dk` and `dv`, by name."""

    total: dict[str, float]  # relative L2 error of the whole tensor
    rows: dict[str, float]  # largest relative L2 error of a few consecutive rows


class AttentionResult(NamedTuple):
    """Output of attention and gradients of q, k and v."""

    out: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


def refill(tensors: tuple[Tensor, ...], seed: int, some_rows: bool = False) -> None:
    """Write new random values into tensors, in place and unknown to autograd's version counters.

    On a GPU, the current stream first waits for about 30 ms, see the module. Tensors are (...,
    rows, head_dim). With some_rows, only an eighth of the rows gets new values. They are
    consecutive and at a random position.
    """
    device = tensors[0].device
    generator = torch.Generator(device).manual_seed(seed)
    new = [torch.randn(t.shape, generator=generator, device=device).to(t.dtype) for t in tensors]
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda._sleep(BUSY_CYCLES)
    count = min(tensor.shape[-2] for tensor in tensors)
    rows = slice(None)
    if some_rows and count > 1:
        length = max(1, count // 8)
        start = random.Random(seed).randrange(1, count - length + 1)
        rows = slice(start, start + length)
    for tensor, values in zip(tensors, new, strict=True):
        tensor.data[..., rows, :].copy_(values[..., rows, :])


def call_once(
    forward: Callable[[], Tensor],
    inputs: tuple[Tensor, Tensor, Tensor],
    dout: Tensor,
    on_host: bool = False,
) -> AttentionResult:
    """Run forward and backward once, and return copies of the output and the gradients.

    The copies are made immediately on the current stream. What another stream or thread finishes
    later is missing in them. An exception names its phase, see `systems.measure.windows`. The
    inputs are leaf tensors that require gradients. Their `grad` must be None, and is None
    afterwards.

    Raises:
        WrongOutput: if the output or a gradient is missing, or has another type, shape or dtype
            than it must have. A subclass of torch.Tensor could delay its work until it is read.
    """
    q, _, _ = inputs
    with during("forward"):
        out = forward()
    if out.shape != dout.shape or out.dtype != q.dtype:
        raise WrongOutput(
            f"the output must have shape {tuple(dout.shape)} and dtype {q.dtype}, got "
            f"{tuple(out.shape)} and {out.dtype}"
        )
    if type(out) is not Tensor:
        raise WrongOutput(f"the output must be a torch.Tensor, got a {type(out).__name__}")
    copy = _copy(out, on_host)
    if not out.requires_grad:
        raise WrongOutput("the output must require gradients, as q, k and v do")
    with during("backward"):
        out.backward(dout)
    return AttentionResult(copy, *take_gradients(inputs, on_host))


def take_gradients(inputs: tuple[Tensor, Tensor, Tensor], on_host: bool = False) -> list[Tensor]:
    """Return copies of the gradients of q, k and v, and set `grad` to None.

    Raises:
        WrongOutput: if a gradient is missing or is not a plain torch.Tensor.
    """
    missing = [name for name, x in zip("qkv", inputs, strict=True) if x.grad is None]
    if missing:
        raise WrongOutput(f"backward computed no gradient of {', '.join(missing)}")
    lazy = [name for name, x in zip("qkv", inputs, strict=True) if type(x.grad) is not Tensor]
    if lazy:
        raise WrongOutput(f"the gradient of {', '.join(lazy)} must be a torch.Tensor")
    gradients = [_copy(x.grad, on_host) for x in inputs if x.grad is not None]
    for x in inputs:
        x.grad = None
    return gradients


def _copy(tensor: Tensor, on_host: bool) -> Tensor:
    return tensor.detach().to("cpu" if on_host else tensor.device, copy=True)


@torch.no_grad()
def errors_of(
    result: AttentionResult,
    inputs: tuple[Tensor, Tensor, Tensor],
    dout: Tensor,
    is_causal: bool,
    exact: AttentionReference | None = None,
) -> AttentionErrors:
    """Return the errors of attention's output and gradients against float64.

    The relative L2 error of a tensor x is ||x - reference|| / ||reference||. If the reference is
    zero, the norm of `dout` is the denominator. The tensors of `result` are (..., seq_len,
    head_dim) on any device. It was computed from the present values of the inputs. `exact` is
    computed if it is None.
    """
    exact = exact or attention_reference(*inputs, dout, Call(is_causal))
    scale = torch.linalg.vector_norm(dout.double()).item()
    total, rows = {}, {}
    for name, tensor in result._asdict().items():
        expected = getattr(exact, name)
        given = tensor.to(expected.device).double()
        wrong = torch.linalg.vector_norm(given - expected, dim=-1).square()
        right = torch.linalg.vector_norm(expected, dim=-1).square()
        norm = math.sqrt(right.sum().item())
        # If each query attends to one key only, dq and dk are zero. Then divide by ||dout||.
        if norm <= 1e-9 * scale:
            total[name] = rows[name] = math.sqrt(wrong.sum().item()) / scale
            continue
        total[name] = math.sqrt(wrong.sum().item()) / norm
        rows[name] = (_by_rows(wrong) / _by_rows(right)).max().sqrt().item()
    return AttentionErrors(total, rows)


def check_attention(
    call: Callable[[], Tensor] | AttentionResult,
    inputs: tuple[Tensor, Tensor, Tensor],
    dout: Tensor,
    is_causal: bool,
    implementation: str,
    dtype: str,
    when: str = "",
    exact: AttentionReference | None = None,
) -> AttentionErrors:
    """Compare an output and gradients of attention with float64.

    `call` is what `call_once` returned, or the forward function, which is then called once.
    TOLERANCE has maximum errors by dtype. `when` tells when the results were computed, for the
    message, such as "after timing". For other arguments, see `errors_of`.

    Raises:
        WrongOutput: as `call_once`, or if an error is NaN or above its limit, which is ROWS_FACTOR
            times as high for a few rows as for the whole tensor.
    """
    result = call if isinstance(call, AttentionResult) else call_once(call, inputs, dout)
    errors = errors_of(result, inputs, dout, is_causal, exact)
    subject = " ".join(filter(None, (implementation, when)))
    for found, factor, of, hint in (
        (errors.total, 1, "", ""),
        (errors.rows, ROWS_FACTOR, f" of every {ROWS} rows", "; a few rows are wrong"),
    ):
        limit = factor * TOLERANCE[dtype]
        # "not <=" is also true for NaN, unlike ">".
        wrong = [f"{name} {error:.2e}" for name, error in found.items() if not error <= limit]
        if wrong:
            raise WrongOutput(
                f"{subject}: relative L2 error{of} against float64 must be at most {limit:.0e} in "
                f"{dtype}, got {', '.join(wrong)}{hint}"
            )
    return errors


def _by_rows(squares: Tensor) -> Tensor:
    """Sum a tensor (..., seq_len) over every ROWS elements; the last group has up to 2 * ROWS - 1.

    The result is (..., number of groups).
    """
    count = max(1, squares.shape[-1] // ROWS)
    first = squares[..., : (count - 1) * ROWS].unflatten(-1, (count - 1, ROWS)).sum(-1)
    last = squares[..., (count - 1) * ROWS :].sum(-1, keepdim=True)
    return torch.cat([first, last], dim=-1)
