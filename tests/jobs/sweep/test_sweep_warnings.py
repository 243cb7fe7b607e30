"""Warnings about parts of a sweep file that have no effect."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs.sweep.expand import expand
from tests.jobs.harness import call
from tests.jobs.results_folder import TOY, load, params_of, write


def warnings(folder: Path, text: str, *overrides: str) -> list[str]:
    found = expand(load(folder, TOY + text, *overrides)).warnings
    return [str(warning).replace(f"{folder}/", "") for warning in found]


def test_an_exclude_that_leaves_nothing_out_is_told(tmp_path: Path) -> None:
    text = """\
grid: {size: [1, 2, 3]}
exclude:
  - size > 2
  - {size: 3, mode: fast}
  - size > 3
  - {mode: exact}
"""
    # Two entries that match the same run both have an effect.
    assert warnings(tmp_path, text) == [
        "sweep.yaml:7:5: exclude: no run matches this entry, so it has no effect",
        "sweep.yaml:8:5: exclude: no run matches this entry, so it has no effect",
    ]
    # There is no warning if an override replaces a parameter of the entry.
    assert warnings(tmp_path, text, "size=1") == [
        "sweep.yaml:8:5: exclude: no run matches this entry, so it has no effect"
    ]


def test_a_run_that_is_left_out_need_not_have_an_order(tmp_path: Path) -> None:
    text = "fixed: {size: 9}\ngrid: {window: [null, 4, 8]}\nexclude: [{window: null}, window > 5]\n"
    assert params_of(load(tmp_path, TOY + text), "window") == [(4,)]
    assert warnings(tmp_path, text) == []


@pytest.mark.parametrize("option", ["--dry-run", "--local"])
def test_a_warning_is_said_and_stops_nothing(tmp_path: Path, option: str) -> None:
    path = write(tmp_path, TOY + "fixed: {size: 1}\nexclude: [size > 1]\n")
    done = call("jobs.submit", path, option, "--out", tmp_path / "out")
    said = f"warning: {path}:4:11: exclude: no run matches this entry, so it has no effect\n"
    assert done.returncode == 0 and said in done.stdout
