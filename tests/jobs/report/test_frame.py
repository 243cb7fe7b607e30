"""jobs.report.load: results folders as a DataFrame that agrees with the tables."""

from __future__ import annotations

import io
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

import jobs.report
from jobs.formatting import format_number
from jobs.report import load
from jobs.report.frame import FIRST, LAST, MEASURED, typed
from jobs.report.metrics import METRICS, Metric
from jobs.report.results import Result, list_results
from jobs.report.statistics import statistic
from jobs.report.tables.cell import Cell, numbers
from jobs.report.tables.pivot import Pivot, make_pivot
from jobs.report.views import tables_of
from jobs.results import run_states
from jobs.results.run_states import observe
from jobs.results.stale import with_stale
from jobs.status import JobState, Status
from jobs.sweep.schema import FACT, STATISTICS, Table
from tests.jobs.harness import ROOT
from tests.jobs.results_folder import (
    CPU,
    GRID,
    H200,
    TOY,
    ResultsFolder,
    failed,
    ok,
    record,
    run,
)
from tests.jobs.results_folder import (
    load as load_text,
)

STUDIES = sorted(path.parent for path in (ROOT / "logs" / "h200").glob("*/submissions"))
SIZES = "grid: {size: [1, 2, 3]}\n"
BLOCKS = "blocks: {interleave: [mode], baseline: {mode: fast}, rounds: 5, aa: false}\n"
HOSTILE = ["a,b", 'c"d', "e\nf", "g\rh", "=1+1", "'", "NA", "nan", "ß€\u2028", "x\0y", "-2", "\t"]


def single(frame: pd.DataFrame, **values: Any) -> pd.Series[Any]:
    """Return the only row with these values."""
    chosen = frame
    for name, value in values.items():
        chosen = chosen[chosen[name] == value]
    assert len(chosen) == 1, chosen
    return chosen.iloc[0]


def checked(*folders: Path) -> pd.DataFrame:
    """Load folders, and check what holds for every frame."""
    frame = load(*folders)
    assert frame.columns.is_unique
    middle = [name for name in frame.columns if name not in FIRST | MEASURED | LAST]
    facts = [name for name in middle if name.startswith(FACT)]
    params = middle[: len(middle) - len(facts)]
    assert list(frame.columns) == [*FIRST, *params, *MEASURED, *facts, *LAST]
    for name, dtype in (FIRST | MEASURED | LAST).items():
        assert str(frame[name].dtype) == dtype, name
    assert {str(dtype) for dtype in frame.dtypes} <= {
        "string", "float64", "int64", "Int64", "bool", "boolean",
    }  # fmt: skip
    assert not frame.duplicated(["folder", "run", "device", "phase", "status"]).any()
    measured = frame["median_ms"].notna()
    assert (frame["status"][measured] == "ok").all()
    assert frame.loc[frame["status"] != "ok", ["phase", *list(MEASURED)[1:]]].isna().all(axis=None)
    return frame


# ---- agreement with tables


def row_of(pivot: Pivot, frame: pd.DataFrame, keys: tuple[Any, ...], phase: str) -> pd.DataFrame:
    """Return the rows of a frame that are in one cell of a table."""
    matches = frame["status"] == "ok"  # the frame has many columns, so its rows are taken once
    names = [*pivot.rows, *pivot.columns]
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
    count = 0
    shown = {record.run for cell in pivot.cells.values() for record in cell.records}
    frame = frame[frame["run"].isin(shown)]
    for (row, column), cell in pivot.cells.items():
        number = cell.number(pivot.view.statistic)
        found = column_of(cell.metric, pivot.view.statistic)
        if number is None or found is None:
            continue
        given = pivot.view.phase
        phase = given if isinstance(given, str) else ""
        rows = row_of(pivot, frame, (*row, *column), phase if cell.metric.has_phases else "")
        name, factor = found
        values = rows[name].dropna().unique()
        assert len(values) == 1, (pivot.view.name, row, column, rows)
        assert float(values[0]) * factor == pytest.approx(number, rel=1e-14)
        assert cell.text(pivot.view.statistic).startswith(format_number(values[0] * factor))
        interval = cell.interval("median")
        if cell.metric.name == "time" and interval is not None:
            ends = (rows["low_ms"].item() * factor, rows["high_ms"].item() * factor)
            assert ends == pytest.approx(interval, rel=1e-12)
        count += 1
    return count


SMALL = ("all_reduce", "flash_leaderboard", "warmup")  # several ranks, blocks and repeats


@pytest.mark.parametrize(
    "study",
    [
        pytest.param(path, id=path.name, marks=[] if path.name in SMALL else pytest.mark.slow)
        for path in STUDIES
    ],
)
def test_every_number_of_the_reference_tables_is_in_the_frame(study: Path) -> None:
    observation, frame = observe(study), checked(study)
    results = list_results(observation)
    assert set(frame["run"]) == {result.run.id for result in results}
    total = 0
    for benchmark in frame["benchmark"].unique():
        for name in ("median", "mean", "std", "min", "max"):
            view = Table(name="t", benchmark=benchmark, statistic=name)
            count = compare(make_pivot(observation, view, results), frame)
            own = frame[(frame["benchmark"] == benchmark) & frame[f"{name}_ms"].notna()]
            assert count == len(own), (benchmark, name)
            total += count
    declared = [
        compare(make_pivot(observation, view, results), frame)
        for view in tables_of(observation.manifests[-1].sweep)
        if view.list_fact is None
    ]
    assert total + sum(declared) > 0


@pytest.mark.filterwarnings("ignore:.* runs? not shown")
@pytest.mark.slow
def test_the_reference_folders_together(tmp_path: Path) -> None:
    """Benchmarks with different parameters, devices and statuses share one frame."""
    frame = checked(*STUDIES)
    assert len(frame) == sum(len(load(study)) for study in STUDIES)
    assert {"ok", "oom", "timeout", "cancelled", "unsupported"} <= set(frame["status"])
    assert frame["param.samples"].notna().any()  # all_reduce has a parameter `samples`
    frame.to_parquet(tmp_path / "all.parquet")
    pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "all.parquet"), frame)


# ---- rows


def test_a_row_is_a_run_and_phase(tmp_path: Path, folder: ResultsFolder) -> None:
    places = {"environment": {"host": "node7", "git": {"commit": "4bb999b0123", "dirty": False}}}
    measurements = {
        "samples_ms": {"forward": [1.0, 2.0, 6.0], "backward": [4.0]},
        "flops": {"forward": 2e9},
        "bytes": {"backward": 8e6},
        "tokens": {"forward": 10},
        "peak_memory_bytes": {"forward": 12345678901, "optimizer": 7},
        "compiling_seconds": 2.5,
    }
    outcome = {"status": "ok", "measurements": measurements, "gpus": [{"uuid": "GPU-0123abcd"}]}
    folder.submit(load_text(tmp_path, TOY + GRID), lambda params, repeat: outcome | places, H200)
    frame = checked(folder.path)
    assert len(frame) == 4 * 3
    forward = single(frame, size=1, mode="fast", phase="forward")
    expected = {
        "folder": str(folder.path), "sweep": "toy", "benchmark": "tests.benchmarks.toy",
        "device": H200, "status": "ok", "scale": 1, "label": "", "processes": 1, "samples": 3,
        "median_ms": 2.0, "mean_ms": 3.0, "min_ms": 1.0, "max_ms": 6.0, "tflops": 1.0,
        "tokens_per_second": 5000.0, "peak_memory_bytes": 12345678901, "compiling_seconds": 2.5,
        "commit": "4bb999b", "host": "node7", "gpu": "0123abcd", "stale": False, "attempt": 1,
    }  # fmt: skip
    assert {name: forward[name] for name in expected} == expected
    assert forward["std_ms"] == pytest.approx(math.sqrt(7))
    assert forward[["low_ms", "high_ms", "bandwidth", "mfu", "reason", "window"]].isna().all()
    backward = single(frame, size=1, mode="fast", phase="backward")
    assert (backward["bandwidth"], backward["samples"], backward["std_ms"]) == (2.0, 1, 0.0)
    optimizer = single(frame, size=1, mode="fast", phase="optimizer")
    assert optimizer["peak_memory_bytes"] == 7 and optimizer[["median_ms", "samples"]].isna().all()
    assert str(frame["size"].dtype) == "int64" and str(frame["causal"].dtype) == "bool"


def test_ranks_count_by_the_slowest(tmp_path: Path, folder: ResultsFolder) -> None:
    measured = {
        "samples_ms": {"step": [[1.0, 5.0], [2.0, 3.0, 9.0]]},
        "peak_memory_bytes": {"step": [3, 8]},
    }
    folder.submit(
        load_text(tmp_path, TOY + "fixed: {size: 1}\n"),
        lambda params, repeat: {"status": "ok", "measurements": measured},
    )
    row = single(checked(folder.path))
    assert (row["samples"], row["median_ms"], row["peak_memory_bytes"]) == (2, 3.5, 8)


def test_every_status_has_a_row(
    tmp_path: Path, folder: ResultsFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = [status for status in Status if status.can_be_recorded]
    loaded = load_text(tmp_path, TOY + f"grid: {{size: {list(range(1, len(recorded) + 2))}}}\n")

    def outcome(params: dict[str, Any], repeat: int) -> dict[str, Any] | None:
        if params["size"] > len(recorded):
            return None
        status = recorded[params["size"] - 1]
        return ok(1.0) if status == "ok" else failed(status)

    folder.submit(loaded, outcome)
    frame = checked(folder.path)
    assert frame["status"].tolist() == [*recorded, "missing"]
    bad = frame[frame["status"] != "ok"]
    assert bad["reason"].notna().all() and bad["size"].notna().all()
    assert single(frame, status="error")["reason"] == "RuntimeError: as asked"
    missing = single(frame, status="missing")
    assert missing[["commit", "attempt", "stale", "phase", "device"]].isna().tolist() == [
        True, True, True, True, False,
    ]  # fmt: skip
    for status in (Status.queued, Status.running):
        monkeypatch.setattr(
            run_states,
            "job_states",
            lambda manifests, notes, state=JobState(status, "Slurm job 1"): {
                m.id: {job.index: state for job in m.jobs} for m in manifests
            },
        )
        live = checked(folder.path)
        rows = live[live["size"] == len(recorded) + 1]
        assert rows["status"].tolist() == ["queued"] and "Slurm job 1" in rows["reason"].item()


def test_a_run_that_is_queued_again_has_the_status_of_tables(
    tmp_path: Path, folder: ResultsFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = folder.submit(
        load_text(tmp_path, TOY + "fixed: {size: 1}\n"), lambda params, repeat: failed("preempted")
    )
    monkeypatch.setattr(
        run_states,
        "job_states",
        lambda manifests, notes: {manifest.id: {0: JobState(Status.queued, "Slurm job 1")}},
    )
    row = single(checked(folder.path))
    assert (row["status"], row["reason"]) == ("preempted", "RuntimeError: as asked")


def test_the_reason_of_oom_tells_how_much_memory_the_run_needs(
    tmp_path: Path, folder: ResultsFolder
) -> None:
    oom = failed("oom", "OutOfMemoryError", memory="gpu", requested_bytes=2**30, phase="backward")
    folder.submit(load_text(tmp_path, TOY + "fixed: {size: 1}\n"), lambda params, repeat: oom)
    reason = single(checked(folder.path))["reason"]
    assert reason == "OOM in backward (1.0 GiB): OutOfMemoryError: as asked"


def test_repeats_share_a_row_and_failed_ones_have_their_own(
    tmp_path: Path, folder: ResultsFolder
) -> None:
    def outcome(params: dict[str, Any], repeat: int) -> dict[str, Any] | None:
        if params["size"] == 1 or repeat == 0:
            return ok(1.0 + repeat, 5.0 + repeat)
        return failed("timeout") if params["size"] == 2 else None

    folder.submit(load_text(tmp_path, TOY + SIZES + "repeats: 3\n"), outcome)
    frame = checked(folder.path)
    assert frame.groupby("size")["status"].agg(list).tolist() == [
        ["ok"], ["ok", "timeout"], ["ok", "missing"],
    ]  # fmt: skip
    whole = single(frame, size=1)
    assert (whole["processes"], whole["samples"], whole["median_ms"]) == (3, 6, 4.0)
    assert single(frame, size=2, status="timeout")["processes"] == 2
    assert single(frame, size=3, status="missing")["processes"] == 2
    assert frame["low_ms"].isna().all()


def test_several_devices_have_separate_rows(tmp_path: Path, folder: ResultsFolder) -> None:
    loaded = load_text(tmp_path, TOY + SIZES)
    folder.submit(loaded, lambda params, repeat: ok(1.0), CPU)
    folder.submit(
        loaded, lambda params, repeat: ok(2.0) if params["size"] < 3 else None, "cpu: Other"
    )
    frame = checked(folder.path)
    assert frame.pivot(index="size", columns="device", values="median_ms").to_dict("list") == {
        CPU: [1.0, 1.0, 1.0],
        "cpu: Other": [2.0, 2.0, pytest.approx(np.nan, nan_ok=True)],
    }
    absent = single(frame, size=3, device="cpu: Other")
    assert (absent["status"], absent["reason"]) == ("missing", "no record on this device")


def test_blocks_have_the_interval_over_processes(tmp_path: Path, folder: ResultsFolder) -> None:
    times = [1.0, 1.02, 1.01, 1.05, 1.0]
    loaded = load_text(tmp_path, TOY + "grid: {size: [1], mode: [fast, exact]}\n" + BLOCKS)
    folder.submit_rounds(
        loaded,
        lambda params, repeat: ok(0.9 * times[repeat], times[repeat], 3 * times[repeat]),
    )
    folder.submit_rounds(loaded, lambda params, repeat: None, rounds=[0])  # changes nothing
    frame = checked(folder.path)
    row = single(frame, mode="exact")
    low, high = stats.t.interval(0.95, 4, np.mean(times), stats.sem(times))
    assert (row["low_ms"], row["high_ms"]) == pytest.approx((low, high))
    assert (row["processes"], row["samples"], row["median_ms"]) == (5, 15, 1.01)
    assert (row["min_ms"], row["max_ms"]) == (0.9, 3 * 1.05)
    assert row["mean_ms"] == pytest.approx(4.9 / 3 * np.mean(times))


def test_the_latest_ok_attempt_counts_and_stale_tells_older_code(
    tmp_path: Path, folder: ResultsFolder
) -> None:
    loaded = load_text(tmp_path, TOY + SIZES)
    folder.submit(loaded, lambda params, repeat: ok(1.0))
    folder.submit(
        loaded,
        lambda params, repeat: (
            ok(params["size"] + 1.0) | {"source_hash": "old"} if params["size"] < 3 else None
        ),
    )
    folder.submit(loaded, lambda params, repeat: failed("error") if params["size"] == 1 else None)
    frame = checked(folder.path)
    assert frame["median_ms"].tolist() == [2.0, 3.0, 1.0]
    assert frame["stale"].tolist() == [True, True, False]
    told = {run for run, _ in with_stale(observe(folder.path)).stale}
    assert set(frame["run"][frame["stale"]]) == told


def test_runs_of_an_older_version_have_the_defaults_as_in_tables(
    tmp_path: Path, folder: ResultsFolder
) -> None:
    manifest = folder.submit(load_text(tmp_path, TOY + SIZES), lambda params, repeat: ok(1.0))
    path = manifest.path / "manifest.json"
    path.write_text(path.read_text().replace('"ranks": 1', '"old": 1', 1))
    frame = checked(folder.path)
    assert frame["ranks"].tolist() == [1, 1, 1]
    text = path.read_text().replace("tests.benchmarks.toy", "tests.benchmarks.gone")
    path.write_text(text)
    with pytest.warns(UserWarning, match="that some runs of tests.benchmarks.gone lack"):
        frame = load(folder.path)
    assert frame["ranks"].isna().tolist() == [True, False, False]


def test_commits_and_hosts_of_repeats_are_listed(tmp_path: Path, folder: ResultsFolder) -> None:
    def outcome(params: dict[str, Any], repeat: int) -> dict[str, Any]:
        return ok(1.0) | {
            "environment": {"host": f"n{repeat % 2}", "git": {"commit": "4bb999b"}},
            "source_hash": "old" if repeat == 1 else None,
        }

    folder.submit(load_text(tmp_path, TOY + "fixed: {size: 1}\nrepeats: 3\n"), outcome)
    row = single(checked(folder.path))
    assert (row["host"], row["commit"], row["stale"]) == ("n0; n1", "4bb999b", True)
    assert pd.isna(row["gpu"])


# ---- facts and dtypes


def test_facts_have_the_names_of_tables(tmp_path: Path, folder: ResultsFolder) -> None:
    facts = [
        {"loss": {"first": 1, "last": 2.5}, "note": "a,b", "fast": True, "items": [1], "no": None},
        {"loss": {"first": 2}, "a.b": 3, "x": {"y": 4}, "x.y": 5, "deep": {"k.l": {"m": 6}}},
        {"note": 7, "huge": 10**30, "enormous": 10**400, "empty": {}},
    ]
    folder.submit(
        load_text(tmp_path, TOY + SIZES),
        lambda params, repeat: ok(1.0, facts=facts[params["size"] - 1]),
    )
    frame = checked(folder.path).filter(like=FACT)
    expected: dict[str, list[Any]] = {
        "fact.loss.first": [1, 2, None], "fact.loss.last": [2.5, None, None],
        "fact.note": ["a,b", None, "7"], "fact.fast": [True, None, None],
        "fact.a.b": [None, 3, None], "fact.x.y": [None, 4, None],
        "fact.deep.k.l.m": [None, 6, None], "fact.huge": [None, None, 1e30],
        "fact.enormous": [None, None, str(10**400)],
    }  # fmt: skip
    assert set(frame.columns) == set(expected)
    for name, values in expected.items():
        column = frame[name]
        assert [None if pd.isna(v) else v for v in column] == values, name
    dtypes = {name: str(dtype) for name, dtype in frame.dtypes.items()}
    assert dtypes["fact.loss.first"] == "Int64" and dtypes["fact.fast"] == "boolean"
    assert dtypes["fact.note"] == "string" and dtypes["fact.huge"] == "float64"


def test_facts_of_repeats(tmp_path: Path, folder: ResultsFolder) -> None:
    facts = [
        {"a": 1, "b": 1, "c": "u", "d": True, "e": 1},
        {"a": 1, "b": 2, "c": "v", "d": False, "e": "w"},
        {"a": 1, "b": 6, "c": "u", "d": True},
    ]
    folder.submit(
        load_text(tmp_path, TOY + "fixed: {size: 1}\nrepeats: 3\n"),
        lambda params, repeat: ok(1.0, facts=facts[repeat]),
    )
    row = single(checked(folder.path))
    assert [row[f"fact.{name}"] for name in "abcde"] == [1, 2.0, "u; v", 1.0, 1.0]


def test_a_run_with_only_facts_has_one_row(tmp_path: Path, folder: ResultsFolder) -> None:
    outcome = {"status": "ok", "measurements": {"facts": {"loss": 1.5}, "compiling_seconds": 2.0}}
    folder.submit(load_text(tmp_path, TOY + "fixed: {size: 1}\n"), lambda params, repeat: outcome)
    row = single(checked(folder.path))
    assert (row["fact.loss"], row["compiling_seconds"], row["processes"]) == (1.5, 2.0, 1)
    assert row[["phase", "median_ms", "samples"]].isna().all()


@pytest.mark.parametrize(
    ("values", "dtype", "expected"),
    [
        ([1, 2], "int64", [1, 2]),
        ([1, None], "Int64", [1, None]),
        ([2**53 + 1, None], "Int64", [2**53 + 1, None]),
        ([2**63, 1], "float64", [2.0**63, 1.0]),
        ([1, 0.5, None], "float64", [1.0, 0.5, None]),
        ([True, False], "bool", [True, False]),
        ([True, None], "boolean", [True, None]),
        ([True, 3], "float64", [1.0, 3.0]),
        (["a", None, ""], "string", ["a", None, ""]),
        (["a", 1, 0.5, True, None], "string", ["a", "1", "0.5", "true", None]),
        (["\ud800"], "string", ["?"]),
        ([[1, 2], {"a": 1}], "string", ["[1, 2]", "{'a': 1}"]),
        ([None, None], "float64", [None, None]),
        ([], "float64", []),
    ],
)
def test_a_column_has_one_dtype(values: list[Any], dtype: str, expected: list[Any]) -> None:
    series = pd.Series(typed(values))
    assert str(series.dtype) == dtype
    assert [None if pd.isna(value) else value for value in series] == expected


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()


@given(st.lists(scalars | st.text(st.characters(codec=None))))
def test_every_column_can_be_written(values: list[Any]) -> None:
    frame = pd.DataFrame({"a": typed(values)})
    assert str(frame["a"].dtype) in ("string", "float64", "int64", "Int64", "bool", "boolean")
    assert (frame["a"].isna() == [value is None for value in values]).all()
    file = io.BytesIO()
    frame.to_parquet(file, engine="pyarrow")
    frame.to_csv(io.BytesIO())


@given(st.lists(st.lists(st.floats(0, 1e6), min_size=1, max_size=4), max_size=8))
def test_statistics_of_many_cells_are_those_of_each(samples: list[list[float]]) -> None:
    cells = []
    for i, each in enumerate(samples):
        cell = Cell(METRICS["time"])
        for repeat in range(i % 3):
            made = record(run(i), ok(*each), repeat)
            in_round = i % 2 == 0
            result = Result(run(i), repeat, CPU, made.status, made, in_round=in_round)
            cell.add(result, "forward")
        cells.append(cell)
    for name, values in numbers(cells, STATISTICS).items():
        assert len(values) == len(cells)
        for cell, value in zip(cells, values, strict=True):
            number = cell.number(name)
            assert (
                math.isnan(value) if number is None else value == pytest.approx(number, rel=1e-12)
            )


def test_a_statistic_of_rows_does_not_depend_on_the_other_rows() -> None:
    samples = np.random.default_rng(0).random((7, 100))
    alone = [statistic(row, "p90") for row in samples]
    assert alone == pytest.approx(np.quantile(samples, 0.9, axis=1))


# ---- names and texts


def test_a_parameter_may_have_the_name_of_a_column(tmp_path: Path, folder: ResultsFolder) -> None:
    manifest = folder.submit(load_text(tmp_path, TOY + SIZES), lambda params, repeat: ok(1.0))
    path = manifest.path / "manifest.json"
    extra = '"host": "h", "fact.a": 1, "param.host": 2, "reason": null, "size": '
    path.write_text(path.read_text().replace('"params": {"size": ', '"params": {' + extra))
    frame = checked(folder.path)
    assert frame["param.host"].tolist() == ["h"] * 3 and frame["host"].isna().all()
    assert frame["param.fact.a"].tolist() == [1] * 3
    assert frame["param.param.host"].tolist() == [2] * 3
    assert "param.reason" in frame and frame["size"].tolist() == [1, 2, 3]


def test_texts_are_unchanged(tmp_path: Path, folder: ResultsFolder) -> None:
    folder.submit(
        load_text(tmp_path, TOY + f"grid: {{size: {list(range(1, len(HOSTILE) + 1))}}}\n"),
        lambda params, repeat: ok(1.0, facts={"text": HOSTILE[params["size"] - 1]}),
    )
    frame = checked(folder.path)
    assert frame["fact.text"].tolist() == HOSTILE


# ---- folders


def test_several_folders_and_one_given_twice(tmp_path: Path) -> None:
    folders = [ResultsFolder(tmp_path / name) for name in "ab"]
    for i, folder in enumerate(folders):
        loaded = load_text(tmp_path, TOY + SIZES)
        folder.submit(loaded, lambda params, repeat, ms=i + 1.0: ok(ms))
    paths = [folder.path for folder in folders]
    frame = checked(*paths, tmp_path / "a" / ".." / "a")
    assert len(frame) == 6
    assert frame.groupby("folder")["median_ms"].first().tolist() == [1.0, 2.0]
    assert load(str(paths[0])).equals(load(paths[0]))


def test_a_folder_without_submissions_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="holds no submission"):
        load(tmp_path)


def test_damaged_lines_are_warnings(tmp_path: Path, folder: ResultsFolder) -> None:
    folder.submit(load_text(tmp_path, TOY + SIZES), lambda params, repeat: ok(1.0))
    (folder.path / "records" / "damaged.jsonl").write_text("{\n")
    with pytest.warns(UserWarning, match="damaged.jsonl") as caught:
        frame = load(folder.path)
    assert len(frame) == 3 and len(caught) == 1 and caught[0].filename == __file__


def test_the_import_is_light() -> None:
    code = (
        "import sys; from jobs.report import load; assert not {'pandas', 'numpy'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
    assert jobs.report.__all__ == ["load"]
