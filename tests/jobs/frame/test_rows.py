"""jobs.report.load: the numbers in a frame are those in the tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.formatting import format_number
from jobs.frame.flat import FIRST, LAST, MEASURED
from jobs.frame.metrics import METRICS, Metric
from jobs.frame.results import Result, list_results
from jobs.frame.rows import cells_of, rows_of
from jobs.frame.statistics import of_each, statistic
from jobs.report import load
from jobs.report.tables.pivot import Pivot, make_pivot
from jobs.report.views import select, tables_of
from jobs.results.run_states import observe
from jobs.sweep.views import FACT, STATISTICS, Table
from tests.jobs.frames import checked
from tests.jobs.harness import ROOT
from tests.jobs.results_folder import CPU, ok, record, run


def row_of(pivot: Pivot, frame: pd.DataFrame, keys: tuple[Any, ...], phase: str) -> pd.DataFrame:
    """Return the rows of a frame that are in one cell of a table."""
    matches = frame["status"] == "ok"  # the frame has many columns, so its rows are taken once
    names = [*pivot.row_names, *pivot.column_names]
    for name, value in zip(names, keys, strict=True):
        if name in ("value", "repeat") or value == "":
            continue
        own = name if name in ("phase", "device") or name not in FIRST | MEASURED | LAST else ""
        column = frame[own or f"param.{name}"]
        matches &= column.isna() if value is None else column.eq(value).fillna(False)
    if phase and "phase" not in names:
        matches &= frame["phase"] == phase
    return frame[matches]


def column_of(metric: Metric, statistic_name: str) -> tuple[str, float] | None:
    """Return the column with the numbers of a metric, and the factor to its unit in tables."""
    if metric.name == "time":
        column = f"{statistic_name.removesuffix('_std')}_ms"
        factor = {"ms": 1.0, "us": 1e3, "s": 1e-3}[metric.unit]
        return (column, factor) if column in MEASURED else None
    if statistic_name != "median" or metric.name.startswith("predicted."):
        return None
    if metric.name == "peak_memory":
        units = {"GiB": 2.0**-30, "MiB": 2.0**-20, "GB": 1e-9, "MB": 1e-6}
        return "peak_memory_bytes", units[metric.unit]
    if metric.name.startswith(FACT):
        units = {"bytes": {"GiB": 2.0**-30, "MiB": 2.0**-20, "GB": 1e-9, "MB": 1e-6},
                 "ms": {"s": 1e-3, "us": 1e3}, "s": {"ms": 1e3, "us": 1e6}}  # fmt: skip
        base = "bytes" if "_bytes" in metric.name else "ms" if "_ms" in metric.name else "s"
        return metric.name, units[base].get(metric.unit, 1.0)
    return metric.name, 1.0


def compare(pivot: Pivot, frame: pd.DataFrame) -> int:
    """Compare the numbers in a table with those in a frame. Return how many there are."""
    count, view = 0, pivot.shown.view
    shown = {record.run for cell in pivot.cells.values() for record in cell.records}
    frame = frame[frame["run"].isin(shown)]
    for (row, column), cell in pivot.cells.items():
        found = column_of(cell.metric, view.statistic)
        if cell.number is None or found is None:
            continue
        given = view.phase
        phase = given if isinstance(given, str) else ""
        rows = row_of(pivot, frame, (*row, *column), phase if cell.metric.has_phases else "")
        name, factor = found
        values = rows[name].dropna().unique()
        assert len(values) == 1, (view.name, row, column, rows)
        assert float(values[0]) * factor == pytest.approx(cell.number, rel=1e-14)
        assert cell.text().startswith(format_number(values[0] * factor))
        is_median_time = cell.metric.name == "time" and view.statistic == "median"
        if is_median_time and cell.interval is not None:
            ends = (rows["low_ms"].item() * factor, rows["high_ms"].item() * factor)
            assert ends == pytest.approx(cell.interval, rel=1e-12)
        count += 1
    return count


# Several ranks, blocks, repeats, and facts in bytes
SMALL = [ROOT / "logs" / "h200" / name for name in ("all_reduce", "flash_leaderboard", "memory")]


@pytest.mark.slow
@pytest.mark.parametrize("study", SMALL, ids=lambda path: path.name)
def test_every_number_of_the_reference_tables_is_in_the_frame(study: Path) -> None:
    observation, frame = observe(study), checked(study)
    results = list_results(observation)
    assert set(frame["run"]) == {result.run.id for result in results}
    total = 0
    for benchmark in frame["benchmark"].unique():
        for name in ("median", "mean", "std", "min", "max"):
            view = Table(name="t", benchmark=benchmark, statistic=name)
            count = compare(make_pivot(select(observation, view, results)), frame)
            own = frame[(frame["benchmark"] == benchmark) & frame[f"{name}_ms"].notna()]
            assert count == len(own), (benchmark, name)
            total += count
    declared = [
        compare(make_pivot(select(observation, view, results)), frame)
        for view in tables_of(observation.manifests[-1].sweep)
        if view.list_fact is None
    ]
    assert total + sum(declared) > 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.* runs? not shown")
def test_the_reference_folders_together(tmp_path: Path) -> None:
    """Benchmarks with different parameters, devices and statuses share one frame."""
    frame = checked(*SMALL)
    assert len(frame) == sum(len(load(study)) for study in SMALL)
    assert {"ok", "unsupported"} <= set(frame["status"])
    assert frame["param.samples"].notna().any()  # all_reduce has a parameter `samples`
    frame.to_parquet(tmp_path / "all.parquet")
    pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "all.parquet"), frame)


@given(st.lists(st.lists(st.floats(0, 1e6), min_size=1, max_size=4), max_size=8))
def test_statistics_of_many_cells_are_those_of_each(samples: list[list[float]]) -> None:
    rows, keys = [], []
    for i, each in enumerate(samples):
        for repeat in range(i % 3):
            made = record(run(i), ok(*each), repeat)
            result = Result(run(i), repeat, CPU, made.status, made, in_round=i % 2 == 0)
            rows += rows_of([result], [METRICS["time"]], lambda result, metric: ["forward"])
            keys.append(i)
    for name in STATISTICS:
        for key, cell in cells_of(rows, keys, name).items():
            own = [row for row, of in zip(rows, keys, strict=True) if of == key]
            (alone,) = cells_of(own, [key] * len(own), name).values()
            assert cell.number == pytest.approx(alone.number, rel=1e-12)
            assert cell.in_rounds == (key % 2 == 0)


def test_a_statistic_of_rows_does_not_depend_on_the_other_rows() -> None:
    samples = np.random.default_rng(0).random((7, 100))
    alone = [statistic(row, "p90") for row in samples]
    assert of_each(list(samples), "p90").tolist() == alone
    assert alone == pytest.approx(np.quantile(samples, 0.9, axis=1))
