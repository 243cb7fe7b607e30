"""Sweep files: errors, all together, each with its position; what is no error."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs.sweep.expand import expand
from jobs.sweep.load import load_sweep
from tests.jobs.results_folder import TOY, errors, load, params_of, write

SWEEPS = Path(__file__).parents[3] / "sweeps"


def test_every_error_of_a_file_at_once_each_with_its_place(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """\
        name: many
        benchmark: tests.benchmarks.toy
        fixd: {size: 1}
        fixed:
          size: 1
          scale: 1e-4
        grid:
          mode: [fast, exakt]
          widnow: [1]
        zip:
          ranks: [1, 2]
          causal: [true]
        exclude:
          - mod == fast
        tables:
          - name: t
            title: Sizes {sizes}
        resources: {nodes: $rank}
        """,
    )
    problems = errors(path)
    expected = {
        "3:1": "unknown key 'fixd'; did you mean 'fixed'?",
        "6:10": "1.0e-4",
        "8:16": "mode: got 'exakt', expected 'fast' or 'exact'; did you mean 'exact'?",
        "9:3": "has no parameter 'widnow'; did you mean 'window'?",
        "10:1": "zip: all lists must have the same length, got 2 for 'ranks', 1 for 'causal'",
        "14:5": "'mod' is not a parameter; did you mean 'mode'?",
        "17:12": "title: no parameter 'sizes'; did you mean 'size'?",
        "18:20": "nodes: '$rank' does not name a parameter; did you mean 'ranks'?",
    }
    found = {line.removeprefix("sweep.yaml:").split(": ")[0]: line for line in problems}
    assert len(problems) == len(found) and found.keys() == expected.keys(), problems
    assert all(words in found[place] for place, words in expected.items()), found


@pytest.mark.parametrize("name", ["sweeps/flash.yaml", "sweeps/cpu/flash.yaml"])
def test_a_stock_sweep_is_found_from_any_folder_after_a_file_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    stock = Path(name)
    assert load_sweep(stock).document.source == str(SWEEPS.parent / name)
    stock.parent.mkdir(parents=True)
    stock.write_text(TOY + "fixed: {size: 1}\n")
    assert load_sweep(stock).document.source == name


def test_a_refused_combination_may_be_excluded(tmp_path: Path) -> None:
    text = TOY + "grid:\n  size: [1, 8]\n  window: [1, 2, 4]\nexclude: [size == 1 and window > 1]\n"
    loaded = load(tmp_path, text)
    assert params_of(loaded, "size", "window") == [(1, 1), (8, 1), (8, 2), (8, 4)]
    assert expand(loaded).excluded == 2
    rest = load(tmp_path, TOY + "grid:\n  size: [1, 8]\n  window: [2]\n", filter="size == 8")
    assert params_of(rest, "size") == [(8,)]


def test_what_needs_records_is_not_evaluated_before_the_submission(tmp_path: Path) -> None:
    """No run has a record yet. `window > 5` cannot be evaluated here, because window is null."""
    table = TOY + "fixed: {size: 1}\ntables:\n  - {name: t, rows: [device]"
    where = "run.device != 'NVIDIA H200' and window > 5"
    assert len(expand(load(tmp_path, table + f', where: "{where}"}}\n')).runs) == 1
    source = "{file: flash.csv, value: forward_ms, on: {device: gpu}}"
    assert len(expand(load(tmp_path, f"{table}, published: [{source}]}}\n")).runs) == 1


def test_a_run_that_is_left_out_need_not_have_an_order(tmp_path: Path) -> None:
    text = "fixed: {size: 9}\ngrid: {window: [null, 4, 8]}\nexclude: [{window: null}, window > 5]\n"
    assert params_of(load(tmp_path, TOY + text), "window") == [(4,)]
