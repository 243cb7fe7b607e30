"""Check an attention function against float64 for a grid of shapes, dtypes and memory layouts."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from systems.benchmark import Unsupported, WrongOutput
from systems.check.attention_accuracy import (
    ROWS_FACTOR,
    TOLERANCE,
    AttentionErrors,
    call_once,
    errors_of,
    refill,
)
from systems.check.checked import Checked, one_line
from systems.dtypes import TORCH_DTYPES
from systems.kernels.flash_attention.call import Call
from systems.kernels.flash_attention.reference import attention_reference
from systems.training.attention_choice import attention_function

Inputs = tuple[Tensor, Tensor, Tensor]
# (batch, heads, seq_len, head_dim). Sequence lengths are one token, multiples of common tile sizes,
# and lengths that are no multiple of them.
SHAPES = [
    (1, 1, 16, 16), (1, 1, 1, 64), (1, 1, 16, 64), (1, 1, 32, 32), (1, 1, 64, 64), (1, 1, 100, 64),
    (2, 2, 64, 32), (1, 1, 128, 128), (2, 3, 100, 32), (2, 3, 128, 64), (1, 2, 256, 64),
    (1, 1, 1000, 64),
]  # fmt: skip
LARGE_SHAPES = [(1, 4, 4096, 64), (1, 4, 4096, 128)]  # on a GPU only
CONTIGUOUS = "contiguous"
# Scores up to about 100, whose exponential overflows in float32. Checked in float32 only, because
# rounding such scores to 16 bits changes the softmax too much.
LARGE = 30.0  # factor of q
LARGE_SCORES = "scores up to 100, whose exponentials overflow"
LARGE_SCORES_TOLERANCE = 5e-4
LAYOUTS = (
    "heads after seq_len in memory",
    "rows with gaps, as in a tensor of q, k and v",
    "storage that is not aligned to 16 bytes",
    "dout expanded from one number, as of out.sum()",
)
LAYOUT_SHAPE = (2, 3, 128, 64)  # shape for which the layouts are checked


@dataclass(frozen=True)
class Case:
    """Inputs of one check."""

    batch: int
    heads: int
    seq_len: int
    head_dim: int
    dtype: str
    causal: bool
    layout: str = CONTIGUOUS

    @property
    def limit(self) -> float:
        """Maximum relative L2 error of the output and of the gradients."""
        return LARGE_SCORES_TOLERANCE if self.layout == LARGE_SCORES else TOLERANCE[self.dtype]

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.batch, self.heads, self.seq_len, self.head_dim

    def __str__(self) -> str:
        text = (
            f"batch {self.batch}, heads {self.heads}, seq_len {self.seq_len}, "
            f"head_dim {self.head_dim}, {self.dtype}, {'causal' if self.causal else 'not causal'}"
        )
        return text if self.layout == CONTIGUOUS else f"{text}, {self.layout}"


def cases(
    on_gpu: bool,
    dtypes: list[str] | None = None,
    seq_lens: list[int] | None = None,
    head_dims: list[int] | None = None,
) -> list[Case]:
    """Return the cases of the grid, smallest first.

    Large shapes are only for a GPU. With seq_lens and head_dims, the shapes are all their
    combinations, with one head.
    """
    shapes = SHAPES + (LARGE_SHAPES if on_gpu else [])
    if seq_lens or head_dims:
        shapes = [(1, 1, n, d) for n in seq_lens or [128] for d in head_dims or [64]]
    return [
        Case(*shape, dtype, causal, layout)
        for shape in sorted(shapes, key=math.prod)
        for dtype in dtypes or ["fp32", "bf16", "fp16"]
        for causal in (False, True)
        for layout in (CONTIGUOUS, *LAYOUTS, LARGE_SCORES)
        if layout == CONTIGUOUS or (causal and shape == LAYOUT_SHAPE)
        if layout != LARGE_SCORES or dtype == "fp32"
    ]


def check_attention(
    reference: str, grid: list[Case], device: torch.device, budget_s: float
) -> Iterator[Checked]:
    """Check an attention function, and yield the result of each case as soon as it is known.

    The first case runs in any case. After `budget_s` seconds, no other case starts. After a CUDA
    error no case can run, so the iteration ends.
    """
    end = time.monotonic() + budget_s
    for i, case in enumerate(grid):
        if i and time.monotonic() > end:
            return
        checked = _check(reference, case, device)
        yield checked
        if "CUDA error" in checked.refused:
            return


def _check(reference: str, case: Case, device: torch.device) -> Checked:
    inputs, dout = _inputs(case, device)
    try:
        attention = attention_function(reference, *inputs, Call(case.causal))
        forward = partial(attention, *inputs, is_causal=case.causal)
        result = call_once(forward, inputs, dout)
        exact = attention_reference(*inputs, dout, Call(case.causal))
        errors = errors_of(result, inputs, dout, case.causal, exact)
        wrong = [
            f"{name}: relative error {errors.total[name]:.1e} (at most {case.limit:.0e}), wrong in "
            + _wrong_rows(getattr(result, name), getattr(exact, name), ROWS_FACTOR * case.limit)
            for name in _wrong_tensors(errors, case)
        ]
        if not wrong:
            wrong = _second_call(forward, inputs, dout, case)
    except Unsupported as error:
        return Checked(case, refused=str(error))
    except WrongOutput as error:
        return Checked(case, wrong=[str(error)])
    except (Exception, SystemExit) as error:
        return Checked(case, refused=one_line(error))
    return Checked(case, errors.total, wrong)


def _second_call(
    forward: Callable[[], Tensor], inputs: Inputs, dout: Tensor, case: Case
) -> list[str]:
    """Call the function on new values in the same buffers; return what is wrong, in one line."""
    refill((*inputs, dout) if dout.is_contiguous() else inputs, seed=1)
    if case.layout == LARGE_SCORES:
        inputs[0].data *= LARGE
    result = call_once(forward, inputs, dout)
    wrong = _wrong_tensors(errors_of(result, inputs, dout, case.causal), case)
    why = "the result of an earlier call, or not synchronized with the current stream"
    names = ", ".join(wrong)
    return [f"{names} of a second call, on new values in the same buffers: {why}"] if wrong else []


def _inputs(case: Case, device: torch.device) -> tuple[Inputs, Tensor]:
    """Return q, k and v as leaves that require gradients, and the gradient of the output."""
    generator = torch.Generator(device).manual_seed(0)
    dtype, shape = TORCH_DTYPES[case.dtype], case.shape

    def draw() -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    def laid_out(x: Tensor) -> Tensor:
        if case.layout == LAYOUTS[0]:
            return x.transpose(1, 2).contiguous().transpose(1, 2)
        if case.layout == LAYOUTS[1]:
            return torch.cat([x, x, x], dim=-1)[..., : case.head_dim]
        if case.layout == LAYOUTS[2]:
            storage = torch.empty(x.numel() + 1, dtype=dtype, device=device)
            return storage[1:].view(shape).copy_(x)
        return x

    q, k, v = (laid_out(draw()) for _ in range(3))
    if case.layout == LARGE_SCORES:
        q *= LARGE
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    if case.layout == LAYOUTS[3]:
        return (q, k, v), torch.ones((), dtype=dtype, device=device).expand(shape)
    return (q, k, v), laid_out(draw())


def _wrong_tensors(errors: AttentionErrors, case: Case) -> list[str]:
    """Return the names of the output and gradients that are not accurate enough."""
    # The softmax of large scores is almost one-hot. Many rows of dq and dk are then almost zero.
    rows_limit = math.inf if case.layout == LARGE_SCORES else ROWS_FACTOR * case.limit
    return [
        name
        for name, error in errors.total.items()
        if not (error <= case.limit and errors.rows[name] <= rows_limit)
    ]


def _wrong_rows(given: Tensor, exact: Tensor, limit: float) -> str:
    """Describe which rows (positions in the sequence) are wrong."""
    norm = torch.linalg.vector_norm
    scale = norm(exact, dim=-1).mean()
    wrong = norm(given.double() - exact, dim=-1) > limit * (norm(exact, dim=-1) + 0.1 * scale)
    wrong |= ~given.isfinite().all(-1)
    rows = wrong.flatten(0, -2).any(0).nonzero().flatten().tolist()
    count = exact.shape[-2]
    if len(rows) in (0, count):
        return "all rows" if rows else "some rows"
    return f"{len(rows)} of {count} rows, from row {rows[0]} to row {rows[-1]}"
