"""Sweeps of several benchmarks: a case may name a benchmark other than the sweep's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jobs.sweep.expand import expand
from tests.jobs.harness import call, only_record, records
from tests.jobs.results_folder import ResultsFolder, load, ok, write

TOY, COUNTER = "tests.benchmarks.toy", "tests.benchmarks.counter"
HEAD = f"name: mixed\nbenchmark: {TOY}\n"
MIXED = f"""\
name: mixed
benchmark: {TOY}
fixed: {{causal: true}}
grid: {{size: [1, 2]}}
cases:
  - fixed: {{scale: 2.0}}
  - {{benchmark: {COUNTER}, grid: {{depth: [1, 3]}}}}
"""

Point = tuple[str, dict[str, Any]]


def points(folder: Path, text: str, *overrides: str, **keywords: Any) -> list[Point]:
    """Return the benchmark of each run, and its parameters that differ from their defaults."""
    loaded = load(folder, text, *overrides, **keywords)
    found = []
    for one in expand(loaded).runs:
        defaults = loaded.benchmarks.of(one.benchmark).json_defaults
        changed = {k: v for k, v in one.params.items() if defaults.get(k, ...) != v}
        found.append((one.benchmark.rpartition(".")[2], changed))
    return found


# ---- parameters of the sweep, outside its cases --------------------------------------------------


def test_the_top_is_for_each_case_as_far_as_its_benchmark_has_the_parameter(tmp_path: Path) -> None:
    assert points(tmp_path, MIXED) == [
        ("toy", {"size": 1, "scale": 2.0, "causal": True}),
        ("toy", {"size": 2, "scale": 2.0, "causal": True}),
        ("counter", {"size": 1}),
        ("counter", {"size": 1, "depth": 3}),
        ("counter", {"size": 2}),
        ("counter", {"size": 2, "depth": 3}),
    ]


def test_of_a_zip_at_the_top_a_case_takes_the_lists_that_it_can(tmp_path: Path) -> None:
    text = HEAD + "zip: {size: [4, 5], ranks: [2, 3]}\ncases: [{}, {benchmark: " + COUNTER + "}]\n"
    assert points(tmp_path, text) == [
        ("toy", {"size": 4, "ranks": 2}),
        ("toy", {"size": 5, "ranks": 3}),
        ("counter", {"size": 4}),
        ("counter", {"size": 5}),
    ]


def test_an_override_is_for_every_benchmark_that_has_the_parameter(tmp_path: Path) -> None:
    assert points(tmp_path, MIXED, "size=7", "depth=2") == [
        ("toy", {"size": 7, "scale": 2.0, "causal": True}),
        ("counter", {"size": 7, "depth": 2}),
    ]


def test_a_run_has_the_id_that_it_has_in_a_sweep_of_its_own(tmp_path: Path) -> None:
    text = f"name: alone\nbenchmark: {COUNTER}\ngrid: {{size: [1, 2], depth: [1, 3]}}\n"
    alone = {one.id for one in expand(load(tmp_path, text)).runs}
    mixed = expand(load(tmp_path, MIXED)).runs
    assert {one.id for one in mixed if one.benchmark == COUNTER} == alone


# ---- conditions ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("entry", "toys", "counters"),
    [
        ("{size: 1}", 1, 2),  # both benchmarks have the parameter
        ("{size: [1, 2], depth: 3}", 2, 2),  # only counter has depth
        ("depth > 1", 2, 2),
        ("mode != exact", 0, 0),  # also true for counter, whose mode can never be exact
        (f"{{benchmark: {TOY}, size: 1}}", 1, 4),
        (f"benchmark == '{TOY}' and size == 1", 1, 4),
    ],
)
def test_an_exclude_is_for_the_runs_whose_benchmark_has_all_that_it_names(
    tmp_path: Path, entry: str, toys: int, counters: int
) -> None:
    text = MIXED + f"  - {{fixed: {{size: 9, mode: exact}}}}\nexclude:\n  - {entry}\n"
    found = [name for name, params in points(tmp_path, text) if params["size"] < 9]
    assert (found.count("toy"), found.count("counter")) == (toys, counters)


@pytest.mark.parametrize(
    ("filter", "toys", "counters"),
    [
        ("depth == 1", 0, 2),  # toy has no depth
        ("depth == 1 or size == 2", 1, 3),
        ("not depth == 1", 0, 2),
        ("not (depth == 1 and size == 2)", 1, 3),  # False without depth if size is not 2
        (f"benchmark == '{TOY}' or depth == 3", 2, 2),
    ],
)
def test_a_comparison_neither_keeps_nor_drops_runs_that_lack_its_parameter(
    tmp_path: Path, filter: str, toys: int, counters: int
) -> None:
    found = [name for name, _ in points(tmp_path, MIXED, filter=filter)]
    assert (found.count("toy"), found.count("counter")) == (toys, counters)


def test_a_value_at_the_top_need_not_fit_a_case_that_replaces_it(tmp_path: Path) -> None:
    text = (
        HEAD + "fixed: {size: 1}\ngrid: {mode: [fast, exact]}\nlaunch: {nproc_per_node: $ranks}\n"
    )
    case = f"{{benchmark: {COUNTER}, fixed: {{mode: slow}}, launch: {{nproc_per_node: 2}}}}"
    found = expand(load(tmp_path, text + f"cases: [{{}}, {case}]\n")).runs
    assert [one.params["mode"] for one in found] == ["fast", "exact", "slow"]
    assert [one.shape.nproc_per_node for one in found] == [1, 1, 2]


# ---- after the submission ------------------------------------------------------------------------


TABLES = f"""\
tables:
  - {{name: toys, rows: [size], columns: [scale]}}
  - {{name: counts, benchmark: {COUNTER}, rows: [size], columns: [depth], where: depth > 1}}
"""


def test_both_are_measured_once_and_each_table_is_of_one_benchmark(tmp_path: Path) -> None:
    sweep, out = write(tmp_path, MIXED + "runs_per_job: 100\n" + TABLES), tmp_path / "out"
    plan = call("jobs.submit", sweep, "--dry-run", "--out", out).stdout
    assert f"{TOY} size=2\n" in plan and f"{COUNTER} size=2 depth=3\n" in plan
    done = call("jobs.submit", sweep, "--local", "--out", out)
    assert done.returncode == 0 and "6 ok" in done.stdout, done.stdout
    again = call("jobs.submit", sweep, "--local", "--out", out)
    assert again.returncode == 0 and "skipping 6 runs with a result" in again.stdout
    assert sorted(r.benchmark for r in records(out)) == [COUNTER] * 4 + [TOY] * 2
    shown = call("aggregate", out, "--format", "csv").stdout
    lines = [line for line in shown.splitlines() if line and line[0] != "#"]
    assert lines == ["size,2.0", "1,2.000", "2,4.000", "size,3", "1,3.000", "2,6.000"]
    replayed = only_record(out, depth=3, size=2).run
    assert call("jobs", "replay", replayed, "--in", out).returncode == 0


def test_without_tables_each_benchmark_has_one(folder: ResultsFolder) -> None:
    folder.submit(MIXED, ok(1.0))
    shown = call("aggregate", folder.path, "--format", "csv").stdout
    toys, counts = shown.split(f"# mixed, {COUNTER}")
    assert toys.startswith(f"# mixed, {TOY}") and "size,time" in toys
    assert "size,depth,time" in counts and "2,3,1.000" in counts


def test_compare_names_the_benchmark_of_each_run(tmp_path: Path) -> None:
    before, after = ResultsFolder(tmp_path / "before"), ResultsFolder(tmp_path / "after")
    before.submit(MIXED, ok(1.0))
    after.submit(MIXED, lambda params, repeat: ok(2.0 if "depth" in params else 1.0))
    done = call("aggregate", "compare", before.path, after.path, "--all")
    assert done.returncode == 1 and "4 slower, 2 unsure" in done.stdout
    rows = [line for line in done.stdout.splitlines() if "| 2.000 " in line]
    assert len(rows) == 4 and all(COUNTER in row for row in rows)
