"""Compile the attention kernels for sm_90 and check their resources, on a machine without a GPU.

    make compile-check

A pass is a part of attention that one kernel computes, such as forward. The check compiles the
Triton kernels of all default configurations (dtype, head dimension, pass, causal or full mask), the
memory-bound kernels, and the warp-specialized Gluon kernels. It prints the registers per thread,
the spilled bytes per thread and the shared memory per program of each kernel.

It exits with code 1 if a kernel spills more registers than allowed, or if the kernel of a pass or
a Gluon kernel needs more than 227 KiB of shared memory. Kernels with grouped heads, packed
sequences, a window or a softcap may spill up to 16 bytes. `D192_SPILLS` has the limits of the
backward kernel for head_dim 192, `SHORT_SPILLS` that of the forward kernel for short sequences, and
`MORE_SPILLS` what other releases of Triton may add. It also exits with code 1 if the occupancy of
the kernel of a pass is wrong. The occupancy is the number of programs that fit on one
multiprocessor. The table of tiles states the expected occupancy of each tile (`Tile.resident`). The
occupancy must be equal to this number with a causal mask. With a full mask, it must be at least
this number.
"""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tabulate import tabulate

sys.path.insert(0, str(Path(__file__).parents[1]))  # import `systems` of this checkout
from systems.kernels.flash_attention.hopper.backward_launch import (
    D192_COPIED_KEYS,
    MAX_STORED_COLUMNS,
    d192_supports,
    high_columns,
)
from systems.kernels.flash_attention.hopper.tiles import (
    COPIED_COLUMNS,
    SHORT,
    HopperTile,
    copied_columns,
    forward_tile,
    kernel_head_dim,
    used_columns,
)
from systems.kernels.flash_attention.triton.backward_ops import delta_kernel
from systems.kernels.flash_attention.triton.combine_kernel import combine_kernel, sum_kernel
from systems.kernels.flash_attention.triton.dkdv_kernel import dkdv_kernel
from systems.kernels.flash_attention.triton.dq_kernel import dq_kernel
from systems.kernels.flash_attention.triton.forward_kernel import forward_kernel
from systems.kernels.flash_attention.triton.fp16_split_kernel import parts_kernel, peak_kernel
from systems.kernels.flash_attention.triton.tile_table import (
    MEMORY_BOUND_ELEMENTS,
    Configuration,
    Tile,
    block_columns,
    block_d,
    configuration,
)
from systems.kernels.triton_driver import release
from tests.systems.kernels.hopper import compile_for_hopper, compile_gluon_for_hopper, resources

SHARED_LIMIT = 227 << 10  # maximum shared memory of a program on sm_90, in bytes
HEAD_DIMS = (16, 32, 64, 80, 128, 192, 256)
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
KINDS = {
    "bf16": (torch.bfloat16, "fp16x3"), "fp16": (torch.float16, "fp16x3"),
    "fp32": (torch.float32, "fp16x3"), "tf32": (torch.float32, "tf32"),
}  # fmt: skip
PASSES = {
    "forward": forward_kernel, "dkdv": dkdv_kernel, "dk": dkdv_kernel, "dv": dkdv_kernel,
    "dq": dq_kernel,
}  # fmt: skip
MEMORY_BOUND_KERNELS = {
    "delta": delta_kernel, "combine": combine_kernel, "sum": sum_kernel, "peak": peak_kernel,
    "parts": parts_kernel,
}  # fmt: skip
# Names of pointer arguments: to float32, to operands of matmuls, and to outputs
FLOAT32 = {"lse", "delta", "partials", "partial_lse"} | {
    f"{which}_whole" for which in ("first", "second", "third", "fourth")
}
OPERANDS = {"query", "key", "value", "dout"}
OUTPUTS = {"out", "other", "dkey", "dvalue", "dquery"}


class Resources(NamedTuple):
    """Resources that a compiled kernel uses, and its code."""

    registers: int  # per thread
    spilled: int  # bytes per thread
    shared: int  # bytes per program
    warps: int  # per program
    ptx: str  # PTX code
    compiled: Any  # Triton's CompiledKernel

    @property
    def resident(self) -> int:
        """Number of programs that fit on one multiprocessor at the same time (the occupancy).

        A multiprocessor has 65,536 registers, 228 KiB of shared memory and room for 64 warps. The
        registers per thread are rounded up to a multiple of 8. The hardware reserves 1 KiB of
        shared memory for each program, in addition to the shared memory that the program requests.
        """
        registers = -(-self.registers // 8) * 8 * 32 * self.warps
        return min(65_536 // registers, (228 << 10) // (self.shared + 1024), 64 // self.warps)


def passes(tiles: Configuration) -> dict[str, Tile]:
    """Return the name and the tile of each kernel of a configuration.

    The names are forward, dq (gradient of the queries), and either dkdv or both dk and dv. The
    kernel dkdv computes the gradients of keys and values together.

    Args:
        tiles: configuration of the Triton kernels, with one tile for each kernel. A tile contains
            block sizes and launch options.
    """
    if tiles.dv is None:
        return {"forward": tiles.forward, "dkdv": tiles.dkdv, "dq": tiles.dq}
    return {"forward": tiles.forward, "dk": tiles.dkdv, "dv": tiles.dv, "dq": tiles.dq}


def compile_pass(
    name: str,
    head_dim: int,
    dtype: torch.dtype,
    is_causal: bool,
    tile: Tile,
    precision: str = "fp16x3",
    features: Mapping[str, bool | int] | None = None,
) -> Resources:
    """Compile a Triton attention kernel for sm_90, for contiguous and aligned inputs.

    Args:
        name: forward, dkdv, dk, dv or dq. The last four compute the gradients of keys and values,
            of keys, of values, or of queries.
        precision: how matmuls of float32 inputs are computed: "fp16x3" (from products of float16
            parts) or "tf32".
        features: values of constexpr parameters of the kernel for features that are off by default,
            such as {"SOFTCAP": True}.
    """
    sums = {"dkdv": {"DK": True, "DV": True}, "dk": {"DK": True, "DV": False}}
    sums["dv"] = {"DK": False, "DV": True}
    fp16x3 = dtype == torch.float32 and precision == "fp16x3"
    constants = {
        "HEAD_DIM": head_dim, "VALUE_DIM": head_dim,
        "BLOCK_Q": tile.block_q, "BLOCK_K": tile.block_k,
        "Q_PER_KV": 1, "PACKED": False, "HAS_LEFT": False, "HAS_RIGHT": is_causal,
        "IS_CAUSAL": is_causal,
        "LOWER_RIGHT": False, "SOFTCAP": False, "FP16X3": fp16x3,
        "PRECISION": "tf32" if precision == "tf32" else "ieee", "STAGES": tile.num_stages,
        **sums.get(name, {}), **(features or {}),
    }  # fmt: skip
    constants["BLOCK_D"], constants["BLOCK_V"] = block_columns(
        head_dim, int(constants["VALUE_DIM"])
    )
    multiplied = torch.float16 if fp16x3 else dtype
    return _compile(
        PASSES[name], constants, head_dim, multiplied, dtype, tile.options(on_hopper=True)
    )


def compile_memory_bound(name: str, head_dim: int, dtype: torch.dtype) -> Resources:
    """Compile a memory-bound kernel of attention for sm_90, for contiguous and aligned inputs.

    Args:
        name: name of the kernel: delta, combine, sum, peak or parts.
        dtype: dtype of the inputs of attention.
    """
    columns = block_d(head_dim)
    constants = {"HEAD_DIM": head_dim, "ROWS": MEMORY_BOUND_ELEMENTS // columns, "COLUMNS": columns}
    if name in ("peak", "parts"):
        constants["PACKED"] = False
    written = torch.float16 if name == "parts" else dtype
    return _compile(
        MEMORY_BOUND_KERNELS[name], constants, head_dim, dtype, written, {"num_warps": 4}
    )


def _compile(
    kernel: Any,
    constants: dict[str, Any],
    head_dim: int,
    multiplied: torch.dtype,
    written: torch.dtype,
    options: dict[str, int],
) -> Resources:
    kinds = {
        **dict.fromkeys(FLOAT32, "*fp32"),
        **dict.fromkeys(OPERANDS, f"*{NAMES[multiplied]}"),
        **dict.fromkeys(OUTPUTS, f"*{NAMES[written]}"),
        **dict.fromkeys(("peaks", "starts", "starts_q", "starts_k"), "*i32"),
        "scale": "fp32",
        "scale_log2e": "fp32",
        "cap_log2e": "fp32",
    }

    def is_aligned(argument: str) -> bool:
        if kinds.get(argument, "").startswith("*"):
            return True
        return head_dim % 16 == 0 and argument.endswith(("_split", "_batch", "_head", "_row"))

    names = kernel.arg_names
    made = compile_for_hopper(
        kernel,
        {name: kinds.get(name, "i32") for name in names if name not in constants},
        constants,
        divisible_by_16=[name for name in names if is_aligned(name)],
        **options,
    )
    with tempfile.TemporaryDirectory() as folder:
        used = resources(made, Path(folder))
    spilled = used["STACK"] + used["LOCAL"]
    warps = made.metadata.num_warps
    return Resources(used["REG"], spilled, made.metadata.shared, warps, made.asm["ptx"], made)


# Constexpr arguments of the Triton kernels with features beyond a causal mask
FEATURES: dict[str, dict[str, bool | int]] = {
    "grouped, packed": {"Q_PER_KV": 4, "PACKED": True},
    "window": {"HAS_LEFT": True, "HAS_RIGHT": True, "IS_CAUSAL": False, "LOWER_RIGHT": True},
    "softcap": {"SOFTCAP": True},
}
LONG = 1 << 14  # number of queries for which tiles are chosen
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
MORE_SPILLS: dict[tuple[int, ...], int] = {(3, 6): 0, (3, 7): 24, (3, 8): 24}


def feature_table() -> tuple[list[list[object]], int]:
    """Compile and check the Triton kernels with features, for bfloat16 and a causal mask.

    Returns:
        The rows of the printed table, one per kernel, and the number of kernels that failed the
        check.
    """
    rows: list[list[object]] = []
    for (label, constants), head_dim in product(FEATURES.items(), (64, 128)):
        tiles = configuration(head_dim, torch.bfloat16, softcap=label == "softcap")
        for name, tile in passes(tiles).items():
            found = compile_pass(name, head_dim, torch.bfloat16, True, tile, features=constants)
            wrong = "" if found.shared <= SHARED_LIMIT else "TOO MUCH SHARED MEMORY"
            if spills_too_much(found.spilled, FEATURE_SPILLS):
                wrong = "SPILLS"
            rows.append([label, head_dim, name, *found[:2], found.shared / 1024, wrong])
    return rows, sum(bool(row[-1]) for row in rows)


HOPPER_FORMS = ("full", "causal", "split", "window", "packed", "softcap")


def uses_d192_kernel(head_dim: int, value_dim: int, form: str, q_per_kv: int) -> bool:
    """Return whether `compile_hopper` compiles `d192_backward_kernel`."""
    constants = {"PACKED": form == "packed", "SOFTCAP": form == "softcap"}
    # `HopperBackwardPlan` uses it only if the queries are not split.
    splits_queries = form == "split" and q_per_kv == 1
    return not splits_queries and d192_supports(torch.bfloat16, head_dim, value_dim, constants)


def heads_of_item(form: str, q_per_kv: int) -> int:
    """Return how many heads of q a work item of a compiled backward kernel processes."""
    return max(1, q_per_kv // 2) if form == "split" else q_per_kv


def compile_hopper(
    name: str,
    head_dim: int,
    form: str,
    tile: HopperTile | None = None,
    q_per_kv: int = 1,
    deterministic: bool = False,
    value_dim: int | None = None,
) -> Resources:
    """Compile a warp-specialized Gluon attention kernel for sm_90 and bfloat16 inputs.

    Args:
        name: "forward" or "backward".
        head_dim: head dimension, 64, 128, 192 or 256.
        form: variant of the kernel: "full" (no mask), "causal", "split" (a causal kernel that
            writes partial results, which are combined later, or in backward adds gradients to
            sums), "window" (two bounds and lower-right alignment), or causal kernels with "packed"
            sequences or a "softcap".
        tile: block sizes and launch options of the forward kernel. None means the default for
            `head_dim`.
        q_per_kv: number of heads of q per head of k and v. A work item of backward has all of them,
            or half of them if the form is "split".
        deterministic: whether the backward kernel adds to dQ in a fixed order.
        value_dim: head dimension of v: that of q by default, or 128 if that of q is above 128.
    """
    from triton.experimental.gluon import language as gl

    from systems.kernels.flash_attention.hopper.backward.d64 import backward_kernel
    from systems.kernels.flash_attention.hopper.backward.d128 import d128_backward_kernel
    from systems.kernels.flash_attention.hopper.backward.d192 import d192_backward_kernel
    from systems.kernels.flash_attention.hopper.backward.d256 import d256_backward_kernel
    from systems.kernels.flash_attention.hopper.forward.kernel import hopper_forward_kernel

    def descriptor(kind: str, block: list[int], dtype: Any) -> str:
        layout = gl.NVMMASharedLayout.get_default_for(block, dtype)
        return f"tensordesc<{kind}{block},{layout!r}>"

    def rows(n: int, columns: int) -> str:
        return descriptor("bf16", [1, 1, n, columns], gl.bfloat16)

    value_dim = value_dim or head_dim
    columns, value_columns = kernel_head_dim(head_dim), kernel_head_dim(value_dim)
    is_causal = form not in ("full", "window")
    options = {"num_warps": 4}
    features = {
        "BOUNDED": form in ("packed", "window"), "LOWER_RIGHT": form == "window",
        "PACKED": form == "packed", "SOFTCAP": form == "softcap",
    }  # fmt: skip
    if name == "forward":
        kernel = hopper_forward_kernel
        tile = tile or forward_tile(head_dim, LONG, is_causal, form == "packed", value_dim)
        options = tile.launch_options
        copied, copied_values = copied_columns(head_dim, tile), copied_columns(value_dim, tile)
        kinds = {
            "q_desc": rows(64, copied), "out_desc": rows(64, copied_values),
            "k_desc": rows(tile.block_k, copied), "v_desc": rows(tile.block_k, copied_values),
            "out": "*bf16", "partials": "*fp32", "lse": "*fp32", "counters": "*i32",
        }  # fmt: skip
        constants = {
            "CONSUMERS": tile.consumers, "BLOCK_K": tile.block_k, "COLUMNS": head_dim,
            "VALUE_COLUMNS": value_dim, "MASKED": form != "full", "IS_CAUSAL": is_causal,
            **features, "STAGES": tile.stages, "SHARED_RING": tile.shares_ring,
            "SPLIT": form == "split", "Q_PER_KV": q_per_kv,
            "REGISTERS": tile.registers, "PRODUCER_REGISTERS": tile.producer_registers,
        }  # fmt: skip
    else:
        uses_d192 = uses_d192_kernel(head_dim, value_dim, form, q_per_kv)
        stored, n_keys = min(columns, MAX_STORED_COLUMNS), 64
        if uses_d192:
            columns = value_columns = stored = COPIED_COLUMNS
            n_keys = D192_COPIED_KEYS
        kernel = backward_kernel if head_dim == 64 else d128_backward_kernel
        row_of_floats = descriptor("fp32", [64], gl.float32)
        kinds = {
            "q_desc": rows(64, columns), "do_desc": rows(64, value_columns),
            "k_desc": rows(n_keys, columns), "v_desc": rows(n_keys, value_columns),
            **dict.fromkeys(("lse_desc", "minus_delta_desc"), row_of_floats),
            "dq_desc": f"tensordesc<fp32[64, 64],{gl.NVMMASharedLayout(0, 32, 2)!r}>",
            **dict.fromkeys(("dk_desc", "dv_desc"), rows(n_keys, stored)),
            **dict.fromkeys(("counter", "turns"), "*i32"), "sums": "*fp32",
            "dkey": "*bf16", "dvalue": "*bf16", "scale": "fp32",
        }  # fmt: skip
        constants = {
            "IS_CAUSAL": is_causal, **features, "SUMMED": form == "split", "Q_PER_KV": q_per_kv,
            "Q_PER_ITEM": heads_of_item(form, q_per_kv), "DETERMINISTIC": deterministic,
        }  # fmt: skip
        if columns == 128:
            constants["COLUMNS"] = used_columns(head_dim)
        if uses_d192:
            kernel = d192_backward_kernel
        elif head_dim > 128:
            kernel = d256_backward_kernel
            constants["HIGH"] = high_columns(head_dim)
            constants["VALUE_HIGH"] = high_columns(value_dim)
        kinds = {name: kind for name, kind in kinds.items() if name in kernel.arg_names}
    kinds |= dict.fromkeys(("starts_q", "starts_k", "blocks"), "*i32")
    kinds |= dict.fromkeys(("scale_log2e", "cap_log2e"), "fp32")
    signature = {**dict.fromkeys(kernel.arg_names, "i32"), **kinds}
    made = compile_gluon_for_hopper(kernel, signature, constants, **options)
    with tempfile.TemporaryDirectory() as folder:
        used = resources(made, Path(folder))
    spilled = used["STACK"] + used["LOCAL"]
    return Resources(used["REG"], spilled, made.metadata.shared, 4, made.asm["ptx"], made)


def spills_too_much(spilled: int, limit: int) -> bool:
    """Return whether a kernel spills more bytes per thread than allowed with this Triton."""
    return spilled > limit + MORE_SPILLS.get(release(), math.inf)


def spill_limit(
    name: str,
    head_dim: int,
    form: str,
    q_per_kv: int = 1,
    value_dim: int | None = None,
    tile: HopperTile | None = None,
) -> int:
    """Return how many bytes per thread a kernel of `compile_hopper` may spill."""
    if tile == SHORT:
        return SHORT_SPILLS
    if name == "backward" and uses_d192_kernel(head_dim, value_dim or head_dim, form, q_per_kv):
        return D192_SPILLS[form][heads_of_item(form, q_per_kv) > 1]
    return 0 if q_per_kv == 1 and form in ("full", "causal", "split") else FEATURE_SPILLS


def hopper_table() -> tuple[list[list[object]], int]:
    """Compile and check the warp-specialized Gluon kernels.

    Returns:
        The rows of the printed table, one per kernel, and the number of kernels that failed the
        check.
    """
    rows: list[list[object]] = []
    bad = 0
    cases: list[tuple[str, int, str, HopperTile | None, int]] = [
        (name, head_dim, form, None, 1)
        for name, head_dim, form in product(
            ("forward", "backward"), (64, 128, 192, 256), HOPPER_FORMS
        )
    ]
    cases += [("forward", 64, form, SHORT, 1) for form in ("causal", "split", "packed", "softcap")]
    cases += [("backward", 192, "split", None, q_per_kv) for q_per_kv in (2, 4)]
    for name, head_dim, form, tile, q_per_kv in cases:
        found = compile_hopper(name, head_dim, form, tile, q_per_kv)
        wrong = ""
        resident = tile.resident if tile else 1
        if resident * (found.shared + 1024) > SHARED_LIMIT + 1024:
            wrong = "TOO MUCH SHARED MEMORY"
        elif spills_too_much(found.spilled, spill_limit(name, head_dim, form, q_per_kv, tile=tile)):
            wrong = "SPILLS"
        bad += bool(wrong)
        label = f"{name} (short)" if tile else name
        if q_per_kv > 1:
            label += f" ({q_per_kv} heads)"
        rows.append([label, head_dim, form, *found[:2], found.shared / 1024, wrong])
    return rows, bad


def main() -> int:
    rows: list[list[object]] = []
    bad = 0
    for (label, (dtype, precision)), head_dim in product(KINDS.items(), HEAD_DIMS):
        tiles = configuration(head_dim, dtype, precision)
        for (name, tile), is_causal in product(passes(tiles).items(), (True, False)):
            found = compile_pass(name, head_dim, dtype, is_causal, tile, precision)
            wrong = "" if found.shared <= SHARED_LIMIT else "TOO MUCH SHARED MEMORY"
            if spills_too_much(found.spilled, 0):
                wrong = "SPILLS"
            elif found.resident < tile.resident or (is_causal and found.resident != tile.resident):
                wrong = f"OCCUPANCY MUST BE {tile.resident}, GOT {found.resident}"
            bad += bool(wrong)
            mask = "causal" if is_causal else "full"
            row = [label, head_dim, name, mask, *tile, *found[:2], found.shared / 1024, wrong]
            rows.append(row)
        for name in MEMORY_BOUND_KERNELS:
            found = compile_memory_bound(name, head_dim, dtype)
            wrong = "SPILLS" if spills_too_much(found.spilled, 0) else ""
            bad += bool(wrong)
            row = [label, head_dim, name, *[""] * 7, *found[:2], found.shared / 1024, wrong]
            rows.append(row)
    headers = [
        "dtype", "head_dim", "pass", "mask", "block_q", "block_k", "warps", "stages", "resident",
        "max registers", "registers", "spilled bytes", "shared KiB", "",
    ]  # fmt: skip
    print(tabulate(rows, headers))
    feature_rows, feature_bad = feature_table()
    headers = ["feature", "head_dim", "pass", "registers", "spilled bytes", "shared KiB", ""]
    print(f"\n{tabulate(feature_rows, headers)}")
    hopper_rows, hopper_bad = hopper_table()
    headers = ["hopper", "head_dim", "form", "registers", "spilled bytes", "shared KiB", ""]
    print("\nregisters: number per thread at the launch, before warpgroups reallocate registers\n")
    print(tabulate(hopper_rows, headers))
    return 1 if bad or feature_bad or hopper_bad else 0


if __name__ == "__main__":
    sys.exit(main())
