"""Published figures of other authors in tables, read from the project's CSV files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jobs.frame.results import list_results
from jobs.published.figures import FOLDER
from jobs.report.tables.report_table import make_report_table
from jobs.report.tables.table import ReportTable
from jobs.results.run_states import observe
from jobs.sweep.expand import expand
from tests.benchmarks import toy
from tests.jobs.results_folder import TOY, ResultsFolder, errors, load, ok, write

H800 = "report-b, NVIDIA H800 PCIe"


@pytest.fixture(autouse=True)
def model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the toy benchmark the parameters of the figures in transformer.csv."""

    class Params(toy.Params):
        model: str = "small"
        context_length: int = 128
        precision: str = "fp32"

    monkeypatch.setattr(toy, "Params", Params)


def made(folder: ResultsFolder, text: str, **measurements: Any) -> ReportTable:
    """Return the first table of a sweep, after all its runs succeeded."""
    folder.submit(TOY + text, ok(1.0, **measurements))
    seen = observe(folder.path)
    table = make_report_table(seen, seen.manifests[-1].sweep.tables[0], list_results(seen))
    assert table is not None
    return table


def beside(rows: str, source: str) -> str:
    """Return the YAML of a table with these rows and one `published` entry."""
    return f"tables:\n- name: t\n  rows: [{rows}]\n  published:\n    - {{{source}}}\n"


TRANSFORMER = """\
grid:
  size: [1]
  model: [small, 2.7b, tiny]
  context_length: [128, 512]
tables:
  - name: forward
    rows: [model, context_length]
    published:
      - file: transformer.csv
        value: forward_ms
        on: {model: model, context_length: context_length}
        where: {precision: fp32, mode: eager}
        label: forward
"""


def test_a_figure_stands_beside_the_row_that_it_is_of(folder: ResultsFolder) -> None:
    table = made(folder, TRANSFORMER)
    assert list(table.columns) == ["model", "context_length", "time", f"forward ({H800})"]
    assert table.columns[f"forward ({H800})"] == [
        "21.57", "27.24", "119.78", "490.07", "", "",
    ]  # fmt: skip
    assert "jobs/published/README.md" in table.notes[-1]


def test_every_source_and_gpu_has_its_own_column(folder: ResultsFolder) -> None:
    """Sources are columns. One writes 2.7b, the other 2.7B, and both match."""
    text = "fixed: {size: 1}\ngrid: {model: [xl, 2.7b]}\n"
    source = (
        "file: transformer.csv, value: forward_ms, on: {model: model}, "
        "where: {warmup_steps: 2, gpu: [unstated, nvidia geforce rtx 5090]}"
    )
    table = made(folder, text + beside("model", source))
    assert {k: v for k, v in table.columns.items() if k not in ("model", "time")} == {
        "forward_ms (report-a, GPU unstated)": ["226.728", "334.898"],
        "forward_ms (report-b, NVIDIA GeForce RTX 5090)": ["65.76", "81.58"],
    }


def test_a_figure_of_one_precision_is_not_shown_in_the_row_of_another(
    folder: ResultsFolder,
) -> None:
    text = TRANSFORMER.replace("[model, context_length]", "[model, precision, context_length]")
    text = text.replace("[128, 512]", "[512]\n  precision: [fp32, bf16]").replace(", tiny", "")
    table = made(folder, text)
    assert table.columns["precision"] == ["fp32", "bf16"] * 2
    assert table.columns[f"forward ({H800})"] == ["27.24", "", "490.07", ""]


def test_dtypes_are_the_same_by_either_name(folder: ResultsFolder) -> None:
    text = "grid: {size: [128], precision: [bf16, fp32]}\n"
    source = (
        "file: flash.csv, value: forward_ms, on: {size: seq_len, precision: dtype}, "
        "where: {implementation: naive, head_dim: 16.0}, label: naive"
    )
    table = made(folder, text + beside("size, precision", source))
    assert table.columns["naive (report-c, GPU unstated)"] == ["0.034", "0.042"]


def test_where_no_figure_fits_the_note_says_so(folder: ResultsFolder) -> None:
    table = made(folder, TRANSFORMER.replace("[128, 512]", "[64]"))
    assert list(table.columns) == ["model", "context_length", "time"]
    assert "transformer.csv: no published figures for these rows" in table.notes


def test_in_a_tables_of_a_list_a_run_has_its_figure_once(folder: ResultsFolder) -> None:
    text = "fixed: {size: 1}\ngrid: {model: [large, 2.7b]}\n"
    source = "file: top_kernel.csv, value: share_percent, on: {model: model}"
    text += beside("model", source) + "  list: kernels\n"
    table = made(folder, text, facts={"kernels": [{"name": "a"}, {"name": "b"}]})
    header = "share_percent (report-b, GPU unstated)"
    assert table.columns[header] == ["52.6", "", "90.2", ""]


def test_several_figures_for_one_row_are_told_before_anything_runs(tmp_path: Path) -> None:
    (problem,) = errors(write(tmp_path, TOY + TRANSFORMER.replace(", mode: eager}", "}")))
    assert problem.startswith("sweep.yaml:11:9: transformer.csv has 2 rows of report-b")
    assert "which differ in mode (eager, compiled)" in problem


def test_only_the_runs_that_a_table_shows_must_have_one_figure(tmp_path: Path) -> None:
    """An ambiguous figure is an error only if the table shows a run that it fits.

    Without context_length, several figures fit each model except tiny, which has none.
    """
    text = TRANSFORMER.replace("[model, context_length]", "[model]")
    text = text.replace("on: {model: model, context_length: context_length}", "on: {model: model}")
    assert len(errors(write(tmp_path, TOY + text))) == 1
    shown = text.replace("rows: [model]", "rows: [model]\n    where: model == tiny")
    for where in ("model == tiny", "size == 9"):
        assert expand(load(tmp_path, TOY + shown.replace("model == tiny", where))).runs
    (problem,) = errors(write(tmp_path, TOY + shown), filter="model == xl")
    assert "the sweep has no runs" in problem


def test_every_file_is_told_of() -> None:
    readme = (FOLDER / "README.md").read_text()
    for path in FOLDER.glob("*.csv"):
        assert path.name in readme
