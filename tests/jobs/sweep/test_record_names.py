"""The value `device` of records in the tables of a sweep before its submission."""

from __future__ import annotations

from pathlib import Path

from jobs.sweep.expand import expand
from tests.jobs.results_folder import TOY, load

TABLE = TOY + "fixed: {size: 1}\ntables:\n  - {name: t, rows: [device]"


def test_what_needs_records_is_not_evaluated_before_the_submission(tmp_path: Path) -> None:
    """No run has a record yet. `window > 5` cannot be evaluated here, because window is null."""
    where = "run.device != 'NVIDIA H200' and window > 5"
    assert len(expand(load(tmp_path, TABLE + f', where: "{where}"}}\n')).runs) == 1
    source = "{file: flash.csv, value: forward_ms, on: {device: gpu}}"
    assert len(expand(load(tmp_path, f"{TABLE}, published: [{source}]}}\n")).runs) == 1
