"""Names of values of records, such as `commit`, in the tables of a sweep before its submission."""

from __future__ import annotations

from pathlib import Path

from jobs.sweep.expand import expand
from tests.jobs.results_folder import TOY, load

TABLE = TOY + "fixed: {size: 1}\ntables:\n  - {name: t, rows: [device, commit], columns: [gpu]"


def test_a_condition_on_records_is_not_evaluated_before_the_submission(tmp_path: Path) -> None:
    """No run has a record yet. `window > 5` cannot be evaluated here, because window is null."""
    where = "commit in ['4bb999b', 'fffffff-dirty'] and run.torch != '2.11.0' and window > 5"
    assert len(expand(load(tmp_path, TABLE + f', where: "{where}"}}\n')).runs) == 1
    text = TABLE + ", baseline: {gpu: 6fb37310}}\nplots: [{name: p, x: commit, series: [host]}]\n"
    assert len(expand(load(tmp_path, text)).runs) == 1


def test_a_word_may_have_the_name_of_a_value_of_records(tmp_path: Path) -> None:
    text = TOY + "grid: {size: [1], label: [gpu, torch]}\n"
    loaded = load(
        tmp_path, text + 'tables: [{name: t, where: "label in [gpu, torch] and label != host"}]\n'
    )
    assert len(expand(loaded).runs) == 2


def test_published_figures_by_device_are_not_looked_up_before_the_submission(
    tmp_path: Path,
) -> None:
    source = "{file: flash.csv, value: forward_ms, on: {device: gpu}}"
    assert len(expand(load(tmp_path, f"{TABLE}, published: [{source}]}}\n")).runs) == 1
