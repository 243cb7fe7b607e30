"""Sources of a sweep other than its own file: base files, the cluster file, overrides.

tests/jobs/bad_input has the errors in them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs.sweep.expand import expand
from jobs.sweep.load import load_sweep
from tests.jobs.results_folder import GRID, TOY, errors, load, params_of, write

# ---- base ----------------------------------------------------------------------------------------


def test_base_may_be_a_sweep_of_the_project(tmp_path: Path) -> None:
    """A file of this name beside the sweep has precedence, as on the command line."""
    path = write(tmp_path, "base: sweeps/cpu/flash.yaml\nname: own\n", "own.yaml")
    assert load_sweep(path).sweep.benchmark == "attention"
    (tmp_path / "sweeps" / "cpu").mkdir(parents=True)
    write(tmp_path / "sweeps" / "cpu", TOY + "fixed: {size: 1}\n", "flash.yaml")
    assert load_sweep(path).sweep.benchmark == "tests.benchmarks.toy"


def test_base_is_inherited_through_a_chain(tmp_path: Path) -> None:
    """A file names its base relative to itself."""
    inner = tmp_path / "inner"
    inner.mkdir()
    write(
        tmp_path,
        """\
        benchmark: tests.benchmarks.toy
        fixed: {scale: 2.0, causal: true}
        grid: {size: [1, 2], ranks: [1]}
        resources: {nodes: 2, mem_gb: 4}
        timeout_s: 7
        """,
        "grand.yaml",
    )
    write(inner, "base: ../grand.yaml\nname: parent\nfixed: {scale: 3.0}\n", "parent.yaml")
    child = "base: inner/parent.yaml\nname: child\nresources: {nodes: 1}\ngrid: {ranks: [1, 2]}\n"
    loaded = load(tmp_path, child)
    assert loaded.sweep.name == "child"
    assert loaded.sweep.timeout_s == 7
    assert loaded.sweep.resources.model_dump(exclude_unset=True) == {"nodes": 1, "mem_gb": 4}
    assert params_of(loaded, "size", "ranks", "scale", "causal") == [
        (1, 1, 3.0, True), (1, 2, 3.0, True), (2, 1, 3.0, True), (2, 2, 3.0, True),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("child", "expected"),
    [
        ("fixed: {size: 5}", [(5, 1), (5, 2)]),
        ("zip: {size: [5, 6], ranks: [7, 8]}", [(5, 7), (6, 8)]),
        ("zip: {ranks: [7, 8]}\nfixed: {size: 5}", [(5, 7), (5, 8)]),
    ],
)
def test_a_childs_parameter_replaces_the_bases_whatever_the_section(
    tmp_path: Path, child: str, expected: list[tuple[int, int]]
) -> None:
    write(tmp_path, TOY + "grid: {size: [1, 2], ranks: [1, 2]}\n", "base.yaml")
    loaded = load(tmp_path, f"base: base.yaml\n{child}\n")
    assert sorted(params_of(loaded, "size", "ranks")) == expected


# ---- the cluster's file --------------------------------------------------------------------------


def test_cluster_file_lies_beneath_the_sweep(tmp_path: Path) -> None:
    cluster = write(
        tmp_path,
        "slurm: {partition: a100, account: me}\nresources: {mem_gb: 8, cpus_per_task: 2}\n",
        "cluster.yaml",
    )
    text = TOY + "fixed: {size: 1}\nslurm: {partition: h100}\nresources: {cpus_per_task: 4}\n"
    sweep = load(tmp_path, text, "slurm.account=you", cluster=cluster).sweep
    assert (sweep.slurm.partition, sweep.slurm.account) == ("h100", "you")
    assert (sweep.resources.mem_gb, sweep.resources.cpus_per_task) == (8, 4)
    empty = write(tmp_path, "# nothing yet\n", "empty.yaml")
    assert load(tmp_path, text, cluster=empty).sweep.slurm.partition == "h100"


# ---- overrides -----------------------------------------------------------------------------------


def test_an_override_sets_a_parameter(tmp_path: Path) -> None:
    loaded = load(tmp_path, TOY + GRID, "size=[7,8]")
    expected = [(7, "fast"), (7, "exact"), (8, "fast"), (8, "exact")]
    assert params_of(loaded, "size", "mode") == expected
    assert params_of(load(tmp_path, TOY + GRID, "grid.size=[9]"), "size") == [(9,), (9,)]


def test_an_override_reaches_into_cases_and_zips(tmp_path: Path) -> None:
    text = """\
        name: toy
        benchmark: tests.benchmarks.toy
        zip: {size: [1, 2], ranks: [3, 4]}
        cases:
          - fixed: {mode: fast, scale: 2.0}
          - grid: {scale: [3.0, 4.0]}
        """
    names = ("size", "ranks", "scale")
    assert set(params_of(load(tmp_path, text, "scale=9.5"), *names)) == {(1, 3, 9.5), (2, 4, 9.5)}
    assert set(params_of(load(tmp_path, text, "ranks=5"), *names)) == {
        (1, 5, 2.0), (2, 5, 2.0), (1, 5, 3.0), (2, 5, 3.0), (1, 5, 4.0), (2, 5, 4.0),
    }  # fmt: skip


def test_an_override_of_resources_is_also_for_cases_that_set_them(tmp_path: Path) -> None:
    text = (
        TOY + "resources: {nodes: 2}\ncases:\n- {fixed: {size: 1}, resources: {mem_gb: 8}}\n"
        "- {fixed: {size: 2}, timeout_s: 9, resources: {mem_gb: 16, cpus_per_task: 3}}\n"
    )
    loaded = load(tmp_path, text, "resources.mem_gb=4", "timeout_s=7")
    runs = expand(loaded).runs
    assert [run.shape.mem_gb for run in runs] == [4, 4]
    assert [run.shape.cpus_per_task for run in runs] == [None, 3]
    assert [run.timeout_s for run in runs] == [7, 7]


def test_an_override_of_the_benchmark_brings_its_parameters(tmp_path: Path) -> None:
    text = "name: a\nbenchmark: attention\nfixed: {size: 1}\n"
    loaded = load(tmp_path, text, "mode=exact", "benchmark=tests.benchmarks.toy")
    assert loaded.benchmarks.own.name == "tests.benchmarks.toy"
    assert params_of(loaded, "size", "mode") == [(1, "exact")]


def test_an_error_in_a_mapping_names_the_override_of_its_value(tmp_path: Path) -> None:
    sweep = write(tmp_path, TOY + GRID)
    baseline = "blocks.baseline.mode=fats"
    (problem,) = errors(sweep, "blocks.interleave=[mode]", baseline)
    assert problem.startswith(f"command line: {baseline}: ")


def test_the_option_rounds_wins_over_overrides(tmp_path: Path) -> None:
    blocks = "blocks={interleave: [mode], baseline: {mode: fast}, rounds: 4}"
    loaded = load(tmp_path, TOY + GRID, blocks, rounds="7")
    assert loaded.sweep.blocks is not None and loaded.sweep.blocks.rounds == 7
