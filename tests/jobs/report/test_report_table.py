"""Tables: every run of the sweep has a cell, also if it failed, and no number is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jobs.status import Status
from tests.jobs.harness import call
from tests.jobs.results_folder import (
    CPU,
    GIB,
    GRID,
    H200,
    TOY,
    Outcome,
    ResultsFolder,
    failed,
    load,
    ok,
    report_table,
    table,
)

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


@pytest.mark.parametrize(
    ("title", "heading"),
    [
        # Results of an earlier version may have a title in which braces have no meaning.
        (
            "{mode}, {size} and\n {size}, not {other}",
            "fast, exact, 20, 3 and 20, 3, not {other}: time (ms)",
        ),
        (" ", "t: time (ms)"),
        ("time", "time (ms)"),
        ("time in ms", "time in ms"),
    ],
)
def test_a_heading_has_the_values_of_the_shown_runs_and_the_metric_once(
    folder: ResultsFolder, title: str, heading: str
) -> None:
    sweep = TOY + "grid: {size: [1, 20, 3], mode: [fast, exact]}\norder: {shuffle: 1}\n"
    folder.submit(sweep, ok(1.0))
    made = report_table(folder, title=title, where="size > 1", rows=["size", "mode"])
    assert made.heading == heading


def test_what_became_of_each_run_stands_in_its_cell(folder: ResultsFolder) -> None:
    """Alone, beside a number, and as the baseline of a number."""
    sizes, texts = list(range(1, len(FATES) + 1)), [text for _, text in FATES]
    folder.submit(
        TOY + f"grid: {{size: {sizes}, mode: [fast, exact]}}\n",
        lambda p, _: FATES[p["size"] - 1][0] if p["mode"] == "fast" else ok(1.0),
    )
    for size, text in zip(sizes, texts, strict=True):
        alone = table(folder, rows=["size"], where=f"size == {size} and mode == fast")
        assert alone == [{"size": str(size), "time": text}]
    for baseline in (None, {"mode": "fast"}):
        rows = table(folder, rows=["size"], columns=["mode"], baseline=baseline)
        assert [(row["fast"], row["exact"]) for row in rows] == [(text, "1.000") for text in texts]
    assert {fate["status"] for fate, _ in FATES if fate} == {
        status for status in Status if status.can_be_recorded
    }


def test_a_failed_run_erases_nobodys_number(folder: ResultsFolder) -> None:
    """A speedup says why its baseline has no number, and other cells keep their numbers."""
    fates: dict[tuple[int, str], Outcome] = {
        (1, "fast"): ok(4.0),
        (1, "exact"): ok(1.0),
        (2, "fast"): failed("oom", memory="gpu", requested_bytes=2 * GIB),
        (2, "exact"): ok(3.0),
        (3, "fast"): ok(1.0),
        (3, "exact"): failed("timeout"),
        (4, "exact"): ok(1.0),
    }
    folder.submit(
        TOY + "grid: {size: [1, 2, 3, 4], mode: [fast, exact]}\nexclude: [{size: 4, mode: fast}]\n",
        lambda params, repeat: fates[params["size"], params["mode"]],
    )
    rows = table(folder, rows=["size"], columns=["mode"], baseline={"mode": "fast"})
    assert list(rows[0]) == ["size", "fast", "exact", "exact vs fast"]
    assert [tuple(row.values()) for row in rows] == [
        ("1", "4.000", "1.000", "4.00x"),
        ("2", "OOM (2.0 GiB)", "3.000", "baseline: OOM (2.0 GiB)"),
        ("3", "1.000", "timeout", "–"),
        ("4", "", "1.000", "no baseline"),
    ]


def test_a_speed_up_of_scattered_samples_is_noise(folder: ResultsFolder) -> None:
    """The ratio has two digits if an interquartile range is larger than its median."""
    times = {1: [1.0, 1.0, 3.5], 2: [1.0, 1.0, 2.9], 3: [100.0, 900.0, 1800.0]}
    view = "{name: a, rows: [size], columns: [mode], baseline: {mode: fast}}"
    grid = "grid: {size: [1, 2, 3], mode: [fast, exact]}\n"
    folder.submit(
        f"{TOY}{grid}tables: [{view}]\n",
        lambda params, _: ok(*times[params["size"]] if params["mode"] == "fast" else [4.0]),
    )
    rows = table(folder, rows=["size"], columns=["mode"], baseline={"mode": "fast"})
    assert [row["exact vs fast"] for row in rows] == ["0.25x (noise)", "0.25x", "225.00x"]
    as_csv = call("aggregate", folder.path, "--format", "csv").stdout
    assert "1,1.000,4.000,0.250000,no\n" in as_csv and "noise" not in as_csv


# ---- repeats, attempts, devices ------------------------------------------------------------------


def test_repeats_are_one_cell_that_says_how_many_count(folder: ResultsFolder) -> None:

    def outcome(params: dict[str, Any], repeat: int) -> Outcome:
        if params["size"] == 2 and repeat > 0:
            return failed("timeout") if repeat == 1 else None
        return ok(1.0 + repeat, 1.0 + repeat)

    folder.submit(TOY + "grid: {size: [1, 2]}\nrepeats: 3\n", outcome)
    assert table(folder, rows=["size"]) == [
        {"size": "1", "time": "2.000"},  # median of 1, 1, 2, 2, 3, 3
        {"size": "2", "time": "1.000 (1 of 3 repeats; timeout, missing)"},
    ]
    by_repeat = table(folder, rows=["size"], columns=["repeat"])
    assert by_repeat[1] == {"size": "2", "0": "1.000", "1": "timeout", "2": "missing"}


def test_each_kind_of_device_has_its_own_cells(folder: ResultsFolder) -> None:
    sweep = TOY + "grid: {size: [1, 2]}\nresources: {gpus_per_node: 1}\n"
    folder.submit(sweep, [ok(1.0), ok(2.0)], H200)
    folder.submit(sweep, [failed("timeout"), None], "NVIDIA A100-SXM4-80GB")
    assert table(folder, rows=["size"]) == [
        {"device": "NVIDIA A100-SXM4-80GB", "size": "1", "time": "timeout"},
        {"device": "NVIDIA A100-SXM4-80GB", "size": "2", "time": "missing"},
        {"device": H200, "size": "1", "time": "1.000"},
        {"device": H200, "size": "2", "time": "2.000"},
    ]


def test_older_code_is_counted_by_device(folder: ResultsFolder) -> None:
    for device, older in ((H200, {}), ("NVIDIA H100", {"source_hash": "0123"})):
        folder.submit(TOY + "grid: {size: [1, 2]}\n", ok(1.0) | older, device)
    assert "4 processes; 2 of 4 with older code" in call("aggregate", folder.path).stdout


def test_a_note_tells_why_a_commit_is_unknown(folder: ResultsFolder) -> None:
    loose = {
        "file": "/home/a/att.py",
        "commit": None,
        "why": "/home/a/att.py is in no git repository",
    }
    known = {"environment": {"git": {"commit": "4bb999b0123"}}}
    unknown = {"environment": known["environment"] | {"code": [loose]}}
    folder.submit(TOY + "grid: {size: [1, 2]}\n", [ok(1.0) | known, ok(1.0) | unknown])
    (note,) = (note for note in report_table(folder).notes if "commit" in note)
    assert "4bb999b (1)" in note and "unknown: att.py is in no git repository (1)" in note


# ---- rows and columns ----------------------------------------------------------------------------


def test_a_parameter_that_the_table_forgets_becomes_a_row(folder: ResultsFolder) -> None:
    folder.submit(
        TOY + GRID + "fixed: {ranks: 2}\n",
        lambda params, repeat: ok(params["size"] + 0.5 * (params["mode"] == "exact")),
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
        folder.submit(load(tmp_path, text, filter=partly), ok(1.0))
    shuffled = load(tmp_path, text, "order={shuffle: 3}", "runs_per_job=5")
    folder.submit(shuffled, ok(1.0), force=False)
    rows = table(folder, rows=["size", "window"], columns=["mode"])
    assert [(row["size"], row["window"]) for row in rows] == [
        ("4", "null"), ("4", "2"), ("16", "null"), ("16", "2"), ("8", "null"), ("8", "2"),
    ]  # fmt: skip
    assert list(rows[0]) == ["size", "window", "fast", "exact"]


def test_numbers_of_several_submissions_are_ascending(folder: ResultsFolder) -> None:
    for sizes in ("[1, 4]", "[2]"):
        folder.submit(TOY + f"grid: {{size: {sizes}}}\n", ok(1.0))
    assert [row["size"] for row in table(folder, rows=["size"])] == ["1", "2", "4"]


def test_what_else_differs_between_the_columns_of_a_row_is_told(folder: ResultsFolder) -> None:
    cases = "cases: [{fixed: {mode: fast, window: 2}}, {fixed: {mode: exact, window: 8}}]\n"
    folder.submit(TOY + "grid: {size: [8, 16]}\n" + cases, ok(1.0))
    made = report_table(folder, rows=["size"], columns=["mode"])
    assert made.keys == [(8,), (16,)]
    assert made.notes[-1].endswith("differ in window")


def test_phases_are_columns_unless_the_table_names_one(folder: ResultsFolder) -> None:
    both = {"samples_ms": {"forward": [1.0], "backward": [2.0]}}
    folder.submit(TOY + "grid: {size: [1, 2]}\n", [{"status": "ok", "measurements": both}, ok(3.0)])
    assert table(folder, rows=["size"]) == [
        {"size": "1", "forward": "1.000", "backward": "2.000"},
        {"size": "2", "forward": "3.000", "backward": "–"},
    ]
    assert table(folder, rows=["size"], phase="backward")[0] == {"size": "1", "time": "2.000"}
    assert list(table(folder, rows=["size"], phase=["backward", "forward"])[0]) == [
        "size", "backward", "forward",
    ]  # fmt: skip


def test_columns_of_booleans_and_null_are_headed_with_their_parameter(
    folder: ResultsFolder,
) -> None:
    grid = "fixed: {size: 2}\ngrid: {mode: [fast], causal: [true, false], window: [null, 1]}\n"
    folder.submit(TOY + grid, ok(1.0))
    columns = {"columns": ["mode", "causal", "window"], "baseline": {"causal": False}}
    (row,) = table(folder, rows=["size"], **columns)
    assert list(row) == [
        "size",
        "fast causal=true window=null",
        "fast causal=true window=null vs causal=false",
        "fast causal=true 1",
        "fast causal=true 1 vs causal=false",
        "fast causal=false window=null",
        "fast causal=false 1",
    ]


# ---- facts that are lists, such as the kernels of a profile --------------------------------------

MIB = 2**20


def kernels(*items: dict[str, Any]) -> Outcome:
    return ok(1.0, facts={"kernels": {"forward": list(items)}})


def test_each_item_is_a_row_and_each_key_a_column(folder: ResultsFolder) -> None:
    both = kernels(
        {"kernel": "gemm", "calls": 60, "time_ms": 1.5, "time_share": 0.55},
        {"kernel": "softmax", "calls": 12, "bytes_moved": 7, "is_ours": True},
    )
    one = kernels({"kernel": "gemm", "time_ms": 3})
    folder.submit(TOY + "grid: {size: [2, 1]}\n", [both, one])
    blank = dict.fromkeys(["calls", "time (ms)", "time share (%)", "bytes_moved", "is_ours"], "")
    first = {"size": "1", "kernel": "gemm", "calls": "60", "time (ms)": "1.500"}
    second = {"size": "1", "kernel": "softmax", "calls": "12", "bytes_moved": "7"}
    assert table(folder, rows=["size"], list="kernels.forward") == [
        {"size": "2", "kernel": "gemm"} | blank | {"time (ms)": "3.000"},
        {"kernel": ""} | blank | first | {"time share (%)": "55.00"},
        {"kernel": ""} | blank | second | {"is_ours": "true"},
    ]


def test_a_run_without_a_list_has_one_row_that_says_why(folder: ResultsFolder) -> None:
    measured = kernels({"kernel": "gemm", "calls": 1})
    outcomes = [measured, failed("oom", memory="host"), ok(1.0), kernels(), None]
    folder.submit(TOY + "grid: {size: [1, 2, 3, 4, 5]}\n", outcomes)
    assert table(folder, rows=["size"], list="kernels.forward") == [
        {"size": "1", "kernel": "gemm", "calls": "1"},
        {"size": "2", "kernel": "OOM (host)", "calls": ""},
        {"size": "3", "kernel": "–", "calls": ""},
        {"size": "4", "kernel": "none", "calls": ""},
        {"size": "5", "kernel": "missing", "calls": ""},
    ]
    only_failed = table(folder, rows=["size"], list="kernels.forward", where="size == 2")
    assert only_failed == [{"size": "2", "forward": "OOM (host)"}]


def test_a_long_list_is_cut_and_the_note_says_so(folder: ResultsFolder) -> None:
    folder.submit(
        TOY + "grid: {size: [3, 12]}\n",
        lambda params, repeat: kernels(*({"kernel": f"k{i}"} for i in range(params["size"]))),
    )
    made = report_table(folder, rows=["size"], list="kernels.forward")
    assert made.columns["size"] == ["3"] * 3 + ["12"] * 10
    assert made.notes == [CPU, "2 processes", "first 10 of up to 12 rows per run"]
    short = report_table(folder, rows=["size"], list="kernels.forward", limit=2)
    assert short.columns["kernel"] == ["k0", "k1", "k0", "k1"]


@pytest.mark.parametrize(
    ("largest", "view", "header", "cells"),
    [
        (512 * MIB, {}, "peak (MiB)", ["0.5000", "512.0"]),
        (2048 * MIB, {}, "peak (GiB)", ["0.0004883", "2.000"]),
        (2048 * MIB, {"unit": "MB"}, "peak (MB)", ["0.5243", "2147"]),
        (2048 * MIB, {"unit": "s"}, "peak (GiB)", ["0.0004883", "2.000"]),
    ],
)
def test_sizes_are_shown_in_one_unit(
    folder: ResultsFolder,
    largest: int,
    view: dict[str, str],
    header: str,
    cells: list[str],
) -> None:
    folder.submit(
        TOY + "fixed: {size: 1}\n", kernels({"peak_bytes": MIB // 2}, {"peak_bytes": largest})
    )
    assert report_table(folder, list="kernels.forward", **view).columns[header] == cells


def test_runs_that_the_rows_do_not_tell_apart_are_told_apart(folder: ResultsFolder) -> None:
    text = TOY + "grid: {size: [1], mode: [fast, exact]}\nrepeats: 2\n"
    folder.submit(text, lambda params, repeat: kernels({"kernel": f"{params['mode']} {repeat}"}))
    assert [
        tuple(row.values()) for row in table(folder, rows=["size"], list="kernels.forward")
    ] == [
        ("fast", "1", "0", "fast 0"),
        ("fast", "1", "1", "fast 1"),
        ("exact", "1", "0", "exact 0"),
        ("exact", "1", "1", "exact 1"),
    ]
