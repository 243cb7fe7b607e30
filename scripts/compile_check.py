"""Compile the attention kernels for sm_90 and check their resources, on a machine without a GPU.

    make compile-check

It plans and launches attention as on an H100, compiles the kernels of the launches, and does not
run them. It prints the registers per thread, the spilled bytes per thread and the shared memory per
program of the kernels of all default configurations (dtype, head dimension, causal or full mask),
and of the Hopper kernels.

It exits with code 1 if a kernel spills more registers than allowed, or if the programs of a kernel
that are to be resident on a multiprocessor need more than 227 KiB of shared memory together.
Kernels with grouped heads, packed sequences, a window or a softcap may spill up to 16 bytes.
`D192_SPILLS` has the limits of the backward kernel for head_dim 192, `SHORT_SPILLS` that of the
forward kernel for short sequences, and `MORE_SPILLS` what other releases of Triton may add. It also
exits with code 1 if the occupancy, i.e. the number of programs that fit on one multiprocessor, is
not that of the tile (`Tile.resident`) with a causal mask, or smaller with a full mask. The
occupancies are those of Triton 3.6; of other releases they are only printed.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))  # import `systems` of this checkout
from systems.kernels.flash_attention.call import Call, Packing
from systems.kernels.flash_attention.hopper import backward_launch, forward_launch
from systems.kernels.flash_attention.hopper.tiles import SHORT, HopperTile
from systems.kernels.flash_attention.triton import launch
from systems.kernels.flash_attention.triton.tile_table import Configuration, Tile, configuration
from systems.kernels.triton_driver import release
from tests.systems.kernels.hopper import Kernel, compiling_for_hopper

SHARED_LIMIT = 227 << 10  # maximum shared memory of a program on sm_90, in bytes
HEAD_DIMS = (16, 32, 64, 80, 128, 192, 256)
KINDS = {
    "bf16": (torch.bfloat16, "fp16x3"), "fp16": (torch.float16, "fp16x3"),
    "fp32": (torch.float32, "fp16x3"), "tf32": (torch.float32, "tf32"),
}  # fmt: skip
# Length and heads of the inputs. As few arguments as possible are multiples of 16 or 1, for which
# Triton compiles other code.
LENGTH, HEADS = 9001, 3
STARTS = torch.tensor([0, 1500, LENGTH], dtype=torch.int32)  # of packed sequences
FORMS = {
    "full": Call(), "causal": Call(True), "split": Call(True), "softcap": Call(True, softcap=30.0),
    "window": Call(window_left=1023, window_right=511, lower_right=True),
    "packed": Call(True, packing=Packing(STARTS, STARTS, 7501, 7501)),
}  # fmt: skip
# Largest number of spilled bytes per thread of `d192_backward_kernel` by form, with one and with
# several heads of q per work item. The spilled values are integers, such as indices of tiles.
# Spilled accumulators would make WGMMAs wait for each other.
D192_SPILLS = {"full": (0, 48), "causal": (8, 88), "split": (72, 256), "window": (16, 104)}
# Largest number with the forward tile SHORT, two of whose programs share the registers. The spilled
# values are packed probabilities, and an index in packed sequences.
SHORT_SPILLS = 40
FEATURE_SPILLS = 16  # largest number of spilled bytes per thread with a feature: four registers
# These limits are those of Triton 3.6. Spilled bytes that another release may add to them. Without
# a number, there is no limit.
MORE_SPILLS: dict[tuple[int, ...], int] = {(3, 6): 0, (3, 7): 24, (3, 8): 32}
OCCUPANCY_OF = (3, 6)  # release whose occupancies the table of tiles has


def tensors(
    head_dim: int, dtype: torch.dtype, form: str, q_per_kv: int = 1, value_dim: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v on the CPU, without values."""
    batch = () if form == "packed" else (2,)
    heads = HEADS * q_per_kv, HEADS, HEADS
    columns = head_dim, head_dim, value_dim or head_dim
    shapes = [(*batch, of[0], LENGTH, of[1]) for of in zip(heads, columns, strict=True)]
    q, k, v = (torch.empty(shape, dtype=dtype) for shape in shapes)
    return q, k, v


def compile_triton(
    head_dim: int,
    dtype: torch.dtype,
    form: str = "causal",
    tiles: Configuration | None = None,
    precision: str = "fp16x3",
    q_per_kv: int = 1,
) -> dict[str, Kernel]:
    """Compile the Triton kernels of forward and backward.

    Args:
        form: a key of `FORMS`. With "split", inner loops are split into two ranges.

    Returns:
        The kernels by what they compute: forward, delta, dkdv or both dk and dv, dq, and those that
        combine partial results or split float32 inputs.
    """
    call, n_splits = FORMS[form]._replace(precision=precision), 2 if form == "split" else 1
    q, k, v = tensors(head_dim, dtype, form, q_per_kv)
    with compiling_for_hopper() as found:
        out, lse = launch.flash_forward(q, k, v, call, tiles=tiles, n_splits=n_splits)
        launch.flash_backward(
            q, k, v, out, lse, out, call, tiles=tiles, n_splits_dkdv=n_splits, n_splits_dq=n_splits
        )
    return {_computes(kernel): kernel for kernel in found}


def _computes(kernel: Kernel) -> str:
    """Return what a Triton kernel computes, such as "dk" of `dkdv_kernel` without dV."""
    if kernel.name == "dkdv_kernel":
        return "d" + "d".join(name for name in "kv" if kernel.constants[f"D{name.upper()}"])
    return kernel.name.removesuffix("_kernel")


def compile_hopper(
    name: str,
    head_dim: int,
    form: str,
    tile: HopperTile | None = None,
    q_per_kv: int = 1,
    deterministic: bool = False,
    value_dim: int | None = None,
) -> Kernel:
    """Compile a Gluon kernel of attention for bfloat16 inputs.

    Args:
        name: "forward" or "backward".
        form: a key of `FORMS`. With "split", keys are split into two ranges in forward, and queries
            in backward, or with several heads of q per head of k these heads.
        tile: of the forward kernel. None means the default for `head_dim`.
        q_per_kv: number of heads of q per head of k and v. A work item of backward has all of them,
            or half of them if the form is "split".
        deterministic: whether the backward kernel adds to dQ in a fixed order.
        value_dim: head dimension of v: that of q by default, or 128 if that of q is above 128.
    """
    call, n_splits = FORMS[form], 2 if form == "split" and q_per_kv == 1 else 1
    q, k, v = tensors(head_dim, torch.bfloat16, form, q_per_kv, value_dim)
    with compiling_for_hopper() as found:
        if name == "forward":
            forward_launch.flash_forward(
                q, k, v, call, tile=tile, n_splits=n_splits, reuse_counters=False
            )
        else:
            out = q.new_empty(*q.shape[:-1], v.shape[-1])
            lse = torch.empty(q.shape[:-1])
            backward_launch.flash_backward(
                q, k, v, out, lse, out, call, n_splits=n_splits, deterministic=deterministic,
                q_per_item=max(1, q_per_kv // 2) if form == "split" else q_per_kv,
            )  # fmt: skip
    (kernel,) = (kernel for kernel in found if kernel.is_gluon)
    return kernel


def fault(kernel: Kernel, spills: int, resident: int = 1) -> str:
    """Return what is wrong with the resources of a kernel, "" if nothing is."""
    if resident * (kernel.shared + 1024) > SHARED_LIMIT + 1024:
        return "TOO MUCH SHARED MEMORY"
    if kernel.spilled > spills + MORE_SPILLS.get(release(), math.inf):
        return "SPILLS"
    return "" if kernel.resident >= resident else f"OCCUPANCY {kernel.resident}, NOT {resident}"


def spill_limit(kernel: Kernel, form: str, tile: HopperTile | None = None) -> int:
    """Return how many bytes per thread a kernel of `compile_hopper` may spill."""
    if tile == SHORT:
        return SHORT_SPILLS
    if kernel.name == "d192_backward_kernel":
        return D192_SPILLS[form][kernel.constants["Q_PER_ITEM"] > 1]
    is_plain = kernel.constants["Q_PER_KV"] == 1 and form in ("full", "causal", "split")
    return 0 if is_plain else FEATURE_SPILLS


def triton_rows() -> list[list[object]]:
    """Compile and check the Triton kernels of all default configurations."""
    rows: list[list[object]] = []
    for (label, (dtype, precision)), head_dim in product(KINDS.items(), HEAD_DIMS):
        tiles = configuration(head_dim, dtype, precision)
        of_passes: dict[str, Tile | None] = {
            "forward": tiles.forward, "dkdv": tiles.dkdv, "dk": tiles.dkdv, "dv": tiles.dv,
            "dq": tiles.dq,
        }  # fmt: skip
        for form in ("causal", "full", "split"):
            for name, kernel in compile_triton(head_dim, dtype, form, tiles, precision).items():
                tile = of_passes.get(name)
                resident = tile.resident if tile and release() == OCCUPANCY_OF else 1
                wrong = fault(kernel, 0, resident)
                is_exact = tile and form == "causal" and release() == OCCUPANCY_OF
                if is_exact and kernel.resident > resident:
                    wrong = f"OCCUPANCY {kernel.resident}, NOT {resident}"
                given = tile or [""] * len(Tile._fields)
                row = [label, head_dim, name, form, *given, kernel.resident, *_resources(kernel)]
                rows.append([*row, wrong])
    return rows


def feature_rows() -> list[list[object]]:
    """Compile and check the Triton kernels with features, for bfloat16."""
    rows: list[list[object]] = []
    for form, head_dim in product(("packed", "window", "softcap"), (64, 128)):
        q_per_kv = 4 if form == "packed" else 1
        for name, kernel in compile_triton(
            head_dim, torch.bfloat16, form, q_per_kv=q_per_kv
        ).items():
            label = "packed, grouped" if form == "packed" else form
            wrong = fault(kernel, FEATURE_SPILLS)
            rows.append([label, head_dim, name, *_resources(kernel), wrong])
    return rows


def hopper_rows() -> list[list[object]]:
    """Compile and check the Hopper kernels."""
    cases: list[tuple[str, int, str, HopperTile | None, int]] = [
        (name, head_dim, form, None, 1)
        for name, head_dim, form in product(("forward", "backward"), (64, 128, 192, 256), FORMS)
    ]
    cases += [("forward", 64, form, SHORT, 1) for form in ("causal", "split", "packed", "softcap")]
    cases += [("backward", 192, "split", None, q_per_kv) for q_per_kv in (2, 4)]
    rows: list[list[object]] = []
    for name, head_dim, form, tile, q_per_kv in cases:
        kernel = compile_hopper(name, head_dim, form, tile, q_per_kv)
        wrong = fault(kernel, spill_limit(kernel, form, tile), tile.resident if tile else 1)
        label = f"{name} (short)" if tile else name
        if q_per_kv > 1:
            label += f" ({q_per_kv} heads)"
        rows.append([label, head_dim, form, *_resources(kernel), wrong])
    return rows


def _resources(kernel: Kernel) -> list[object]:
    return [kernel.registers, kernel.spilled, kernel.shared / 1024]


TABLES: list[tuple[list[str], Callable[[], list[list[Any]]]]] = [
    (
        ["dtype", "head_dim", "computes", "form", "block_q", "block_k", "warps", "stages",
         "resident", "max registers", "occupancy"], triton_rows,
    ),
    (["feature", "head_dim", "computes"], feature_rows),
    (["hopper", "head_dim", "form"], hopper_rows),
]  # fmt: skip


def main() -> int:
    print("registers: per thread at the launch; the warps of Hopper kernels then exchange some")
    wrong = 0
    for headers, make in TABLES:
        rows = make()
        wrong += sum(bool(row[-1]) for row in rows)
        print(f"\n{tabulate(rows, [*headers, 'registers', 'spilled bytes', 'shared KiB', ''])}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
