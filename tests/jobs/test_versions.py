"""Tests of the tested versions of torch and Triton."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from jobs import versions
from jobs.versions import TESTED, untested
from jobs.worker.run_process import _loaded_versions


def test_other_releases_are_untested() -> None:
    assert untested({"torch": "2.14.1+cu130", "triton": "3.8.0", "numpy": "9"}) == []
    found = untested({"torch": "2.1.0", "triton": "3.10.0+git1"})
    assert found == ["torch 2.1.0", "triton 3.10.0+git1"]
    assert untested({"torch": "2.11.0", "triton": None}) == []


def test_a_record_names_untested_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(versions, "TESTED", {})
    assert f"torch {torch.__version__}" in _loaded_versions()["untested"]


def test_make_installs_the_newest_tested_torch() -> None:
    text = (Path(__file__).parents[2] / "Makefile").read_text()
    found = re.search(r"^TORCH \?= torch<2\.(\d+)$", text, re.MULTILINE)
    assert found and list(TESTED)[-1] == f"2.{int(found[1]) - 1}"
