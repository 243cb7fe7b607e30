"""Commit, host, GPU and versions in tables, and notes on results of several of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jobs.frame.results import list_results
from jobs.report.plots import draw_plot, plot_figure
from jobs.report.views import select
from jobs.results.run_states import observe
from jobs.sweep.views import Plot
from tests.benchmarks import toy
from tests.jobs.report.test_aggregate import cli
from tests.jobs.results_folder import (
    CPU,
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

OLD, NEW = "f" * 40, "4bb999b" + "0" * 33
ONE = TOY + "fixed: {size: 1}\n"
TWO = TOY + "grid: {size: [1, 2]}\n"
GPUS = TWO + "resources: {gpus_per_node: 1}\n"


def at(commit: str | None, outcome: Outcome, dirty: Any = False, **more: Any) -> Outcome:
    """Return an outcome whose record has a commit of this project."""
    git = {"commit": commit, "dirty": dirty} | {k: more.pop(k) for k in ("diff",) if k in more}
    return (outcome or {}) | {"environment": {"git": git} | more}


def external(name: str, commit: str | None, repository: str | None = "my_repo") -> dict[str, Any]:
    return {"name": name, "repository": repository, "commit": commit, "dirty": False}


# ---- rows and columns ----------------------------------------------------------------------------


def test_one_run_at_two_commits_is_two_results(tmp_path: Path, folder: ResultsFolder) -> None:
    """Commits are in the order in which they were measured, and the newer is not preferred."""
    folder.submit(load(tmp_path, TWO), lambda params, _: at(OLD, ok(4.0), params["size"] == 2))
    folder.submit(load(tmp_path, ONE), lambda *_: at(NEW, ok(1.0)))
    assert table(folder, rows=["size"], columns=["commit"]) == [
        {"size": "1", "fffffff": "4.000", "fffffff-dirty": "", "4bb999b": "1.000"},
        {"size": "2", "fffffff": "", "fffffff-dirty": "4.000", "4bb999b": ""},
    ]
    assert [row["time"] for row in table(folder, rows=["size"])] == ["1.000", "4.000"]
    (row,) = table(
        folder,
        rows=["size"],
        columns=["commit"],
        where="size == 1",
        baseline={"commit": "fffffff"},
    )
    assert row["4bb999b vs fffffff"] == "4.00x"


def test_a_failure_at_a_commit_does_not_hide_behind_a_success_at_another(
    tmp_path: Path, folder: ResultsFolder
) -> None:
    folder.submit(load(tmp_path, ONE), lambda *_: at(OLD, ok(4.0)))
    folder.submit(load(tmp_path, ONE), lambda *_: at(NEW, failed("wrong")))
    assert table(folder, rows=["commit"]) == [
        {"commit": "fffffff", "time": "4.000"},
        {"commit": "4bb999b", "time": "wrong"},
    ]


def test_a_run_without_a_record_has_no_commit(tmp_path: Path, folder: ResultsFolder) -> None:
    loaded = load(tmp_path, TWO)
    folder.submit(loaded, lambda params, _: at(NEW, ok(1.0)) if params["size"] == 1 else None)
    shown_as = {"commit": "4bb999b", "gpu": "–"} | dict.fromkeys(("host", "torch"), "unknown")
    for name, shown in shown_as.items():
        assert table(folder, rows=["size", name]) == [
            {"size": "1", name: shown, "time": "1.000"},
            {"size": "2", name: "no record", "time": "missing"},
        ]


@pytest.mark.parametrize(
    ("git", "shown"),
    [
        ({"commit": NEW, "dirty": True, "diff": "1" * 16}, "4bb999b-dirty+1111"),
        ({"commit": NEW, "dirty": "unknown"}, "4bb999b-dirty?"),
        ({"commit": NEW, "dirty": None}, "4bb999b"),
        ({"commit": "4bb999bd3642"}, "4bb999b"),
        ({"commit": None, "dirty": None}, "unknown"),
        (None, "unknown"),
    ],
)
def test_a_commit_is_shown_in_short_with_its_changes(
    tmp_path: Path, folder: ResultsFolder, git: Any, shown: str
) -> None:
    environment = {} if git is None else {"git": git}
    folder.submit(load(tmp_path, ONE), lambda *_: ok(1.0) | {"environment": environment})
    assert table(folder, rows=["commit"]) == [{"commit": shown, "time": "1.000"}]


def test_the_commit_is_that_of_the_measured_code(tmp_path: Path, folder: ResultsFolder) -> None:
    """Code outside this project has the commit of its own repository, or none."""
    code = {
        1: [external("base.py:Base", OLD), external("my.py:Fn", NEW)],
        2: [external("loose.py:Fn", None, repository=None)],
        3: [],
    }
    loaded = load(tmp_path, TOY + "grid: {size: [1, 2, 3]}\n")
    folder.submit(loaded, lambda params, _: at("a" * 40, ok(1.0), code=code[params["size"]]))
    rows = table(folder, rows=["size", "commit"])
    assert [row["commit"] for row in rows] == ["4bb999b", "unknown", "aaaaaaa"]


def test_versions_are_those_that_were_loaded_or_else_installed(
    tmp_path: Path, folder: ResultsFolder
) -> None:
    """They are in the order in which they were measured."""
    packages = {"torch": "2.12.1", "triton": "3.6.0"}
    for loaded in (
        {"torch": "2.9.1"},
        {"torch": "2.11.0+cu130", "triton": None},
        {"torch": "2.11.0+cu130", "triton": "3.7.1"},
        {},
    ):
        more = {"environment": {"packages": packages, "loaded": loaded}}
        folder.submit(load(tmp_path, ONE), lambda *_, more=more: ok(1.0) | more)
    rows = table(folder, rows=["torch", "triton"])
    assert [(row["torch"], row["triton"]) for row in rows] == [
        ("2.9.1", "3.6.0"),
        ("2.11.0", "3.6.0"),
        ("2.11.0", "3.7.1"),
        ("2.12.1", "3.6.0"),
    ]
    where = "run.torch == '2.11.0' and triton in ['3.7.1']"
    (row,) = table(folder, rows=["size"], columns=["torch"], where=where)
    assert row == {"size": "1", "2.11.0": "1.000"}


def test_hosts_and_gpus_are_told_apart(tmp_path: Path, folder: ResultsFolder) -> None:
    uuids = ["GPU-6fb37310-dec1-0ecf-ade0", "GPU-A6A95123"]
    for host, chosen, ms in (("n1", uuids[:1], 1.0), ("n2", uuids[:1], 2.0), ("n2", uuids, 3.0)):
        more = {"gpus": [{"uuid": uuid} for uuid in chosen], "environment": {"host": host}}
        loaded = load(tmp_path, GPUS.replace("[1, 2]", "[1]"))
        folder.submit(loaded, lambda *_, ms=ms, more=more: ok(ms) | more, H200)
    assert table(folder, rows=["host"], columns=["gpu"]) == [
        {"host": "n1", "6fb37310": "1.000", "6fb37310+a6a95123": ""},
        {"host": "n2", "6fb37310": "2.000", "6fb37310+a6a95123": "3.000"},
    ]
    assert table(folder, rows=["host"]) == [
        {"host": "n1", "time": "1.000"},
        {"host": "n2", "time": "3.000"},
    ]


def test_a_gpu_run_whose_gpu_is_not_known_is_no_cpu_run(
    tmp_path: Path, folder: ResultsFolder
) -> None:
    folder.submit(load(tmp_path, GPUS), lambda *_: ok(1.0), H200)
    assert {row["gpu"] for row in table(folder, rows=["size", "gpu"])} == {"unknown"}


def test_list_tables_and_plots_know_commits(tmp_path: Path, folder: ResultsFolder) -> None:
    for commit, name in ((OLD, "slow"), (NEW, "fast")):
        facts = {"kernels": [{"kernel": name}]}
        loaded = load(tmp_path, ONE)
        folder.submit(loaded, lambda *_, c=commit, f=facts: at(c, ok(1.0, facts=f)))
    assert table(folder, rows=["commit"], list="kernels") == [
        {"commit": "fffffff", "kernel": "slow"},
        {"commit": "4bb999b", "kernel": "fast"},
    ]
    seen = observe(folder.path)
    for names in ({"x": "commit"}, {"x": "size", "series": ["commit"]}):
        plot = Plot(name="p", where="host == unknown", **names)
        assert draw_plot(select(seen, plot, list_results(seen)), tmp_path) == tmp_path / "p.png"


def test_a_plot_of_several_commits_says_so(tmp_path: Path, folder: ResultsFolder) -> None:
    loaded = load(tmp_path, TWO)
    folder.submit(loaded, lambda params, _: at(NEW if params["size"] == 1 else OLD, ok(1.0)))
    seen = observe(folder.path)
    figure = plot_figure(select(seen, Plot(name="p", x="size"), list_results(seen)), "p")
    assert (
        figure is not None
        and figure.get_suptitle() == f"p\n{CPU}. commit {NEW[:7]} (1), {OLD[:7]} (1)"
    )


def test_a_parameter_named_commit_wins(
    tmp_path: Path, folder: ResultsFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Params(toy.Params):
        commit: int = 0

    monkeypatch.setattr(toy, "Params", Params)
    text = ONE + "grid: {commit: [8, 7]}\ntables: [{name: t, rows: [commit], where: commit > 7}]\n"
    for commit in (OLD, NEW):
        folder.submit(load(tmp_path, text), lambda *_, c=commit: at(c, ok(1.0)))
    assert table(folder, rows=["commit"]) == [
        {"commit": "8", "time": "1.000"},
        {"commit": "7", "time": "1.000"},
    ]
    assert "|        8 |  1.000 |" in cli(folder.path)[1]


# ---- where ---------------------------------------------------------------------------------------


def test_where_chooses_results_by_commit_and_device(tmp_path: Path, folder: ResultsFolder) -> None:
    folder.submit(load(tmp_path, GPUS), lambda *_: at(OLD, ok(4.0)), H200)
    folder.submit(load(tmp_path, GPUS), lambda *_: at(NEW, ok(1.0)), "NVIDIA A100")
    assert table(folder, rows=["size"], where="commit == fffffff and size > 1") == [
        {"size": "2", "time": "4.000"}
    ]
    assert table(folder, rows=["size"], where="device == 'NVIDIA A100' and size == 1") == [
        {"size": "1", "time": "1.000"}
    ]


def test_results_that_where_leaves_at_several_commits_get_rows_by_commit(
    tmp_path: Path, folder: ResultsFolder
) -> None:
    for commit, ms in ((OLD, 4.0), (NEW, 1.0), ("a" * 40, 2.0)):
        folder.submit(load(tmp_path, ONE), lambda *_, c=commit, ms=ms: at(c, ok(ms)))
    assert table(folder, rows=["size"], where="commit in [fffffff, '4bb999b']") == [
        {"commit": "fffffff", "size": "1", "time": "4.000"},
        {"commit": "4bb999b", "size": "1", "time": "1.000"},
    ]


# ---- notes ---------------------------------------------------------------------------------------


def test_a_table_names_its_commits_and_versions(tmp_path: Path, folder: ResultsFolder) -> None:
    """Two sets of uncommitted changes are two commits. Runs that loaded no package do not count."""
    states: list[dict[str, Any]] = [
        {"dirty": True, "diff": "1" * 16, "loaded": {"torch": "2.11.0+cu130"}},
        {"dirty": True, "diff": "2" * 16, "loaded": {"torch": "2.14.1", "untested": "torch 2.14"}},
        {"code": [external("m:F", OLD)]},
        {"dirty": False, "loaded": {}},
    ]
    loaded = load(tmp_path, TOY + "grid: {size: [1, 2, 3, 4]}\n")
    folder.submit(loaded, lambda params, _: at(NEW, ok(1.0), **states[params["size"] - 1]))
    (note,) = (n for n in report_table(folder, rows=["size"]).notes if "commit" in n)
    assert note == (
        "4 processes; commit 4bb999b-dirty+1111 (1), 4bb999b-dirty+2222 (1), fffffff (1) and 1 "
        "more; torch 2.11.0 (1), 2.14.1 (1); untested torch 2.14"
    )
    (one,) = (n for n in report_table(folder, rows=["size"], where="size == 4").notes if "com" in n)
    assert one == "1 process; commit 4bb999b"
