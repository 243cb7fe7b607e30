"""The option --where of `status`, `retry` and `cancel`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jobs.results.cancelled import read_cancelled
from jobs.results.unreadable import BadLine
from tests.jobs.harness import (
    PATIENCE_S,
    ROOT,
    Fifo,
    call,
    parent_of,
    records,
    start,
    statuses,
    write_sweep,
)
from tests.jobs.results_folder import TOY, ResultsFolder, failed, load, ok

MIXED = """
name: mixed
benchmark: tests.benchmarks.toy
repeats: 2
runs_per_job: 100
cases:
- grid: {size: [1, 2], mode: [fast, exact]}
- benchmark: tests.benchmarks.counter
  fixed: {size: 2, depth: 3}
"""


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with 10 tasks: size 2 failed, and the second repeat of size 1 has no record."""
    path = tmp_path_factory.mktemp("mixed")
    folder = ResultsFolder(path / "out")
    folder.submit(
        load(path, MIXED),
        lambda params, repeat: (
            failed("error") if params["size"] == 2 else None if repeat else ok(1.0)
        ),
    )
    return folder.path


@pytest.mark.parametrize(
    ("where", "count", "code"),
    [
        ("status == ok", 2, 0),
        ("run.status in [error, missing] and repeat == 0", 3, 1),
        ("depth > 2 or status == ok", 4, 1),  # toy has no depth
        ("benchmark == 'tests.benchmarks.counter'", 2, 1),
        ("size > 9", 0, 0),
    ],
)
def test_status_shows_and_counts_only_matching_runs(
    mixed: Path, where: str, count: int, code: int
) -> None:
    done = call("jobs", "status", mixed, "--where", where)
    assert done.returncode == code and f"sweep mixed, {count} of 10 runs" in done.stdout
    seen = json.loads(call("jobs", "status", mixed, "--where", where, "--json").stdout)
    assert len(seen["tasks"]) == sum(seen["counts"].values()) == count


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("status == oks", "status: got 'oks'; did you mean 'ok'?"),
        ("benchmark == counter", "benchmark: got 'counter'"),
        ("status < 3", "which have no order"),
        ("repeat == zero", "repeat: got 'zero', expected an integer"),
    ],
)
def test_a_wrong_condition_is_one_line(mixed: Path, where: str, words: str) -> None:
    done = call("jobs", "status", mixed, "--where", where)
    assert done.returncode == 2 and done.stdout.count("\n") == 1, done.stdout
    assert done.stdout.startswith("--where: ") and words in done.stdout


def test_a_benchmark_that_no_longer_imports_has_conditions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: ResultsFolder
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "vanishing").mkdir()
    toy = Path("tests/benchmarks/toy.py").read_text()
    (tmp_path / "vanishing" / "toy.py").write_text(toy)
    folder.submit(
        load(tmp_path, "{name: a, benchmark: vanishing.toy, grid: {size: [1, 2]}}"),
        lambda *_: ok(1.0),
    )
    (tmp_path / "vanishing" / "toy.py").write_text("1 / 0")
    monkeypatch.delitem(sys.modules, "vanishing.toy")
    done = call("jobs", "status", folder.path, "--where", "size == 2 and status == ok")
    assert done.returncode == 0 and "1 of 2 runs" in done.stdout


def test_runs_of_code_that_no_longer_exists_can_be_selected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: ResultsFolder
) -> None:
    monkeypatch.chdir(tmp_path)
    mine = tmp_path / "mine.py"
    mine.write_text("def attend(q, k, v, *, causal): ...\n")
    text = "{name: a, benchmark: attention, fixed: {seq_len: 16, head_dim: 8}, grid: "
    implementations = "{implementation: ['mine.py:attend', sdpa]}}"
    folder.submit(load(tmp_path, text + implementations), lambda *_: ok(1.0))
    mine.unlink()
    monkeypatch.chdir(ROOT)
    done = call("jobs", "status", folder.path, "--where", "implementation == 'mine.py:attend'")
    assert done.returncode == 0 and "1 of 2 runs" in done.stdout, done.stdout
    done = call("jobs", "status", folder.path, "--where", "implementation == 'other.py:attend'")
    assert done.returncode == 2 and "there is no file 'other.py'" in done.stdout


@pytest.mark.slow
def test_cancel_stops_jobs_and_skips_runs_of_a_local_queue(tmp_path: Path) -> None:
    fifo = Fifo(tmp_path / "fifo")
    cases = [
        {"what": "wait", "path": str(fifo.path)},
        *({"what": "ok", "tag": i} for i in range(1, 6)),
    ]
    sweep, out = write_sweep(tmp_path, cases, runs_per_job=2), tmp_path / "out"

    def cancel(where: str) -> str:
        done = call("jobs", "cancel", out, "--where", where)
        assert done.returncode == 0, done.stdout
        return done.stdout.removesuffix("\n").removeprefix("cancelled ").replace(f" of {out}", "")

    queue = start("jobs.submit", sweep, "--local", "--out", out)
    fifo.pids()
    assert cancel("what == wait") == "0 jobs; 1 executing run of jobs that continue left to end"
    assert cancel("tag in [1, 2, 3, 4]") == "1 job; 2 runs of jobs that continue will be skipped"
    assert [statuses(out)[f"ok{tag}"] for tag in range(1, 6)] == ["cancelled"] * 4 + ["queued"]
    assert statuses(out)["wait0"] == "running"
    assert cancel("tag == 0") == "1 job"  # no other run of its job is live
    told, _ = queue.communicate(timeout=PATIENCE_S)
    assert queue.returncode == 1 and "exit code" not in told, told
    assert "2 cancelled, 1 ok" in told and "3 runs cancelled before the start" in told
    ended = {f"{r.params['what']}{r.params['tag']}": r.status for r in records(out)}
    assert ended == {"wait0": "cancelled", "ok4": "cancelled", "ok5": "ok"}
    assert sorted(statuses(out).values()) == ["cancelled"] * 5 + ["ok"]

    fifo.release()
    again = call("jobs.submit", sweep, "--debug", "--out", out)
    assert again.returncode == 0 and "5 ok" in again.stdout
    assert set(statuses(out).values()) == {"ok"}


@pytest.mark.slow
def test_cancel_stops_a_run_that_its_restarted_worker_executes_again(tmp_path: Path) -> None:
    """The run has a record with the status cancelled, of the worker before."""
    fifo = Fifo(tmp_path / "fifo")
    sweep = write_sweep(tmp_path, [{"what": "wait", "path": str(fifo.path)}])
    out = tmp_path / "out"
    queue = start("jobs.submit", sweep, "--local", "--out", out)
    waiting, _ = fifo.pids()
    os.kill(parent_of(parent_of(waiting)), signal.SIGTERM)  # as a user ends the worker
    fifo.pids()  # the queue has started it again
    assert "cancelled 1 job" in call("jobs", "cancel", out, "--where", "what == wait").stdout
    queue.communicate(timeout=PATIENCE_S)
    assert [record.status for record in records(out)] == ["cancelled"] * 2


def test_cancel_in_a_debug_submission(tmp_path: Path) -> None:
    """The runs share a process, which skips the runs that match. It stops if all of them do."""
    fifo = Fifo(tmp_path / "fifo")
    cases = [{"what": "wait", "path": str(fifo.path)}, {"what": "ok"}]
    sweep, out = write_sweep(tmp_path, cases, runs_per_job=1), tmp_path / "out"
    submitted = start("jobs.submit", sweep, "--debug", "--out", out)
    fifo.pids()
    assert "1 executing run of" in call("jobs", "cancel", out, "--where", "what == wait").stdout
    assert "1 run of jobs that" in call("jobs", "cancel", out, "--where", "what == ok").stdout
    assert statuses(out) == {"wait0": "running", "ok0": "cancelled"}
    assert "cancelled 1 job" in call("jobs", "cancel", out, "--where", "what == wait").stdout
    submitted.communicate(timeout=PATIENCE_S)
    assert set(statuses(out).values()) <= {"cancelled", "killed"}


def test_lists_of_cancelled_runs_of_processes_at_the_same_time_are_merged(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from jobs.results.cancelled import add_cancelled\n"
    )
    code += "sys.stdin.readline()\n"
    code += "for i in range(20): add_cancelled(Path(sys.argv[1]), [(sys.argv[2], i)])"
    added = [
        subprocess.Popen(
            [sys.executable, "-c", code, tmp_path, name], cwd=ROOT, stdin=subprocess.PIPE
        )
        for name in "ab"
    ]
    for process in added:
        assert process.stdin is not None
        process.stdin.close()
    assert [process.wait(PATIENCE_S) for process in added] == [0] * 2
    assert read_cancelled(tmp_path) == {(n, i) for n in "ab" for i in range(20)}
    (tmp_path / "cancelled" / "0.json").write_text("[")  # a damaged list does not hide the others
    bad: list[BadLine] = []
    assert len(read_cancelled(tmp_path, bad)) == 40
    assert [line.path.name for line in bad] == ["0.json"]


@pytest.mark.slow
def test_retry_of_some_runs(tmp_path: Path) -> None:
    cases = [{"what": "ok"}, *({"what": "raises", "tag": tag} for tag in (1, 2)), {"what": "nan"}]
    sweep, out = write_sweep(tmp_path, cases), tmp_path / "out"
    assert call("jobs.submit", sweep, "--local", "--out", out).returncode == 1
    count = len(records(out))
    dry = call("jobs", "retry", out, "--where", "tag == 2", "--dry-run")
    assert dry.returncode == 0 and len(records(out)) == count
    assert "to run    1 (" in dry.stdout and dry.stdout.count("what=") == 1
    done = call("jobs", "retry", out, "--where", "tag > 1")
    assert done.returncode == 1 and f"retrying 1 run of {out} (1 error), from subm" in done.stdout
    assert [r.params["tag"] for r in records(out)[count:]] == [2]
    done = call("jobs", "retry", out, "--where", "status == ok")
    assert f"nothing to retry in {out}: no run failed, is missing or is oom and" in done.stdout
    call("jobs", "retry", out)  # a full retry still finds all failed runs
    assert sorted(r.params["tag"] for r in records(out)[count + 1 :]) == [0, 1, 2]


def test_status_lists_failures_first_and_few_runs_with_the_same_reason(tmp_path: Path) -> None:
    folder = ResultsFolder(tmp_path / "out")
    loaded = load(tmp_path, TOY + f"grid: {{size: {list(range(1, 41))}}}\n")
    folder.submit(loaded, lambda params, repeat: failed("error") if params["size"] == 40 else None)
    lines = call("jobs", "status", folder.path).stdout.splitlines()
    listed = [line.split()[0] for line in lines if "size=" in line]
    assert listed == ["error", *["missing"] * 5]
    assert "… and 34 more; --all" in lines[-1]
    folder.submit(loaded, lambda params, repeat: failed("error", "E" * max(10, params["size"])))
    lines = call("jobs", "status", folder.path).stdout.splitlines()
    # Of the 10 runs with the same reason 5 are listed, of the others as many as fit.
    assert sum("size=" in line for line in lines) == 30 and "… and 10 more; --all" in lines[-1]
    assert sum(" EEEEEEEEEE: " in line for line in lines) == 5
    chosen = call("jobs", "status", folder.path, "--where", "size >= 39").stdout
    assert chosen.count("size=") == 2
