"""The report in docs/report is what the records in logs/h100 and logs/h200 give."""

from __future__ import annotations

import html
import math
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from jobs.writeup.page import unpacked_data
from tests.jobs.harness import ROOT

pytestmark = pytest.mark.slow  # a build takes tens of seconds

TRACKED = ROOT / "docs" / "report"
RENEW = "docs/report differs from what the records give: run make report"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """A new report of the reference results, and how many seconds it took."""
    out = tmp_path_factory.mktemp("report")
    begin = time.monotonic()
    command = [
        sys.executable,
        "aggregate.py",
        "report",
        "logs/h100",
        "logs/h200",
        "--out",
        str(out),
    ]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return out, time.monotonic() - begin


def test_texts_tables_and_states_are_up_to_date(made: tuple[Path, float]) -> None:
    new, tracked = ((folder / "report.md").read_text() for folder in (made[0], TRACKED))
    assert words(new) == words(tracked), RENEW


def test_the_page_is_up_to_date(made: tuple[Path, float]) -> None:
    new, tracked = ((folder / "index.html").read_text() for folder in (made[0], TRACKED))
    assert shown_text(new) == shown_text(tracked), RENEW
    assert same(unpacked_data(new), unpacked_data(tracked)), RENEW


def test_every_plot_is_there(made: tuple[Path, float]) -> None:
    names = [
        {path.relative_to(folder) for path in (folder / "plots").rglob("*.png")}
        for folder in (made[0], TRACKED)
    ]
    assert names[0] == names[1] and len(names[0]) > 10, RENEW
    for link in re.findall(r"\]\((plots/[^)]*)\)", (TRACKED / "report.md").read_text()):
        assert (TRACKED / link.replace("%2C", ",")).is_file()


def test_it_is_small_and_fast(made: tuple[Path, float]) -> None:
    assert (TRACKED / "index.html").stat().st_size < 6e6
    assert sum(path.stat().st_size for path in TRACKED.rglob("*") if path.is_file()) < 40e6
    assert made[1] < 120  # 10 s on an idle machine


def words(text: str) -> list[str]:
    """Return the words of a text. Versions of tabulate differ in the width of columns."""
    return re.sub(r"[-:|]+", " ", text).split()


def shown_text(page: str) -> list[str]:
    without = re.sub(r"<(script|style)\b.*?</\1>", "", page, flags=re.S)
    return html.unescape(re.sub(r"<[^>]*>", " ", without)).split()


def same(a: Any, b: Any) -> bool:
    """Return whether two JSON values are equal, up to the last digits of numbers."""
    if isinstance(a, float) or isinstance(b, float):
        return isinstance(a, (int, float)) and math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-12)
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return (
            isinstance(b, list)
            and len(a) == len(b)
            and all(same(x, y) for x, y in zip(a, b, strict=True))
        )
    return bool(a == b)
