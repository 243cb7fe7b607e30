"""Broken results folders and benchmarks are named with what is wrong, without a traceback."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path

import pytest

from jobs.results.heartbeat import runs_here
from jobs.results.manifest import Executor, write_handles
from jobs.results.slurm_job import SlurmJob
from tests.jobs.checkout import own_repository
from tests.jobs.harness import (
    ROOT,
    call,
    records,
    run_as_nobody,
    run_python,
    write_submission,
    write_sweep,
)

# ---- a results folder ----------------------------------------------------------------------------


def commands_on(out: Path, sweep: Path, identity: str) -> list[tuple[str | Path, ...]]:
    """Return commands that read a results folder and change nothing, as all runs are ok."""
    return [
        ("jobs", "status", out),
        ("jobs", "logs", identity, "--in", out),
        ("jobs", "cancel", out),
        ("jobs", "retry", out),
        ("aggregate", out),
        ("aggregate", "attempts", out),
        ("aggregate", "export", out),
        ("jobs.submit", sweep, "--local", "--out", out),
    ]


@pytest.mark.slow
def test_what_cannot_be_read_is_named_and_changes_nothing_else(tmp_path: Path) -> None:
    """Every command shows the other submissions, and exits as if the damaged one did not exist."""
    sweep, out = write_sweep(tmp_path, [{"what": "ok"}]), tmp_path / "out"
    assert call("jobs.submit", sweep, "--local", "--out", out).returncode == 0
    (record,) = records(out)
    commands = commands_on(out, sweep, record.run)
    before = [call(*command) for command in commands]
    assert [done.returncode for done in before] == [0] * len(commands)
    path = write_submission(sweep, out).path
    handles = path / "handles.json"
    damages: list[tuple[Path, str, str]] = [
        (path / "manifest.json", "{", "Invalid JSON"),
        (handles, '{"0": {"slurm": "--me"}}', "0.SlurmJob.slurm: "),
        (out / "records" / "x.jsonl", '{"run": "\udcff"}', "Invalid JSON: invalid unicode"),
        (out / "records" / "\udcff.jsonl", "{}", "the key 'run' is missing"),
    ]
    for file, text, words in damages:
        whole = file.read_bytes() if file.exists() else None
        file.write_bytes(os.fsencode(text))
        for command, undamaged in zip(commands, before, strict=True):
            done = call(*command)
            shown = os.fsencode(file).decode(errors="replace")
            assert done.returncode == undamaged.returncode, done.stdout
            assert f"note: {shown}" in done.stdout and words in done.stdout, (command, done.stdout)
            assert done.stdout.count("note: ") == 1, done.stdout
        file.unlink()
        if whole is not None:
            file.write_bytes(whole)


@pytest.mark.parametrize("name", ["jobs/0/state.json", "jobs/0/worker_end.json", "ended.json"])
def test_files_on_the_state_of_jobs_that_cannot_be_read_are_named(
    tmp_path: Path, name: str
) -> None:
    executor = Executor.slurm if name == "ended.json" else Executor.local
    sweep, out = write_sweep(tmp_path, [{"what": "ok"}]), tmp_path / "out"
    submission = write_submission(sweep, out, executor)
    if executor is Executor.slurm:
        submission.handles[0] = SlurmJob("1_0")
        write_handles(submission)
    file = submission.path / name
    with runs_here(submission) if "state" in name else nullcontext():
        for text in ("[]", '{"0": 1, "deaths": 1}', "{"):
            file.write_text(text)
            done = call("jobs", "status", out, environment={"PATH": ""})  # without Slurm
            assert f"note: {file}: skipped: " in done.stdout, done.stdout


@pytest.mark.parametrize("name", ["records", "submissions"])
@pytest.mark.parametrize("what", ["file", "dangling link"])
def test_a_folder_that_cannot_be_read_is_an_error(tmp_path: Path, name: str, what: str) -> None:
    """Measured runs must not be shown as missing, or be measured again."""
    sweep, out = write_sweep(tmp_path, [{"what": "ok"}]), tmp_path / "out"
    (identity,) = write_submission(sweep, out).runs
    folder = out / name
    if folder.exists():
        folder.rename(tmp_path / "moved")
    if what == "file":
        folder.touch()
    else:
        folder.symlink_to(tmp_path / "unmounted")
    for command in commands_on(out, sweep, identity):
        done = call(*command)
        assert done.returncode == 2, done.stdout
        assert done.stdout.startswith(f"{folder} cannot be read: "), done.stdout
        assert done.stdout.count("\n") == 1, done.stdout


def test_a_folder_of_another_user_is_an_error(folder_of_all: Path) -> None:
    """Path.glob would find no records in it."""
    out = folder_of_all / "out"
    write_submission(write_sweep(folder_of_all, [{"what": "ok"}]), out)
    (out / "records").mkdir(mode=0o700)
    done = run_as_nobody("status", out)
    assert done.returncode == 2, done.stdout
    assert done.stdout == f"{out}/records cannot be read: Permission denied\n"


# ---- a benchmark ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("installed", "text"), [(True, "import torch"), (False, "from torch import nn")]
)
def test_a_benchmark_that_imports_torch_is_an_error_of_the_sweep(
    tmp_path: Path, text: str, installed: bool
) -> None:
    """The error is the same with and without torch, which is not imported."""
    (tmp_path / "odd").mkdir()
    if installed:
        text = f"try:\n    {text}\nexcept ImportError:\n    pass"
    (tmp_path / "odd" / "heavy.py").write_text(text)
    (tmp_path / "odd" / "light.py").write_text("from odd.heavy import x")
    code = "import sys; from jobs.cli.main import main\n"
    code += "" if installed else "sys.modules['torch'] = None  # as if it were not installed\n"
    code += "try:\n    main('submit', 'submit')\nfinally:\n    print(sys.modules.get('torch'))"
    environment = {"PYTHONPATH": os.pathsep.join(map(str, (tmp_path, ROOT)))}
    sweep = tmp_path / "sweep.yaml"
    for name in ("heavy", "light"):
        sweep.write_text(f"name: a\nbenchmark: odd.{name}\n")
        done = run_python("-c", code, sweep, environment=environment)
        assert done.returncode == 2 and done.stdout.endswith("\nNone\n"), done.stdout
        where = f"{tmp_path}/odd/heavy.py:{1 + installed}"
        why = f"benchmark 'odd.{name}' imports torch at the top of {where}: "
        assert done.stdout.startswith(f"{sweep}:2:12: {why}")


@pytest.mark.slow
def test_a_retry_whose_benchmark_no_longer_imports_says_so(tmp_path: Path) -> None:
    own = own_repository(tmp_path / "own")
    own.commit(helper="raise OSError('broken')\n")
    assert own.call("jobs.submit", "own.yaml", "--local", "--out", "out").returncode == 1
    (record,) = records(own.folder / "out")
    own.write("own/bench.py", "1 / 0\n")
    for command in (["retry", "out"], ["replay", record.run, "--in", "out"]):
        done = own.call("jobs", *command)
        assert done.returncode == 2 and done.stdout.count("\n") == 1, done.stdout
        assert "'own.bench' cannot be imported: ZeroDivisionError" in done.stdout
