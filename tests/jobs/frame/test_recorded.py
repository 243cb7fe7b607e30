"""Commit, host, GPU and versions of records, and notes on results of several of them."""

from __future__ import annotations

from typing import Any

import pytest

from jobs.frame.recorded import recorded_value
from jobs.results.run_states import observe
from tests.jobs.results_folder import (
    CPU,
    H200,
    TOY,
    Outcome,
    ResultsFolder,
    ok,
    plot_of,
    report_table,
)

OLD, NEW = "f" * 40, "4bb999b" + "0" * 33
ONE = TOY + "fixed: {size: 1}\n"
TWO = TOY + "grid: {size: [1, 2]}\n"
GPUS = TWO + "resources: {gpus_per_node: 1}\n"


def at(commit: str, dirty: bool = False, diff: str = "", **more: Any) -> Outcome:
    """Return an outcome whose record has a commit of this project."""
    git = {"commit": commit, "dirty": dirty, "diff": diff}
    return ok(1.0) | {"environment": {"git": git} | more}


def external(name: str, commit: str | None) -> dict[str, Any]:
    return {"name": name, "repository": commit and "my_repo", "commit": commit, "dirty": False}


GIT = {"commit": "a" * 40, "dirty": False}
TWO_FILES = [external("a.py:A", OLD), external("b.py:B", NEW)]
PACKAGES = {"torch": "2.12.1", "triton": "3.6.0"}


@pytest.mark.parametrize(
    ("name", "environment", "shown"),
    [
        ("commit", {"git": {"commit": NEW, "dirty": True, "diff": "1" * 16}}, "4bb999b-dirty+1111"),
        ("commit", {"git": {"commit": NEW, "dirty": "unknown"}}, "4bb999b-dirty?"),
        ("commit", {"git": {"commit": NEW, "dirty": None}}, "4bb999b"),
        ("commit", {"git": {"commit": None}}, "unknown"),
        ("commit", {}, "unknown"),
        # Code outside this project has the commit of its own repository, or none.
        ("commit", {"git": GIT, "code": TWO_FILES}, NEW[:7]),
        ("commit", {"git": GIT, "code": [external("loose.py:Fn", None)]}, "unknown"),
        # the version that was loaded, or else installed
        ("torch", {"packages": PACKAGES, "loaded": {"torch": "2.11.0+cu130"}}, "2.11.0"),
        ("triton", {"packages": PACKAGES, "loaded": {"torch": "2.11.0", "triton": None}}, "3.6.0"),
        ("torch", {"packages": PACKAGES, "loaded": {}}, "2.12.1"),
        ("host", {"host": "n1"}, "n1"),
        ("host", {}, "unknown"),
    ],
)
def test_what_a_record_says(folder: ResultsFolder, name: str, environment: Any, shown: str) -> None:
    folder.submit(ONE, ok(1.0) | {"environment": environment})
    (record,) = observe(folder.path).records
    assert recorded_value(record, name) == shown


def test_the_gpus_of_a_record(folder: ResultsFolder) -> None:
    gpus = [{"uuid": "GPU-6fb37310-dec1-0ecf-ade0"}, {"uuid": "GPU-A6A95123"}]
    folder.submit(GPUS, [ok(1.0) | {"gpus": gpus}, ok(1.0)], H200)
    folder.submit(ONE, ok(1.0))
    shown = {recorded_value(record, "gpu") for record in observe(folder.path).records}
    assert shown == {"6fb37310+a6a95123", "unknown", "–"}


def test_a_plot_of_several_commits_says_so(folder: ResultsFolder) -> None:
    folder.submit(TWO, [at(NEW), at(OLD)])
    title = plot_of(folder, "p", x="size").get_suptitle()
    assert title == f"p\n{CPU}. commit {NEW[:7]} (1), {OLD[:7]} (1)"


def test_a_table_names_its_commits_and_versions(folder: ResultsFolder) -> None:
    """Two sets of uncommitted changes are two commits. Runs that loaded no package do not count."""
    states: list[dict[str, Any]] = [
        {"dirty": True, "diff": "1" * 16, "loaded": {"torch": "2.11.0+cu130"}},
        {"dirty": True, "diff": "2" * 16, "loaded": {"torch": "2.14.1", "untested": "torch 2.14"}},
        {"code": [external("m:F", OLD)]},
        {"loaded": {}},
        {"code": [external("in_this_project:F", NEW)]},
    ]
    sweep = TOY + "grid: {size: [1, 2, 3, 4, 5]}\n"
    folder.submit(sweep, [at(NEW, **state) for state in states])
    (note,) = (n for n in report_table(folder, rows=["size"]).notes if "commit" in n)
    assert note == (
        "5 processes; commit 4bb999b (2), 4bb999b-dirty+1111 (1), 4bb999b-dirty+2222 (1); "
        "commit of my_repo fffffff; torch 2.11.0 (1), 2.14.1 (1); untested torch 2.14"
    )
    (one,) = (n for n in report_table(folder, rows=["size"], where="size == 4").notes if "com" in n)
    assert one == "1 process; commit 4bb999b"
