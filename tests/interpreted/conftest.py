"""Tests of Triton kernels on a CPU, in Triton's interpreter.

    TRITON_INTERPRET=1 pytest tests/interpreted

Triton decides at import whether it interprets, so these tests run in processes of their own.
Without the variable none of them is collected; with it, no others are (tests/conftest.py).
"""

from __future__ import annotations

import pytest

from tests.interpreted.interpreter import mend_interpreter


@pytest.fixture(autouse=True)
def interpreter_as_a_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    mend_interpreter(monkeypatch, checks_overflow="exhaustive" in request.keywords)
