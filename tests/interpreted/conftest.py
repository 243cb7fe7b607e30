"""Tests of Triton kernels on a CPU, in Triton's interpreter.

    TRITON_INTERPRET=1 pytest tests/interpreted

Triton decides at import whether it interprets, so these tests run in processes of their own.
Without the variable none of them runs; with it, no others do (tests/conftest.py). With
CHECK_OVERFLOW=1 each integer operation of a kernel is checked, which takes twice the time.
"""

from __future__ import annotations

import os

import pytest

from tests.interpreted.interpreter import mend_interpreter


@pytest.fixture(autouse=True)
def interpreter_as_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="needs Triton, which is packaged for Linux only")
    assert os.environ.get("TRITON_INTERPRET") == "1"  # else torch would stand in for the kernels
    mend_interpreter(monkeypatch, checks_overflow=os.environ.get("CHECK_OVERFLOW") == "1")
