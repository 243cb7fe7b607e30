"""Triton 3.6's interpreter, made to round as a GPU does, and faster.

It keeps bfloat16 as uint16, multiplies those as integers in tl.dot, and cuts float32 off where a
GPU rounds to nearest; it makes an integer of an array of one element, which NumPy 2.5 refuses; and
it prepares `triton.language` again for every function that a kernel calls, which takes a third of
the time. `mend_interpreter` mends this for the length of a test.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch


def _widened(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _rounded(values: np.ndarray) -> np.ndarray:
    narrow = torch.from_numpy(np.ascontiguousarray(values)).to(torch.bfloat16)
    return narrow.view(torch.int16).numpy().view(np.uint16).reshape(values.shape)


def mend_interpreter(monkeypatch: pytest.MonkeyPatch, checks_overflow: bool = False) -> None:
    """Patch the interpreter until the test ends. Needs TRITON_INTERPRET=1.

    Args:
        checks_overflow: assert after each integer operation that it did not overflow, as Triton has
            it by default. Takes as long as everything else together.
    """
    import triton.language as tl
    from triton.runtime import interpreter

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
        if self.fn.__module__.startswith("triton."):  # which imports a part of the language alone
            return call_as_it_is(self, *args, **kwargs)
        return self.rewrite()(*args, **kwargs)

    options = interpreter.interpreter_builder.options  # frozen
    monkeypatch.setitem(vars(options), "sanitize_overflow", checks_overflow)
    monkeypatch.setattr(interpreter.InterpretedFunction, "__call__", call)
    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch_lang_tensor)
    monkeypatch.setattr(builder, "cast_impl", cast_impl)
    monkeypatch.setattr(builder, "create_dot", create_dot)
