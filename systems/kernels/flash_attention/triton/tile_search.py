"""Search for the fastest tile sizes of the Triton kernels on the current GPU."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from systems.kernels.flash_attention.call import Call, signature
from systems.kernels.flash_attention.triton.plans import BackwardPlan, ForwardPlan
from systems.kernels.flash_attention.triton.tile_table import (
    Configuration,
    Tile,
    configuration,
    kind,
)

COMPILE_THREADS = 16
# Largest relative L2 difference between the results of a candidate and those of the first candidate
# that runs. A larger difference cannot be a rounding error, so the candidate is rejected.
AGREEMENT = {"16-bit": 1e-2, "fp16x3": 1e-4, "tf32": 1e-2}
# Candidates for block_q, block_k and num_warps: SHAPES_KV for dkdv, SHAPES_Q for other kernels
SHAPES_Q = (
    (128, 128, 8), (128, 64, 8), (128, 64, 4), (128, 32, 8), (64, 128, 4), (64, 64, 4), (64, 32, 4)
)  # fmt: skip
SHAPES_KV = ((64, 128, 8), (32, 128, 8), (16, 128, 8), (64, 64, 4), (32, 64, 4), (128, 64, 4))
STAGES = (2, 3, 4)


def candidates(name: str) -> list[Tile]:
    """Return all tiles (sizes and launch options) to try for "forward", "dkdv" or "dq"."""
    shapes = SHAPES_KV if name == "dkdv" else SHAPES_Q
    return [Tile(*shape, stages) for shape in shapes for stages in STAGES]


def search(
    n_heads: int,
    n_queries: int,
    n_keys: int,
    head_dim: int,
    *,
    dtype: torch.dtype,
    precision: str = "fp16x3",
    is_causal: bool = True,
    report: Callable[[str], object] = lambda line: None,
) -> Configuration:
    """Measure all candidate tile sizes on the current GPU, and return the fastest for each kernel.

    Each candidate runs repeatedly for about 20 ms. Its time is the median time of one pass. If
    `tile_table.TABLE` has a separate tile for dV, the tiles for dK and dV are those of the table.
    n_heads includes the batch size. The other properties are as in `launch.flash_forward`. `report`
    gets a line of text for each candidate.

    Raises:
        RuntimeError: if all candidates of a kernel fail on this GPU.
        torch.OutOfMemoryError: if there is not enough free GPU memory for the search.
    """
    from systems.kernels.kernel_launch import compiling_only

    # A separate generator, so that a search does not change the random numbers of the caller.
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v, dout = (
        torch.randn((n_heads, n, head_dim), generator=generator, device="cuda").to(dtype)
        for n in (n_queries, n_keys, n_keys, n_queries)
    )
    # out and lse. The search for the forward pass fills them, and the backward pass reads them.
    outputs = torch.empty_like(q), torch.empty(q.shape[:-1], dtype=torch.float32, device="cuda")
    found = configuration(head_dim, dtype, precision)
    names = ["forward", "dkdv", "dq"] if found.dv is None else ["forward", "dq"]
    prepare = functools.partial(_Candidate, (q, k, v, *outputs, dout), found, is_causal, precision)
    tries = {
        name: [prepare(name, tile) for tile in (getattr(found, name), *candidates(name))]
        for name in names
    }
    with compiling_only(COMPILE_THREADS):
        for candidate in (candidate for of_pass in tries.values() for candidate in of_pass):
            candidate()
    for name, of_pass in tries.items():
        best = _fastest(of_pass, AGREEMENT[kind(dtype, precision)], report)
        if best is None:
            raise RuntimeError(
                f"none of the {len(of_pass)} candidate tiles of the {name} kernel runs on "
                f"{torch.cuda.get_device_name()} with {dtype} and head_dim {head_dim}"
            )
        candidate, reference = best
        tile = candidate.tile._replace(resident=candidate.launch.resident())
        found = found._replace(**{name: tile})
        if name == "forward":
            for output, value in zip(outputs, reference, strict=True):
                output.copy_(value)
    return found


class _Candidate:
    """A pass in which one kernel has a candidate tile. A call returns its outputs.

    The tensors are q, k, v, out, lse and dout. `base` has the tile sizes of all other kernels, and
    `tile` those of the kernel `name`: "forward", "dkdv" or "dq".
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        base: Configuration,
        is_causal: bool,
        precision: str,
        name: str,
        tile: Tile,
    ):
        q, k, v, out, lse, dout = tensors
        self.name, self.tile = name, tile
        self.run: Callable[[], Sequence[Tensor | None]]
        tiles = base._replace(**{name: tile})
        inputs = (*signature(q, k, v), Call(is_causal, precision=precision), tiles)
        if name == "forward":
            forward = ForwardPlan(*inputs, n_splits=None)
            self.launch, self.run = forward.attend, lambda: forward(q, k, v)
        else:
            backward = BackwardPlan(
                *inputs, out_strides=out.stride(), dout_strides=dout.stride(), n_splits_dkdv=None,
                n_splits_dq=None, needs_dq=name == "dq", needs_dkdv=name == "dkdv",
            )  # fmt: skip
            self.launch = backward.dq if name == "dq" else backward.dkdv[0]
            self.run = lambda: backward(q, k, v, out, lse, dout)

    def __call__(self) -> list[Tensor]:
        return [x for x in self.run() if x is not None]


def _fastest(
    tries: Sequence[_Candidate], agreement: float, report: Callable[[str], object]
) -> tuple[_Candidate, list[Tensor]] | None:
    """Measure the candidates, and return the fastest one and the outputs of the first that runs.

    A candidate is rejected if its relative L2 difference to these outputs is above `agreement`, and
    skipped if it does not compile or run. None if no candidate runs.
    """
    from triton.testing import do_bench

    reference: list[Tensor] | None = None
    best, fastest = tries[0], math.inf
    for candidate in tries:
        label = f"{candidate.name} {candidate.tile}"
        try:
            results = candidate()
            difference = 0.0 if reference is None else max(map(_difference, results, reference))
            if not difference <= agreement:
                report(
                    f"{label}: rejected, its results differ from those of the first candidate "
                    f"(relative L2 difference {difference:.1e})"
                )
                continue
            milliseconds = do_bench(candidate, warmup=5, rep=20, return_mode="median")
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # does not compile, or needs more shared memory than the GPU has
            report(f"{label}: {str(error).splitlines()[0]}")
            continue
        reference = reference or results
        report(f"{label}: {milliseconds:.4f} ms")
        if milliseconds < fastest:
            best, fastest = candidate, milliseconds
    return None if reference is None else (best, reference)


def _difference(x: Tensor, reference: Tensor) -> float:
    """Return the L2 norm of x - reference, divided by the L2 norm of reference."""
    return float((x.float() - reference.float()).norm() / reference.float().norm())
