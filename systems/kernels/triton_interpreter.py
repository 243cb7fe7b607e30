"""Patches for Triton's interpreter, which make it round as a GPU does and run faster.

The interpreter has these faults, which `mend_interpreter` corrects:
- It stores bfloat16 as uint16, and tl.dot multiplies these numbers as integers.
- It truncates float32 to bfloat16, where a GPU rounds to nearest.
- In releases before 3.8, it converts arrays of one element to integers, for example in
  `range(0, tensor)`, which NumPy 2.4 rejects.
- It patches `triton.language` again for every function that a kernel calls, which takes a third of
  the run time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch


def _widened(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _rounded(values: np.ndarray) -> np.ndarray:
    narrow = torch.from_numpy(np.ascontiguousarray(values)).to(torch.bfloat16)
    return narrow.view(torch.int16).numpy().view(np.uint16).reshape(values.shape)


def mend_interpreter(
    checks_overflow: bool = False, replace: Callable[[Any, str, Any], None] = setattr
) -> None:
    """Patch the interpreter of this process, if it is not patched. Needs TRITON_INTERPRET=1.

    With `checks_overflow`, Triton's default, each integer operation asserts that it did not
    overflow, which doubles the run time. `replace` replaces an attribute of an object.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    if interpreter.InterpretedFunction.__call__.__module__ == __name__:
        return
    patch_as_it_is = interpreter._patch_lang_tensor

    def patch_lang_tensor(tensor: Any, scope: Any) -> None:
        patch_as_it_is(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    cast_as_it_is = builder.cast_impl

    def cast_impl(self: Any, source: Any, target: Any) -> Any:
        kinds = source.dtype.scalar, target.scalar
        if kinds == (tl.bfloat16, tl.float32):
            return handle(_widened(source.data), tl.float32)
        if kinds == (tl.float32, tl.bfloat16):
            return handle(_rounded(source.data), tl.bfloat16)
        return cast_as_it_is(self, source, target)

    def create_dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        left, right = (
            _widened(x.data) if x.dtype.scalar == tl.bfloat16 else x.data.astype(np.float32)
            for x in (a, b)
        )
        return handle(left @ right + d.data, d.dtype.scalar)

    call_as_it_is = interpreter.InterpretedFunction.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Functions of Triton itself import only a part of `triton.language`.
        if self.fn.__module__.startswith("triton."):
            return call_as_it_is(self, *args, **kwargs)
        return self.rewrite()(*args, **kwargs)

    options = interpreter.interpreter_builder.options  # frozen
    vars(options)["sanitize_overflow"] = checks_overflow
    replace(interpreter.InterpretedFunction, "__call__", call)
    replace(interpreter, "_patch_lang_tensor", patch_lang_tensor)
    replace(builder, "cast_impl", cast_impl)
    replace(builder, "create_dot", create_dot)
