"""bfloat16 in Triton 3.6's interpreter as a GPU has it.

The interpreter keeps bfloat16 as uint16, multiplies those as integers in tl.dot, and cuts float32
off where a GPU rounds to nearest. `exact_bfloat16` mends both for the length of a test.
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


def exact_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """To be called where TRITON_INTERPRET=1."""
    import triton.language as tl
    from triton.runtime import interpreter

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

    monkeypatch.setattr(builder, "cast_impl", cast_impl)
    monkeypatch.setattr(builder, "create_dot", create_dot)
