from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def without_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep `jobs check`, called in this process, from selecting Triton's interpreter for it."""
    monkeypatch.setenv("TRITON_INTERPRET", "0")
