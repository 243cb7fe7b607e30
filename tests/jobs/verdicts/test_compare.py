"""`aggregate.py compare`: bad input and speed."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from jobs.errors import CommandError
from jobs.report.compare_text import markdown_comparison
from tests.jobs.compared_folders import Pair
from tests.jobs.harness import call
from tests.jobs.results_folder import CPU, ok


def test_other_kinds_of_device_are_not_compared(tmp_path: Path) -> None:
    pair = Pair(tmp_path, "grid: {size: [1]}\n")
    pair.fill(ok(1.0), ok(9.0), (CPU, "cpu: another"))
    with pytest.raises(
        CommandError, match=r"same kind of device: got cpu: Test.* and cpu: another"
    ):
        pair.compared()


def test_a_folder_without_records_is_an_error(tmp_path: Path) -> None:
    pair = Pair(tmp_path, "grid: {size: [1]}\n")
    pair.fill(ok(1.0), None)
    for order in ((pair.before, pair.after), (pair.after, pair.before)):
        done = call("aggregate", "compare", *(folder.path for folder in order))
        assert (done.returncode, "after has no records" in done.stderr) == (2, True), done.stdout
    alone = call("aggregate", "compare", pair.after.path)
    assert (alone.returncode, "has no records" in alone.stderr) == (2, True)


def measured(tmp_path: Path, count: int) -> Pair:
    """Return two folders with `count` runs, each with 100 samples in three phases."""
    tmp_path.mkdir()
    pair, draw = Pair(tmp_path, f"grid: {{size: {list(range(1, count + 1))}}}\n"), random.Random(0)

    def outcome(*_: object) -> dict[str, Any]:
        phases = ("forward", "backward", "forward_backward")
        samples = {phase: [draw.gauss(1, 0.05) for _ in range(100)] for phase in phases}
        return {"status": "ok", "measurements": {"samples_ms": samples}}

    pair.fill(outcome, outcome)
    return pair


def work(pair: Pair) -> int:
    """Compare two folders, and return how many calls that makes: a measure without noise."""
    count = 0

    def each_event(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(each_event)
    try:
        found = pair.compared()
        assert f"{len(found.cells)} unsure" in markdown_comparison(found, False)
    finally:
        sys.setprofile(before)
    return count


@pytest.mark.slow
def test_work_of_a_comparison_is_proportional_to_its_runs(tmp_path: Path) -> None:
    """Comparing makes 1,500 calls a run with three cells, and reading the two folders 460."""
    few, many = (work(measured(tmp_path / str(count), count)) for count in (100, 1000))
    assert many < 12 * few
