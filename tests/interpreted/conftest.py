"""Tests of Triton kernels on a CPU, in Triton's interpreter.

    TRITON_INTERPRET=1 pytest tests/interpreted

Triton reads TRITON_INTERPRET when it is imported, so these tests need a separate process. Only
these tests run if the variable is set, and all others if it is not (see tests/conftest.py). With
CHECK_OVERFLOW=1 each integer operation of a kernel is checked for overflow, which doubles the run
time.
"""

from __future__ import annotations

import os

import pytest

from systems.kernels.triton_interpreter import mend_interpreter


@pytest.fixture(autouse=True)
def interpreter_as_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="needs Triton, which is packaged for Linux only")
    # Without the interpreter the tests would use references in torch instead of the kernels.
    assert os.environ.get("TRITON_INTERPRET") == "1"
    checks_overflow = os.environ.get("CHECK_OVERFLOW") == "1"
    mend_interpreter(checks_overflow, replace=monkeypatch.setattr)
