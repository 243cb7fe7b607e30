"""Tables of facts that are lists, such as the kernels of a profile."""

from __future__ import annotations

from typing import Any

import pytest

from tests.jobs.results_folder import (
    CPU,
    TOY,
    Outcome,
    ResultsFolder,
    failed,
    ok,
    report_table,
    table,
)

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
