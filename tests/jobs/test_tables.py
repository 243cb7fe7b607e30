"""Tables: every run of the sweep has a cell, whatever became of it, and no number is lost."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import Field

from jobs.record import Measurements, Status
from jobs.schema import Table, TableError
from jobs.status import observe
from jobs.tables import fill, frame
from jobs.values import shown, slowest
from systems import accounting
from tests.benchmarks import toy
from tests.results_folder import CPU, Outcome, ResultsFolder, failed, load, ok

ROOT = Path(__file__).parents[2]
H200 = "NVIDIA H200"
TOY = "name: toy\nbenchmark: tests.benchmarks.toy\n"
GRID = "grid: {size: [1, 2], mode: [fast, exact]}\n"
GIB = 2**30


@pytest.fixture
def folder(tmp_path: Path) -> ResultsFolder:
    return ResultsFolder(tmp_path / "out")


def table(folder: ResultsFolder, **view: Any) -> list[dict[str, str]]:
    """A table's rows, as a reader sees them."""
    shown_frame = frame(fill(observe(folder.path), Table(name="t", **view)))
    return [{str(k): v for k, v in row.items()} for row in shown_frame.to_dict("records")]


# ---- every run has a cell ------------------------------------------------------------------------

FATES: list[tuple[Outcome, str]] = [
    (ok(1.0, 2.0, 4.0), "2.000"),
    (
        failed("oom", memory="gpu", requested_bytes=40 * GIB, allocated_bytes=int(1.2 * GIB)),
        "OOM (41.2 GiB)",
    ),
    (failed("oom", memory="gpu", requested_bytes=3 * GIB), "OOM (3.0 GiB)"),
    (failed("oom", memory="gpu"), "OOM"),
    (failed("oom", memory="host"), "OOM (host)"),
    (failed("timeout"), "timeout"),
    (failed("error"), "error"),
    (failed("wrong"), "wrong"),
    (failed("unsupported"), "unsupported"),
    (failed("killed"), "killed"),
    (failed("preempted"), "preempted"),
    (failed("cancelled"), "cancelled"),
    (None, "missing"),
]


def test_what_became_of_each_run_stands_in_its_cell(tmp_path: Path, folder: ResultsFolder) -> None:
    sizes = list(range(1, len(FATES) + 1))
    loaded = load(tmp_path, TOY + f"grid: {{size: {sizes}}}\n")
    folder.submit(loaded, lambda params, repeat: FATES[params["size"] - 1][0])
    assert table(folder, rows=["size"]) == [
        {"size": str(size), "time": text} for size, (_, text) in zip(sizes, FATES, strict=True)
    ]
    assert {fate["status"] for fate, _ in FATES if fate} == set(get_args(Status))


def test_nothing_measured_at_all_is_still_a_table(tmp_path: Path, folder: ResultsFolder) -> None:
    folder.submit(load(tmp_path, TOY + GRID), lambda params, repeat: None)
    assert table(folder, rows=["size"], columns=["mode"]) == [
        {"size": "1", "fast": "missing", "exact": "missing"},
        {"size": "2", "fast": "missing", "exact": "missing"},
    ]


def test_a_failed_baseline_shows_and_erases_nobodys_number(
    tmp_path: Path, folder: ResultsFolder
) -> None:
    oom = failed("oom", memory="gpu", requested_bytes=2 * GIB)
    fates: dict[tuple[int, str], Outcome] = {
        (1, "fast"): ok(4.0),
        (1, "exact"): ok(1.0),
        (2, "fast"): oom,
        (2, "exact"): ok(3.0),
    }
    loaded = load(tmp_path, TOY + GRID)
    folder.submit(loaded, lambda params, repeat: fates[params["size"], params["mode"]])
    assert table(folder, rows=["size"], columns=["mode"], baseline={"mode": "fast"}) == [
        {"size": "1", "fast": "4.000", "exact": "1.000", "exact vs fast": "4.00x"},
        {
            "size": "2",
            "fast": "OOM (2.0 GiB)",
            "exact": "3.000",
            "exact vs fast": "baseline: OOM (2.0 GiB)",
        },
    ]


def test_a_failed_run_has_no_speed_up_but_its_reason(tmp_path: Path, folder: ResultsFolder) -> None:
    loaded = load(tmp_path, TOY + "grid: {size: [1], mode: [fast, exact]}\n")
    folder.submit(
        loaded, lambda params, repeat: ok(1.0) if params["mode"] == "fast" else failed("timeout")
    )
    (row,) = table(folder, rows=["size"], columns=["mode"], baseline={"mode": "fast"})
    assert row == {"size": "1", "fast": "1.000", "exact": "timeout", "exact vs fast": "–"}


def test_speed_up_knows_which_direction_is_better(tmp_path: Path, folder: ResultsFolder) -> None:
    loaded = load(tmp_path, TOY + "grid: {size: [1], mode: [fast, exact]}\n")
    ms = {"fast": 2.0, "exact": 1.0}
    folder.submit(
        loaded, lambda params, repeat: ok(ms[params["mode"]], flops={"forward": 4e9}, bytes={})
    )
    (row,) = table(
        folder, rows=["size"], columns=["mode"], baseline={"mode": "fast"}, value="tflops"
    )
    assert row == {"size": "1", "fast": "2.000", "exact": "4.000", "exact vs fast": "2.00x"}


def test_what_the_sweep_excludes_is_empty_not_missing(
    tmp_path: Path, folder: ResultsFolder
) -> None:
    loaded = load(tmp_path, TOY + GRID + "exclude: [{size: 2, mode: fast}]\n")
    folder.submit(loaded, lambda params, repeat: ok(1.0))
    rows = table(folder, rows=["size"], columns=["mode"])
    assert [row["fast"] for row in rows] == ["1.000", ""]


# ---- repeats, attempts, devices ------------------------------------------------------------------


def test_repeats_are_one_cell_that_says_how_many_count(
    tmp_path: Path, folder: ResultsFolder
) -> None:
    loaded = load(tmp_path, TOY + "grid: {size: [1, 2]}\nrepeats: 3\n")

    def outcome(params: dict[str, Any], repeat: int) -> Outcome:
        if params["size"] == 2 and repeat > 0:
            return failed("timeout") if repeat == 1 else None
        return ok(1.0 + repeat, 1.0 + repeat)

    folder.submit(loaded, outcome)
    assert table(folder, rows=["size"]) == [
        {"size": "1", "time": "2.000"},  # the median of 1 1 2 2 3 3
        {"size": "2", "time": "1.000 (1 of 3 repeats; timeout, missing)"},
    ]
    by_repeat = table(folder, rows=["size"], columns=["repeat"])
    assert by_repeat[1] == {"size": "2", "0": "1.000", "1": "timeout", "2": "missing"}


def test_the_latest_ok_attempt_counts_else_the_latest(
    tmp_path: Path, folder: ResultsFolder
) -> None:
    loaded = load(tmp_path, TOY + "grid: {size: [1, 2, 3]}\n")
    fates: list[list[Outcome]] = [
        [ok(1.0), failed("error"), failed("killed")],
        [ok(1.0), ok(5.0), None],
        [failed("error"), failed("oom", memory="host"), failed("timeout")],
    ]
    for turn in range(3):
        folder.submit(loaded, lambda params, repeat, turn=turn: fates[params["size"] - 1][turn])
    assert [row["time"] for row in table(folder, rows=["size"])] == ["1.000", "5.000", "timeout"]


def test_each_kind_of_device_has_its_own_cells(tmp_path: Path, folder: ResultsFolder) -> None:
    loaded = load(tmp_path, TOY + "grid: {size: [1, 2]}\nresources: {gpus_per_node: 1}\n")
    folder.submit(loaded, lambda params, repeat: ok(1.0 * params["size"]), H200)
    folder.submit(
        loaded,
        lambda params, repeat: failed("timeout") if params["size"] == 1 else None,
        "NVIDIA A100-SXM4-80GB",
    )
    assert table(folder, rows=["size"]) == [
        {"device": "NVIDIA A100-SXM4-80GB", "size": "1", "time": "timeout"},
        {"device": "NVIDIA A100-SXM4-80GB", "size": "2", "time": "missing"},
        {"device": H200, "size": "1", "time": "1.000"},
        {"device": H200, "size": "2", "time": "2.000"},
    ]


def test_a_machine_without_gpus_adds_no_device_to_the_gpus_table(
    tmp_path: Path, folder: ResultsFolder
) -> None:
    loaded = load(tmp_path, TOY + "grid: {size: [1]}\nresources: {gpus_per_node: 1}\n")
    folder.submit(loaded, lambda params, repeat: failed("unsupported"))
    assert table(folder, rows=["size"]) == [{"size": "1", "time": "unsupported"}]
    folder.submit(loaded, lambda params, repeat: ok(2.0), H200)
    assert table(folder, rows=["size"]) == [{"size": "1", "time": "2.000"}]


# ---- rows and columns ----------------------------------------------------------------------------


def test_a_parameter_that_the_table_forgets_becomes_a_row(
    tmp_path: Path, folder: ResultsFolder
) -> None:
    loaded = load(tmp_path, TOY + GRID + "fixed: {ranks: 2}\n")
    folder.submit(
        loaded, lambda params, repeat: ok(params["size"] + 0.5 * (params["mode"] == "exact"))
    )
    assert table(folder, rows=["size"]) == [
        {"mode": "fast", "size": "1", "time": "1.000"},
        {"mode": "fast", "size": "2", "time": "2.000"},
        {"mode": "exact", "size": "1", "time": "1.500"},
        {"mode": "exact", "size": "2", "time": "2.500"},
    ]


def test_rows_stand_in_the_sweeps_order_whatever_ran_first(
    tmp_path: Path, folder: ResultsFolder
) -> None:
    text = TOY + "grid: {size: [4, 16, 8], mode: [fast, exact], window: [null, 2]}\n"
    for partly in ("size == 8", "mode == exact"):
        folder.submit(load(tmp_path, text, filter=partly), lambda params, repeat: ok(1.0))
    shuffled = load(tmp_path, text, "order={shuffle: 3}", "runs_per_job=5")
    folder.submit(shuffled, lambda params, repeat: ok(1.0), force=False)
    rows = table(folder, rows=["size", "window"], columns=["mode"])
    assert [(row["size"], row["window"]) for row in rows] == [
        ("4", "null"), ("4", "2"), ("16", "null"), ("16", "2"), ("8", "null"), ("8", "2"),
    ]  # fmt: skip
    assert list(rows[0]) == ["size", "window", "fast", "exact"]


def test_without_rows_a_table_shows_what_was_swept(tmp_path: Path, folder: ResultsFolder) -> None:
    folder.submit(load(tmp_path, TOY + GRID), lambda params, repeat: ok(1.0))
    assert [list(row) for row in table(folder)] == [["size", "mode", "time"]] * 4


def test_where_keeps_the_runs_for_which_it_holds(tmp_path: Path, folder: ResultsFolder) -> None:
    folder.submit(load(tmp_path, TOY + GRID), lambda params, repeat: ok(1.0))
    rows = table(folder, rows=["size"], columns=["mode"], where="size > 1 and mode == fast")
    assert rows == [{"size": "2", "fast": "1.000"}]


def test_a_parameter_younger_than_a_run_had_its_default_there(
    tmp_path: Path, folder: ResultsFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.submit(
        load(tmp_path, TOY + "grid: {size: [1, 2]}\n"), lambda params, repeat: ok(params["size"])
    )

    class Params(toy.Params):
        depth: Annotated[int, Field(ge=1)] = 4

    monkeypatch.setattr(toy, "Params", Params)
    younger = load(tmp_path, TOY + "grid: {size: [1], depth: [4, 8]}\n")
    folder.submit(younger, lambda params, repeat: ok(params["depth"]), force=False)
    rows = table(folder, rows=["size"], columns=["depth"], where="depth < 9")
    assert rows == [
        {"size": "1", "4": "4.000", "8": "8.000"},  # the first is of the run that is in both
        {"size": "2", "4": "2.000", "8": ""},
    ]


def test_runs_of_another_benchmark_do_not_disturb(tmp_path: Path, folder: ResultsFolder) -> None:
    other = "name: a\nbenchmark: attention\nfixed: {implementation: naive, head_dim: 8}\n"
    folder.submit(load(tmp_path, other + "grid: {seq_len: [1, 2]}\n"), lambda p, repeat: ok(9.0))
    folder.submit(load(tmp_path, TOY + "grid: {size: [1]}\n"), lambda params, repeat: ok(1.0))
    assert table(folder, rows=["size"]) == [{"size": "1", "time": "1.000"}]


def test_phases_are_columns_unless_the_table_names_one(
    tmp_path: Path, folder: ResultsFolder
) -> None:
    both = {"samples_ms": {"forward": [1.0], "backward": [2.0]}}
    loaded = load(tmp_path, TOY + "grid: {size: [1, 2]}\n")
    folder.submit(
        loaded,
        lambda params, repeat: (
            {"status": "ok", "measurements": both} if params["size"] == 1 else ok(3.0)
        ),
    )
    assert table(folder, rows=["size"]) == [
        {"size": "1", "forward": "1.000", "backward": "2.000"},
        {"size": "2", "forward": "3.000", "backward": "–"},
    ]
    assert table(folder, rows=["size"], phase="backward")[0] == {"size": "1", "time": "2.000"}
    assert list(table(folder, rows=["size"], phase=["backward", "forward"])[0]) == [
        "size", "backward", "forward",
    ]  # fmt: skip


# ---- values --------------------------------------------------------------------------------------


def one_value(tmp_path: Path, outcome: Outcome, device: str = CPU, **view: Any) -> str:
    loaded = load(tmp_path, TOY + "fixed: {size: 1}\n")
    folder = ResultsFolder(tmp_path / f"out{random.random()}")
    folder.submit(loaded, lambda params, repeat: outcome, device)
    (row,) = table(folder, rows=["size"], **view)
    return list(row.values())[1]


def test_of_several_ranks_the_slowest_counts_sample_by_sample(tmp_path: Path) -> None:
    """Worked by hand: 1 MB over 4 ranks. A rank sends 2 * 3/4 of it, 1.5 MB; the samples take
    3, 2 and 4 ms; so 0.5, 0.75 and 0.375 GB/s, of which the median is 0.5."""
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
    assert one_value(tmp_path, outcome) == "3.000"
    assert one_value(tmp_path, outcome, statistic="max") == "4.000"
    assert one_value(tmp_path, outcome, value="bus_bandwidth") == "0.5000"
    assert one_value(tmp_path, outcome, value="bandwidth", statistic="max") == "0.5000"
    assert one_value(tmp_path, outcome, value="peak_memory") == "3.000"


def test_ranks_with_fewer_samples_limit_the_others() -> None:
    measurements = Measurements.model_validate({"samples_ms": {"call": [[1.0, 9.0], [2.0]]}})
    assert slowest(measurements, "call").tolist() == [2.0]


def test_share_of_the_peak_is_known_only_for_known_hardware(
    tmp_path: Path, folder: ResultsFolder
) -> None:
    text = """\
        name: a
        benchmark: attention
        fixed: {implementation: naive, head_dim: 8, seq_len: 16}
        grid: {dtype: [bf16, fp32]}
        resources: {gpus_per_node: 1}
        """
    outcome = ok(1.0, flops={"forward": 989.4e9 / 2})  # half an H200's bf16 peak for 1 ms
    for device in (H200, "NVIDIA H900"):
        folder.submit(load(tmp_path, text), lambda params, repeat: outcome, device)
    rows = table(folder, rows=["dtype"], columns=["device"], value="mfu")
    assert rows == [
        {"dtype": "bf16", H200: "50.00", "NVIDIA H900": "–"},
        {"dtype": "fp32", H200: "739.5", "NVIDIA H900": "–"},
    ]


@pytest.mark.parametrize(
    ("view", "text"),
    [
        ({}, "2.000"),
        ({"unit": "us"}, "2000"),
        ({"unit": "s"}, "0.002000"),
        ({"statistic": "mean"}, "2.500"),
        ({"statistic": "min"}, "1.000"),
        ({"statistic": "std"}, "1.732"),
        ({"statistic": "mean_std"}, "2.500 ± 1.732"),
        ({"statistic": "p90"}, "4.100"),
        ({"value": "tflops", "statistic": "max"}, "2.000"),
        ({"value": "bandwidth", "statistic": "min"}, "0.2000"),
        ({"value": "bus_bandwidth"}, "–"),
        ({"value": "peak_memory"}, "1.500"),
        ({"value": "peak_memory", "unit": "MB"}, "1611"),
        ({"value": "fact.error"}, "0.2500"),
        ({"value": "fact.nested.name"}, "kernel"),
        ({"value": "fact.nested.flag"}, "1.000"),
        ({"value": "fact.nested"}, "–"),
        ({"value": "fact.nothing"}, "–"),
        ({"value": "fact.check_seconds"}, "0.5000"),
        ({"value": "fact.check_seconds", "unit": "s"}, "0.5000"),
        ({"value": "fact.check_seconds", "unit": "ms"}, "500.0"),
        ({"value": "fact.setup_ms", "unit": "s"}, "0.2500"),
        ({"value": "fact.used_bytes", "unit": "GiB"}, "2.000"),
        ({"value": "fact.host_ms.forward", "unit": "us"}, "30.00"),
    ],
)
def test_values_units_and_statistics(tmp_path: Path, view: dict[str, Any], text: str) -> None:
    outcome = ok(
        1.0, 2.0, 2.0, 5.0,
        flops={"forward": 2e9},
        bytes={"forward": 1e6},
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
    assert one_value(tmp_path, outcome, **view) == text


def test_a_time_of_zero_is_no_rate(tmp_path: Path) -> None:
    outcome = ok(0.0, 1.0, flops={"forward": 1e9})
    assert one_value(tmp_path, outcome, value="tflops") == "–"


def test_tokens_per_second_are_what_one_sample_goes_through_by_its_time(tmp_path: Path) -> None:
    outcome = ok(2.0, 4.0, 8.0, phase="train_step", tokens={"train_step": 512})
    assert one_value(tmp_path, outcome, value="tokens_per_second") == "128000"
    assert one_value(tmp_path, ok(2.0), value="tokens_per_second") == "–"


@pytest.mark.parametrize(
    ("precision", "share"), [("bf16_pure", "25.00"), ("tf32", "50.00"), ("int8", "–")]
)
def test_without_a_dtype_the_precision_says_what_the_peak_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str, share: str
) -> None:
    class Params(toy.Params):
        precision: str = "fp32"

    monkeypatch.setattr(toy, "Params", Params)
    folder = ResultsFolder(tmp_path / "out")
    outcome = ok(1.0, flops={"forward": 494.7e9 / 2})  # half an H200's tf32 peak for 1 ms
    text = TOY + f"fixed: {{size: 1, precision: {precision}}}\n"
    folder.submit(load(tmp_path, text), lambda params, repeat: outcome, H200)
    assert table(folder, rows=["size"], value="mfu") == [{"size": "1", "MFU": share}]


# ---- several values ------------------------------------------------------------------------------

MEMORY = ["fact.weights_bytes", "fact.split.gradients_bytes", "peak_memory"]


def step(size: int, **keywords: Any) -> Outcome:
    """A training step whose peak is of two phases, and whose parts are facts."""
    facts = {"weights_bytes": size * GIB, "split": {"gradients_bytes": size * GIB // 2}}
    peaks = {"train_step": 3 * size * GIB}
    return ok(4.0 * size, phase="train_step", peak_memory_bytes=peaks, facts=facts, **keywords)


def test_several_values_are_columns_each_with_its_own_unit(
    tmp_path: Path, folder: ResultsFolder
) -> None:
    loaded = load(tmp_path, TOY + "grid: {size: [2, 4]}\n")
    folder.submit(
        loaded, lambda params, repeat: step(2) if params["size"] == 2 else failed("timeout")
    )
    assert table(folder, rows=["size"], value=[*MEMORY, "time"], unit="GiB") == [
        {
            "size": "2",
            "weights (GiB)": "2.000",
            "split gradients (GiB)": "1.000",
            "peak memory (GiB)": "6.000",
            "time (ms)": "8.000",
        },
        {
            "size": "4",
            "weights (GiB)": "timeout",
            "split gradients (GiB)": "timeout",
            "peak memory (GiB)": "timeout",
            "time (ms)": "timeout",
        },
    ]


def test_values_may_stand_in_rows(tmp_path: Path, folder: ResultsFolder) -> None:
    loaded = load(tmp_path, TOY + "grid: {size: [2, 4]}\n")
    folder.submit(loaded, lambda params, repeat: step(params["size"]))
    assert table(
        folder, rows=["value"], columns=["size"], value=["time", "fact.weights_bytes"]
    ) == [
        {"value": "time (ms)", "2": "8.000", "4": "16.00"},
        {"value": "weights (bytes)", "2": "2147483648", "4": "4294967296"},
    ]


def test_a_value_without_phases_has_one_column_beside_those_of_the_phases(
    tmp_path: Path, folder: ResultsFolder
) -> None:
    both = {"samples_ms": {"forward": [1.0], "backward": [2.0]}, "facts": {"layers": 3}}
    folder.submit(
        load(tmp_path, TOY + "fixed: {size: 1}\n"),
        lambda params, repeat: {"status": "ok", "measurements": both},
    )
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


def test_each_value_has_its_own_speed_up(tmp_path: Path, folder: ResultsFolder) -> None:
    loaded = load(tmp_path, TOY + "grid: {size: [1], mode: [fast, exact]}\n")
    tokens = {"train_step": 100}
    folder.submit(
        loaded, lambda params, repeat: step(1 if params["mode"] == "fast" else 2, tokens=tokens)
    )
    (row,) = table(
        folder,
        rows=["size"],
        columns=["mode"],
        value=["tokens_per_second", "fact.weights_bytes"],
        unit="GiB",
        baseline={"mode": "fast"},
    )
    assert row == {
        "size": "1",
        "fast tokens/s": "25000",
        "fast weights (GiB)": "1.000",
        "exact tokens/s": "12500",
        "exact tokens/s vs fast": "0.50x",
        "exact weights (GiB)": "2.000",
        "exact weights (GiB) vs fast": "0.50x",
    }


# ---- predictions ---------------------------------------------------------------------------------


def predicts(monkeypatch: pytest.MonkeyPatch, predict: Callable[[toy.Params], Any]) -> None:
    """Let the toy benchmark say beforehand what is to be expected."""
    monkeypatch.setattr(toy, "predict", predict, raising=False)


def test_what_was_predicted_is_shown_whatever_became_of_the_run(
    tmp_path: Path, folder: ResultsFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    predicts(
        monkeypatch,
        lambda params: {
            "peak_memory_bytes": {"step": params.size * GIB},
            "step_ms": 2.5 if params.size < 3 else None,
        },
    )
    values = "[peak_memory, predicted.peak_memory_bytes.step, predicted.step_ms, predicted.x]"
    text = f"grid: {{size: [1, 2, 3]}}\ntables: [{{name: t, value: {values}, unit: GiB}}]\n"
    fates: dict[int, Outcome] = {
        1: ok(1.0, peak_memory_bytes={"forward": GIB // 2}),
        2: failed("oom", memory="gpu"),
        3: None,
    }
    loaded = load(tmp_path, TOY + text)
    folder.submit(loaded, lambda params, repeat: fates[params["size"]])
    view = loaded.sweep.tables[0].model_dump(exclude={"name"})
    assert [tuple(row.values()) for row in table(folder, **view)] == [
        ("1", "0.5000", "1.000", "2.500", "–"),
        ("2", "OOM", "2.000", "2.500", "–"),
        ("3", "missing", "3.000", "–", "–"),
    ]
    assert list(table(folder, **view)[0]) == [
        "size", "peak memory (GiB)", "predicted peak memory step (GiB)", "predicted step (ms)",
        "predicted x",
    ]  # fmt: skip


def test_a_prediction_that_raises_is_an_error_that_names_the_run(
    tmp_path: Path, folder: ResultsFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    predicts(monkeypatch, lambda params: {"x": 1 // (params.size - 2)})
    folder.submit(load(tmp_path, TOY + GRID), lambda params, repeat: ok(1.0))
    with pytest.raises(TableError, match=r"size=2,.*raised ZeroDivisionError"):
        table(folder, value="predicted.x")


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.floats(1e-2, 1e6))
def test_numbers_show_four_digits_and_no_exponent(number: float) -> None:
    text = shown(number)
    assert abs(float(text) / number - 1) <= 5.1e-4
    assert "e" not in text
    digits = text.replace(".", "").lstrip("0")
    assert len(digits) == 4 or (number >= 999.9 and len(digits) == len(str(round(number))))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.integers(0, len(FATES) - 1), min_size=8, max_size=8), st.booleans())
def test_no_number_is_lost_whatever_the_others_do(
    tmp_path_factory: pytest.TempPathFactory, fates: list[int], with_baseline: bool
) -> None:
    tmp_path = tmp_path_factory.mktemp("any")
    folder = ResultsFolder(tmp_path / "out")
    loaded = load(tmp_path, TOY + "grid: {size: [1, 2, 3, 4], mode: [fast, exact]}\n")

    def fate(size: int, mode: str) -> tuple[Outcome, str]:
        return FATES[fates[2 * (size - 1) + (mode == "exact")]]

    folder.submit(loaded, lambda params, repeat: fate(params["size"], params["mode"])[0])
    baseline = {"baseline": {"mode": "fast"}} if with_baseline else {}
    for row in table(folder, rows=["size"], columns=["mode"], **baseline):
        for mode in ("fast", "exact"):
            assert row[mode] == fate(int(row["size"]), mode)[1]
