"""Tests of Triton kernels on a CPU, in Triton's interpreter.

Triton decides at import whether it interprets. So tests that need it to are marked `interpreted`
and have that word in their names, those that need it not to are marked `compiled`, and one test of
each file runs the former in a process of their own (`assert_interpreted_tests_pass`).

Triton 3.6's interpreter keeps bfloat16 as uint16, multiplies those as integers in tl.dot, and cuts
float32 off where a GPU rounds to nearest; and it makes an integer of an array of one element, which
NumPy 2.5 refuses. And it prepares `triton.language` anew for every function that a kernel calls,
which takes a third of the time. `mend_interpreter` mends all of it for the length of a test.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="runs in a process with TRITON_INTERPRET=1"
)
compiled = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter has no compiler"
)


def assert_interpreted_tests_pass(file: str) -> None:
    """Every test of the file with `interpreted` in its name runs and passes, none is skipped."""
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", file]
    done = subprocess.run(
        [*command, "-k", "interpreted"],
        # One thread: others that wait for work would take the processor from what runs beside
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
    )
    last = done.stdout.splitlines()[-1]
    assert done.returncode == 0 and "passed" in last and "skipped" not in last, done.stdout


def assert_import_leaves_triton_alone(module: str) -> None:
    """In a fresh process, importing the module after torch imports nothing of Triton."""
    code = (
        f"import torch, sys; before = set(sys.modules); import {module}; "
        "print([m for m in set(sys.modules) - before if m.startswith('triton')])"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "[]", told.stdout


def _widened(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _rounded(values: np.ndarray) -> np.ndarray:
    narrow = torch.from_numpy(np.ascontiguousarray(values)).to(torch.bfloat16)
    return narrow.view(torch.int16).numpy().view(np.uint16).reshape(values.shape)


def mend_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """To be called where TRITON_INTERPRET=1."""
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

    monkeypatch.setattr(interpreter.InterpretedFunction, "__call__", call)
    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch_lang_tensor)
    monkeypatch.setattr(builder, "cast_impl", cast_impl)
    monkeypatch.setattr(builder, "create_dot", create_dot)
