"""Classify kernels by their names, and shorten the names for tables."""

from __future__ import annotations

import re
from functools import cache
from typing import Literal

NAME_LENGTH = 120  # maximum length of a shortened name

KernelClass = Literal[
    "matmul", "softmax", "attention", "elementwise", "reduction", "copy", "optimizer", "other"
]

# The first matching pattern decides, so the order matters. The name of a fused attention kernel may
# contain "gemm", a softmax kernel "reduce", and a copy kernel "elementwise". The name of a kernel
# from Inductor contains all operators that were fused into this kernel.
_CLASSES: tuple[tuple[KernelClass, str], ...] = (
    ("matmul", r"^triton_(tem|mm)_"),
    ("elementwise", r"^triton_(poi|for)_"),
    ("softmax", r"^triton_(red|per)_.*softmax"),
    ("reduction", r"^triton_(red|per)_"),
    # CatArrayBatchedCopy is torch.cat and torch.stack.
    ("copy", r"^mem(cpy|set)|copy_kernel|CatArray|"
             r"^aten::(copy_|_to_copy|to|clone|cat|stack|contiguous)$"),
    ("optimizer", r"multi_tensor_apply|adam|^aten::_foreach"),
    ("attention", r"flash|fmha|sdpa|attention"),
    ("softmax", r"softmax"),
    # nvjet and xmma are kernels of cuBLAS. splitKreduce adds the partial sums of one matmul.
    ("matmul", r"gemm|gemv|cutlass|xmma|nvjet|cublas|splitk|"
               r"^aten::(mm|bmm|addmm|baddbmm|matmul|linear|mv|dot)$"),
    ("reduction", r"reduce|^aten::(sum|mean|amax|max|argmax|norm)$"),
    ("elementwise", r"elementwise|vectorized|unrolled|triu|tril|"
                    r"^aten::(add|sub|mul|div|neg|pow|square|rsqrt|sqrt|exp|silu|sigmoid|fill|"
                    r"zero|masked_fill|where|silu_backward)_?$"),
)  # fmt: skip

_NAMESPACES = (
    "at::native::", "binary_internal::", "(anonymous namespace)::", "<unnamed>::", "std::", "c10::",
)  # fmt: skip


@cache
def kernel_class(name: str) -> KernelClass:
    """Return the class of a GPU kernel, or of a torch operator on a CPU, from its name."""
    return next((kind for kind, pattern in _CLASSES if re.search(pattern, name, re.I)), "other")


def short_kernel_name(name: str) -> str:
    """Return the name of a kernel without return type, arguments and common namespaces.

    If it is longer than NAME_LENGTH, its middle is left out. The end has the operation of an
    elementwise kernel.
    """
    name = _without_arguments(name.removeprefix("void "))
    for namespace in _NAMESPACES:
        name = name.replace(namespace, "")
    name = " ".join(name.replace(" >", ">").split())
    if len(name) <= NAME_LENGTH:
        return name
    half = (NAME_LENGTH - 3) // 2
    return f"{name[: NAME_LENGTH - 3 - half]}...{name[-half:]}"


def _without_arguments(name: str) -> str:
    """Return a name without the argument list in parentheses at its end."""
    if not name.endswith(")"):
        return name
    depth = 0
    for i in range(len(name) - 1, 0, -1):
        depth += (name[i] == ")") - (name[i] == "(")
        if not depth:
            return name[:i].rstrip()
    return name
