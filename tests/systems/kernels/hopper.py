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
    """Compile a Triton kernel for sm_90.

    Args:
        signature: Triton type of every argument that is not constant, such as "*bf16" or "i32".
        constexprs: values of constexpr arguments, and of arguments that a launch would specialize.
        divisible_by_16: arguments that are divisible by 16 in a launch; by default all pointers.
        options: launch options such as num_warps.
    """
    from triton.compiler import ASTSource

    if divisible_by_16 is None:
        divisible_by_16 = _pointers(signature)
    return _compile(ASTSource, kernel, signature, constexprs, divisible_by_16, options)


def compile_gluon_for_hopper(
    kernel: Any, signature: Mapping[str, str], constexprs: Mapping[str, Any], **options: int
) -> Any:
    """Compile a Gluon kernel for sm_90; descriptors are "tensordesc<type[block],layout>"."""
    from triton.experimental.gluon._runtime import GluonASTSource

    return _compile(GluonASTSource, kernel, signature, constexprs, _pointers(signature), options)


def _pointers(signature: Mapping[str, str]) -> list[str]:
    return [name for name, kind in signature.items() if kind.startswith("*")]


def _compile(
    source: Any,
    kernel: Any,
    signature: Mapping[str, str],
    constexprs: Mapping[str, Any],
    divisible_by_16: Iterable[str],
    options: dict[str, Any],
) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget

    names = kernel.arg_names
    kinds = {**signature, **dict.fromkeys(constexprs, "constexpr")}
    of_kernel = source(
        kernel,
        {name: kinds[name] for name in names},
        {(names.index(name),): value for name, value in constexprs.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in divisible_by_16},
    )
    return triton.compile(of_kernel, target=GPUTarget("cuda", 90, 32), options=options)


def resources(compiled: Any, folder: Path) -> dict[str, int]:
    """Return the registers per thread (REG) and the spilled bytes per thread (STACK, LOCAL)."""
    usage = cuobjdump(compiled, folder, "--dump-resource-usage")
    return {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}


def cuobjdump(compiled: Any, folder: Path, option: str) -> str:
    """Return what cuobjdump prints of a kernel that Triton has compiled, with "-sass" its SASS."""
    import triton

    path = folder / "kernel.cubin"
    path.write_bytes(compiled.asm["cubin"])
    command = [triton.knobs.nvidia.cuobjdump.path, option, str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
