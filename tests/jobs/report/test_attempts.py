"""aggregate.py attempts: every attempt, and why tables show it or not."""

from __future__ import annotations

import csv
import io

import pytest

from jobs.report.attempts import attempts_of
from jobs.results.run_states import observe
from tests.benchmarks import toy
from tests.jobs.report.test_aggregate import cli
from tests.jobs.results_folder import H200, TOY, ResultsFolder, failed, load, ok

GRID = "grid: {size: [1, 2]}\nresources: {gpus_per_node: 1}\n"


def listed(folder: ResultsFolder, *options: str) -> list[dict[str, str]]:
    """Return the rows of the command's CSV output."""
    code, out, err = cli("attempts", folder.path, "--format", "csv", *options)
    assert (code, err) == (0, "")
    return list(csv.DictReader(io.StringIO(out)))


@pytest.fixture
def three(folder: ResultsFolder) -> ResultsFolder:
    """A folder with two ok attempts and then a failure of size 1, and a failure of size 2."""
    sweep = TOY + GRID
    gpu = {"gpus": [{"uuid": "GPU-0123abcd-4567"}]}
    git = {"commit": "4bb999b0123", "dirty": False}
    environment = {"host": "node7", "git": git, "loaded": {"triton": "3.6.0"}}
    one = load(folder.path.parent, sweep, filter="size == 1")
    folder.submit(sweep, [ok(1.0, 3.0, 2.0) | gpu, failed("timeout") | gpu], H200)
    folder.submit(one, ok(5.0) | gpu | {"environment": environment}, H200)
    folder.submit(one, failed("error"), H200)
    return folder


def test_every_attempt_is_listed_with_the_reason(three: ResultsFolder) -> None:
    columns = ("size", "status", "forward (ms)", "gpu", "shown", "why")
    rows = listed(three)
    assert [tuple(row[name] for name in columns) for row in rows] == [
        ("1", "ok", "2.000", "0123abcd", "no", "a later attempt is shown"),
        ("1", "ok", "5.000", "0123abcd", "yes", "latest attempt with status ok"),
        ("1", "error", "", "unknown", "no", "another attempt has status ok"),
        ("2", "timeout", "", "0123abcd", "yes", "latest attempt"),
    ]
    where = ("host", "commit", "device", "torch", "triton")
    assert [rows[1][name] for name in where] == ["node7", "4bb999b", H200, "unknown", "3.6.0"]
    started = [row["started (UTC)"] for row in rows[:3]]
    assert started == sorted(started)


def test_a_condition_selects_attempts_by_their_own_status(three: ResultsFolder) -> None:
    """The run has the status ok, because of another attempt."""
    (row,) = listed(three, "--where", "status == error and size < 2")
    assert row["status"] == "error"
    code, out, err = cli("attempts", three.path, "--where", "size > 5")
    assert (code, out, err) == (0, "", "note: no attempt satisfies 'size > 5'\n")


def test_attempts_in_rounds_have_the_reasons_of_rounds(folder: ResultsFolder) -> None:
    blocks = "blocks: {interleave: [mode], baseline: {mode: fast}, rounds: 2, aa: false}\n"
    grid = "grid: {size: [1], mode: [fast, exact]}\nresources: {gpus_per_node: 1}\n"
    old, new = (ok(2.0) | {"source_hash": code} for code in ("old", "new"))
    folder.submit(TOY + grid, new, H200)
    sweep = TOY + grid + blocks
    folder.submit_rounds(sweep, old)
    folder.submit_rounds(sweep, new, rounds=[0])
    folder.submit_rounds(sweep, new, rounds=[0])
    folder.submit_rounds(sweep, lambda p, _: new if p["mode"] == "exact" else None, rounds=[1])
    rows = listed(folder, "--where", "mode == exact")
    assert [(row["round"], row["shown"], row["why"]) for row in rows] == [
        ("", "no", "not measured in a block"),
        ("0", "no", "its round was executed again"),
        ("0", "no", "its round was executed again"),
        ("0", "yes", "its round is complete"),
        ("1", "no", "other code than that of the latest complete round"),
        ("1", "no", "its round is not complete"),
    ]


def test_attempts_that_no_table_can_show(folder: ResultsFolder) -> None:
    sweep = TOY + "fixed: {size: 1}\nresources: {gpus_per_node: 1}\n"
    folder.submit(sweep, failed("unsupported"), "cpu: Old")
    stranger = ok(1.0) | {"run": "f" * 16}
    older = ok(1.0) | {"run": "e" * 16, "version": 0}
    for outcome in (ok(1.0), stranger, older, stranger | {"checkout": "main"}):
        folder.submit(sweep, outcome, H200)
    reasons = [row["why"] for row in listed(folder) if row["shown"] == "no"]
    assert sorted(reasons) == [
        "all runs are unsupported on this device",
        "code of main, which only compare shows",
        "no submission in the folder has this run",
        "the folder has runs of a newer version of the benchmark",
    ]


def test_a_parameter_may_have_the_name_of_a_column(
    folder: ResultsFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Params(toy.Params):
        host: str = ""
        rounds: int = 0

    monkeypatch.setattr(toy, "Params", Params)
    several = "zip: {host: [a, b], rounds: [7, 8]}\ngrid: {size: [1], mode: [fast, exact]}\n"
    blocks = "blocks: {interleave: [mode], baseline: {mode: fast}, rounds: 2, aa: false}\n"
    folder.submit_rounds(TOY + several + blocks, ok(1.0))
    rows = listed(folder)
    assert {row["host (parameter)"] for row in rows} == {"a", "b"}
    assert {row["host"] for row in rows} == {"unknown"}
    _, out, _ = cli("compare", folder.path, "--format", "csv")
    rows = list(csv.DictReader(line for line in out.splitlines() if not line.startswith("#")))
    assert {(row["rounds (parameter)"], row["rounds"]) for row in rows} == {("7", "2"), ("8", "2")}


def test_an_attempt_has_the_run_of_its_submission(three: ResultsFolder) -> None:
    """Whether it is of older code depends on the run's own code, which no record has."""
    seen = observe(three.path)
    runs = [run for manifest in seen.manifests for run in manifest.runs.values()]
    assert all(attempt.run in runs for attempt in attempts_of(seen))


def test_an_attempt_on_a_device_that_supports_no_run_is_shown_if_there_is_no_other(
    folder: ResultsFolder,
) -> None:
    folder.submit(TOY + GRID, failed("unsupported"), H200)
    assert {(row["shown"], row["why"]) for row in listed(folder)} == {("yes", "latest attempt")}
