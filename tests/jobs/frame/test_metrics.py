"""Metrics in tables: times, rates, shares, facts and predictions, by phase and rank, with units."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs.errors import TableError
from jobs.formatting import format_number
from systems import accounting
from tests.benchmarks import toy
from tests.jobs.results_folder import (
    GIB,
    GRID,
    H200,
    TOY,
    Outcome,
    ResultsFolder,
    by_mode,
    failed,
    load,
    ok,
    table,
)

ONE = TOY + "fixed: {size: 1}\n"


def one_value(folder: ResultsFolder, **view: Any) -> str:
    """Return the value of the only run of a folder."""
    (row,) = table(folder, rows=["size"], **view)
    _, value = row.values()
    return value


def test_of_several_ranks_the_slowest_counts_sample_by_sample(folder: ResultsFolder) -> None:
    """By hand for an all-reduce of 1 MB over 4 ranks: each rank sends 2 * 3/4 of it, 1.5 MB.

    The samples take 3, 2 and 4 ms, so the bus bandwidths are 0.5, 0.75 and 0.375 GB/s, with a
    median of 0.5 GB/s.
    """
    ranks = [[1.0, 2.0, 1.0], [3.0, 1.0, 4.0], [2.0, 1.5, 3.0], [0.5, 0.5, 0.5]]
    moved = accounting.all_reduce_bus_bytes(10**6, 4)
    assert moved == 1.5e6
    outcome = {
        "status": "ok",
        "measurements": {
            "samples_ms": {"latency": ranks},
            "bytes": {"latency": 10**6},
            "bus_bytes": {"latency": moved},
            "peak_memory_bytes": {"latency": [GIB, 3 * GIB, 2 * GIB, GIB]},
        },
    }
    folder.submit(ONE, outcome)
    assert one_value(folder) == "3.000"
    assert one_value(folder, statistic="max") == "4.000"
    assert one_value(folder, value="bus_bandwidth") == "0.5000"
    assert one_value(folder, value="bandwidth", statistic="max") == "0.5000"
    assert one_value(folder, value="peak_memory") == "3.000"


@pytest.mark.parametrize(
    ("view", "text"),
    [
        ({}, "2.000"),
        ({"unit": "us"}, "2000"),
        ({"statistic": "mean"}, "2.500"),
        ({"statistic": "min"}, "1.000"),
        ({"statistic": "std"}, "1.732"),
        ({"statistic": "mean_std"}, "2.500 ± 1.732"),
        ({"statistic": "p10"}, "1.300"),
        ({"statistic": "p90"}, "4.100"),
        ({"value": "tflops", "statistic": "max"}, "2.000"),
        ({"value": "bandwidth", "statistic": "min"}, "0.2000"),
        ({"value": "bus_bandwidth"}, "–"),
        ({"value": "tokens_per_second"}, "256000"),  # 512 of a sample, by its time
        ({"value": "peak_memory"}, "1.500"),
        ({"value": "peak_memory", "unit": "MB"}, "1611"),
        ({"value": "fact.error"}, "0.2500"),
        ({"value": "fact.nested.name"}, "kernel"),
        ({"value": "fact.nested.flag"}, "1.000"),
        ({"value": "fact.nested"}, "–"),
        ({"value": "fact.check_seconds"}, "0.5000"),
        ({"value": "fact.check_seconds", "unit": "ms"}, "500.0"),
        ({"value": "fact.setup_ms", "unit": "s"}, "0.2500"),
        ({"value": "fact.used_bytes", "unit": "GiB"}, "2.000"),
        ({"value": "fact.host_ms.forward", "unit": "us"}, "30.00"),
    ],
)
def test_values_units_and_statistics(
    folder: ResultsFolder, view: dict[str, Any], text: str
) -> None:
    outcome = ok(
        1.0, 2.0, 2.0, 5.0,
        flops={"forward": 2e9},
        bytes={"forward": 1e6},
        tokens={"forward": 512},
        peak_memory_bytes={"forward": int(1.5 * GIB)},
        facts={
            "error": 0.25,
            "nested": {"name": "kernel", "flag": True},
            "check_seconds": 0.5,
            "setup_ms": 250,
            "used_bytes": 2 * GIB,
            "host_ms": {"forward": 0.03},
        },
    )  # fmt: skip
    folder.submit(ONE, outcome)
    assert one_value(folder, **view) == text


def test_a_time_of_zero_is_no_rate(folder: ResultsFolder) -> None:
    folder.submit(ONE, ok(0.0, 1.0, flops={"forward": 1e9}))
    assert one_value(folder, value="tflops") == "–"


@pytest.mark.parametrize(
    ("params", "device", "share"),
    [
        ("dtype: bf16, precision: fp32", H200, "25.00"),
        ("dtype: fp32", H200, "369.7"),
        ("precision: bf16_pure", H200, "25.00"),  # without a dtype
        ("precision: tf32", H200, "50.00"),
        ("precision: int8", H200, "–"),
        ("dtype: bf16", "NVIDIA H900", "–"),
    ],
)
def test_share_of_the_peak_is_known_only_for_known_hardware_and_dtypes(
    folder: ResultsFolder, monkeypatch: pytest.MonkeyPatch, params: str, device: str, share: str
) -> None:
    class Params(toy.Params):
        dtype: str | None = None
        precision: str = "fp32"

    monkeypatch.setattr(toy, "Params", Params)
    outcome = ok(1.0, flops={"forward": 494.7e9 / 2})  # half an H200's tf32 peak for 1 ms
    folder.submit(TOY + f"fixed: {{size: 1, {params}}}\n", outcome, device)
    assert one_value(folder, value="mfu") == share


@settings(max_examples=300)
@given(st.floats(1e-2, 1e6))
def test_numbers_show_four_digits_and_no_exponent(number: float) -> None:
    text = format_number(number)
    assert abs(float(text) / number - 1) <= 5.1e-4
    assert "e" not in text
    digits = text.replace(".", "").lstrip("0")
    assert len(digits) == 4 or (number >= 999.9 and len(digits) == len(str(round(number))))


# ---- several values ------------------------------------------------------------------------------


def step(size: int, **keywords: Any) -> Outcome:
    """Return the outcome of a training step, with the memory of its weights as a fact."""
    return ok(4.0 * size, phase="train_step", facts={"weights_bytes": size * GIB}, **keywords)


def test_values_may_stand_in_rows(folder: ResultsFolder) -> None:
    folder.submit(TOY + "grid: {size: [2, 4]}\n", lambda params, repeat: step(params["size"]))
    assert table(
        folder, rows=["value"], columns=["size"], value=["time", "fact.weights_bytes"]
    ) == [
        {"value": "time (ms)", "2": "8.000", "4": "16.00"},
        {"value": "weights (bytes)", "2": "2147483648", "4": "4294967296"},
    ]


def test_a_value_without_phases_has_one_column_beside_those_of_the_phases(
    folder: ResultsFolder,
) -> None:
    both = {"samples_ms": {"forward": [1.0], "backward": [2.0]}, "facts": {"layers": 3}}
    folder.submit(TOY + "fixed: {size: 1}\n", {"status": "ok", "measurements": both})
    values = ["fact.layers", "time"]
    assert table(folder, rows=["size"], value=values) == [
        {
            "size": "1",
            "layers": "3.000",
            "forward time (ms)": "1.000",
            "backward time (ms)": "2.000",
        }
    ]
    assert table(folder, rows=["size", "phase"], value=values) == [
        {"size": "1", "phase": "forward", "layers": "3.000", "time (ms)": "1.000"},
        {"size": "1", "phase": "backward", "layers": "3.000", "time (ms)": "2.000"},
    ]


def test_each_value_has_its_own_speed_up(folder: ResultsFolder) -> None:
    tokens = {"train_step": 100}
    fast, exact = (step(size, tokens=tokens) for size in (1, 2))
    folder.submit(TOY + "grid: {size: [1], mode: [fast, exact]}\n", by_mode(fast, exact))
    view = {"rows": ["size"], "columns": ["mode"], "unit": "GiB", "baseline": {"mode": "fast"}}
    values = ["tokens_per_second", "fact.weights_bytes"]
    (row,) = table(folder, **view, value=values)
    assert row == {
        "size": "1",
        "fast tokens/s": "25000",
        "fast weights (GiB)": "1.000",
        "exact tokens/s": "12500",
        "exact tokens/s vs fast": "0.50x",
        "exact weights (GiB)": "2.000",
        "exact weights (GiB) vs fast": "0.50x",
    }
    (row,) = table(folder, **view, value=values[1], direction="higher")
    assert row["exact vs fast"] == "2.00x"


# ---- predictions of a benchmark ------------------------------------------------------------------


def test_what_was_predicted_is_shown_whatever_became_of_the_run(
    tmp_path: Path, folder: ResultsFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def predict(params: toy.Params) -> dict[str, Any]:
        step_ms = 2.5 if params.size < 3 else None
        return {"peak_memory_bytes": {"step": params.size * GIB}, "step_ms": step_ms}

    monkeypatch.setattr(toy, "predict", predict, raising=False)
    values = "[peak_memory, predicted.peak_memory_bytes.step, predicted.step_ms, predicted.x]"
    text = f"grid: {{size: [1, 2, 3]}}\ntables: [{{name: t, value: {values}, unit: GiB}}]\n"
    measured = ok(1.0, peak_memory_bytes={"forward": GIB // 2})
    loaded = load(tmp_path, TOY + text)
    folder.submit(loaded, [measured, failed("oom", memory="gpu"), None])
    view = loaded.sweep.tables[0].model_dump(exclude={"name"}, by_alias=True)
    rows = table(folder, **view)
    assert [tuple(row.values()) for row in rows] == [
        ("1", "0.5000", "1.000", "2.500", "–"),
        ("2", "OOM", "2.000", "2.500", "–"),
        ("3", "missing", "3.000", "–", "–"),
    ]
    assert list(rows[0]) == [
        "size", "peak memory (GiB)", "predicted peak memory step (GiB)", "predicted step (ms)",
        "predicted x",
    ]  # fmt: skip


def test_a_prediction_that_raises_is_an_error_that_names_the_run(
    folder: ResultsFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toy, "predict", lambda p: {"x": 1 // (p.size - 2)}, raising=False)
    folder.submit(TOY + GRID, ok(1.0))
    with pytest.raises(TableError, match=r"size=2,.*raised ZeroDivisionError"):
        table(folder, value="predicted.x")
