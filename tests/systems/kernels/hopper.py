"""Compile Triton kernels for an H100 or H200 on a machine without a GPU."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def compile_for_hopper(
    kernel: Any,
    signature: Mapping[str, str],
    constexprs: Mapping[str, Any],
    *,
    divisible_by_16: Iterable[str] | None = None,
    **options: Any,
) -> Any:
    """Compile for sm_90.

    Args:
        signature: Triton's type of every argument that is not constant: "*bf16", "i32".
        constexprs: values of those that are; of arguments that a launch would specialise, too.
        divisible_by_16: arguments that a launch would find to be so; by default all pointers.
        options: of the launch: num_warps and the like.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    if divisible_by_16 is None:
        divisible_by_16 = [name for name, kind in signature.items() if kind.startswith("*")]
    kinds = {**signature, **dict.fromkeys(constexprs, "constexpr")}
    source = ASTSource(
        kernel,
        {name: kinds[name] for name in names},
        {(names.index(name),): value for name, value in constexprs.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in divisible_by_16},
    )
    target = GPUTarget("cuda", 90, 32)
    return triton.compile(source, target=target, options=options)


def compile_gluon_for_hopper(
    kernel: Any, signature: Mapping[str, str], constexprs: Mapping[str, Any], warps: int
) -> Any:
    """Compile a kernel in Gluon for sm_90. Descriptors are "tensordesc<type[block],layout>"."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    names = kernel.arg_names
    kinds = {**signature, **dict.fromkeys(constexprs, "constexpr")}
    source = GluonASTSource(
        kernel,
        {name: kinds[name] for name in names},
        {(names.index(name),): value for name, value in constexprs.items()},
        {
            (names.index(name),): [["tt.divisibility", 16]]
            for name, kind in signature.items()
            if kind.startswith("*")
        },
    )
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})


def resources(compiled: Any, folder: Path) -> dict[str, int]:
    """Registers of each thread (REG), and the bytes that did not fit in them (STACK, LOCAL)."""
    import triton

    path = folder / "kernel.cubin"
    path.write_bytes(compiled.asm["cubin"])
    command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(path)]
    usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
