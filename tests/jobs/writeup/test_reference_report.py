"""The report in docs/report is what the records in logs/h100 and logs/h200 give."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from jobs.writeup.build import build_report
from tests.jobs.harness import ROOT

TRACKED = ROOT / "docs" / "report"
RENEW = "docs/report differs from what the records give: run make report"


@pytest.mark.slow
def test_the_report_of_the_reference_results_is_up_to_date(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One test, because each build takes tens of seconds."""
    monkeypatch.chdir(ROOT)
    begin = time.process_time()
    build_report([Path("logs/h100"), Path("logs/h200")], tmp_path)
    seconds = time.process_time() - begin

    made, tracked = ((folder / "report.md").read_text() for folder in (tmp_path, TRACKED))
    assert words(made) == words(tracked), RENEW
    images = [
        {path.relative_to(folder) for path in (folder / "plots").rglob("*.*")}
        for folder in (tmp_path, TRACKED)
    ]
    assert images[0] == images[1], RENEW
    links = re.findall(r"\]\((plots/[^)]*)\)", tracked)
    assert set(map(Path, links)) == images[1] and len(links) > 10

    assert seconds < 60  # about 18 s
    assert (tmp_path / "index.html").stat().st_size < 3e6


def words(text: str) -> list[str]:
    """Return the words of a text. Versions of tabulate differ in the width of columns."""
    return re.sub(r"[-:|]+", " ", text).split()
