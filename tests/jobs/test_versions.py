"""Tests of the tested versions of torch and Triton, and of the refusal of a faulty one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from jobs import versions
from jobs.versions import TESTED, untested
from jobs.worker.run_process import _loaded_versions
from systems.triton_faults import fault_of


@pytest.mark.parametrize(
    ("torch", "triton", "found"),
    [
        ("2.14.1+cu130", "3.8.0", []),
        ("2.11.0.post1", "3.6.0+git1", []),
        ("2.1.0", None, ["torch 2.1.0"]),
        ("2.14.0", "3.10.0", ["triton 3.10.0"]),
        ("2.14.0a0+git1", "main", ["torch 2.14.0a0+git1", "triton main"]),
        ("2.13.0", "3.6.0", ["triton 3.6.0 with torch 2.13.0"]),
    ],
)
def test_other_releases_are_untested(torch: str, triton: str | None, found: list[str]) -> None:
    assert untested({"torch": torch, "triton": triton, "numpy": "9"}) == found


def test_a_record_names_untested_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(versions, "TESTED", {})
    assert f"torch {torch.__version__}" in _loaded_versions()["untested"]


def test_make_installs_the_newest_tested_torch() -> None:
    text = (Path(__file__).parents[2] / "Makefile").read_text()
    found = re.search(r"^TORCH \?= torch<2\.(\d+)$", text, re.MULTILINE)
    assert found and list(TESTED)[-1] == f"2.{int(found[1]) - 1}"


def test_a_faulty_triton_is_known_also_with_a_local_version() -> None:
    assert "install triton 3.7.1" in (fault_of("3.7.0+git5abc") or "")
    assert fault_of("3.7.1") is None
