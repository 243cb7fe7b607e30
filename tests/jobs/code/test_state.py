"""The state of code in records: from git or from a carried file."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jobs.code import git
from jobs.code import state as state_module
from jobs.code.measured_files import measured_files
from jobs.code.state import project_state, read_state, repository_root, write_carried
from jobs.run import Run, Shape
from tests.jobs.checkout import BENCHMARK, Checkout, own_repository, project_checkout
from tests.jobs.harness import call, only_record


def test_the_state_of_a_repository(tmp_path: Path) -> None:
    own = Checkout(tmp_path / "own")
    unborn = read_state(own.folder, tmp_path)
    assert unborn.commit is None and "has no commit" in (unborn.why or "")
    commit = own.commit(old="x = 1\n")
    clean = read_state(own.folder, tmp_path)
    assert (clean.commit, clean.dirty, clean.untracked, clean.diff) == (commit, False, (), b"")
    own.write(".git/index.lock", "")  # reading the state takes no lock
    (own.folder / "old.py").touch()
    own.write("logs/out/records.jsonl", "{}")
    own.write("results/records.jsonl", "{}")
    assert read_state(own.folder, own.folder / "results") == clean
    (own.folder / ".git" / "index.lock").unlink()
    own.write("sweep.yaml", "name: own\n")
    known = replace(clean, untracked=("sweep.yaml",))
    assert read_state(own.folder, own.folder / "results") == known
    (own.folder / "sweep.yaml").unlink()
    own.write("old.py", "x = 2\n")
    own.write("folder/new file.py", "y = 3\n")
    state = read_state(own.folder, own.folder / "results")
    assert (state.dirty, state.untracked) == (True, ("folder/new file.py",))
    assert b"+x = 2" in state.diff and b"+y = 3" not in state.diff
    own.git("add", "--intent-to-add", "folder/new file.py")
    assert b"+y = 3" in read_state(own.folder, own.folder / "results").diff
    own.git("reset", "-q")
    own.git("checkout", "-q", "old.py")
    (own.folder / "results" / "saved").mkdir()
    assert repository_root(own.folder / "results" / "saved") == own.folder
    own.git("init", "-q", "results/saved")
    assert repository_root(own.folder / "results" / "saved") == own.folder / "results" / "saved"


def test_git_refuses_is_missing_or_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = Checkout(tmp_path / "own")
    own.commit(old="x = 1\n")

    def why(**environment: str) -> str:
        with monkeypatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            found = read_state(own.folder, tmp_path)
        assert (found.commit, found.dirty, found.source) == (None, "unknown", "unknown")
        return found.why or ""

    no_settings = {"GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null"}
    assert "dubious ownership" in why(GIT_TEST_ASSUME_DIFFERENT_OWNER="1", **no_settings)
    programs = tmp_path / "bin"
    programs.mkdir()
    assert "No such file" in why(PATH=str(programs))
    (programs / "git").write_text("#!/bin/sh\nexec tail -f /dev/null\n")
    (programs / "git").chmod(0o755)
    monkeypatch.setattr(git, "TIMEOUT_S", 0.3)
    assert "did not answer within 0.3 s" in why(PATH=f"{programs}:{os.environ['PATH']}")
    assert "did not answer" in (read_state(own.folder, tmp_path).why or "")  # not asked again


@pytest.mark.slow
def test_a_benchmark_of_another_repository(tmp_path: Path, project: Checkout) -> None:
    """A record has the state of this project and that of the repository of the benchmark."""
    own = own_repository(tmp_path / "own")
    own.write(".env", "PASSWORD=hunter2\n").chmod(0o600)
    out = own.folder / "logs" / "own"
    own.submit("--out", out, project=project.folder)
    found = only_record(out).environment
    state = {"commit": project.git("rev-parse", "HEAD"), "dirty": False}
    assert found["git"] == state | {"untracked": [], "source": "git"}
    (code,) = found["code"]
    assert (code["name"], code["file"], code["repository"]) == ("own.bench", "own/bench.py", "own")
    assert code["commit"] == own.git("rev-parse", "HEAD")
    assert code["tracked"] and not code["dirty"] and code["untracked"] == [".env"]
    assert not (out / "diffs").exists()


@pytest.mark.slow
def test_a_change_while_a_job_runs(tmp_path: Path) -> None:
    """The code that was measured is unknown, so the records have no hash of it, and no commit.

    The next run of the job has imported the old code. The benchmark is in a checkout of this
    project but outside its packages, so it is code of its own.
    """
    own = project_checkout(tmp_path / "sweeps")
    edit = "    from pathlib import Path\n    Path(__file__).open('a').write('EDITED = 1')\n"
    edited = BENCHMARK.replace("    import helper\n", f"    import helper\n{edit}")
    own.write("own/bench.py", edited)
    own.write(
        "own.yaml", "{name: own, benchmark: own.bench, grid: {index: [0, 1]}, runs_per_job: 2}"
    )
    own.commit()
    own.submit("--out", tmp_path / "out", project=own.folder)
    pair = [only_record(tmp_path / "out", index=i) for i in (0, 1)]
    assert [record.source_hash for record in pair] == [None, None]
    environments = [record.environment for record in pair]
    (first,), (second,) = (environment["code"] for environment in environments)
    assert first["commit"] is second["commit"] is None
    assert [environment["git"]["dirty"] for environment in environments] == [False, True]
    assert first["sha256"] != second["sha256"] and first["repository"] == "sweeps"


def test_references_are_measured_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = Checkout(tmp_path / "own")
    flash = own.write("my_kernels/flash.py", "def MyFlash(q, k, v, is_causal): ...")
    monkeypatch.chdir(own.folder)
    reference = "my_kernels/flash.py:MyFlash"
    names = (reference, "my_kernels.flash:MyFlash", "gone.py:X", "systems.dtypes:DTYPES")
    run = Run("id", "attention", 1, {}, Shape(), 1.0, names)
    gone = {"gone.py:X": None}
    assert measured_files(run) == {reference: flash, "my_kernels.flash:MyFlash": flash} | gone


def test_a_carried_state_is_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Checkout(tmp_path / "source")
    source.write("jobs/__init__.py", "")
    commit = source.commit(helper="VALUE = 'old'\n")
    write_carried(source.folder)
    copy = tmp_path / "copy"
    shutil.copytree(source.folder, copy, ignore=shutil.ignore_patterns(".git"))
    monkeypatch.setattr(state_module, "ROOT", copy)

    def entry() -> dict[str, Any]:
        return project_state(tmp_path).entry(tmp_path)

    assert entry() == {"commit": commit, "dirty": False, "untracked": [], "source": "carried"}
    with (copy / "jobs" / "__init__.py").open("a") as file:
        file.write("tampered = 1\n")
    (copy / "helper.py").unlink()
    assert (entry()["commit"], entry()["dirty"]) == (commit, True)
    assert entry()["changed"] == ["helper.py", "jobs/__init__.py"]
    (copy / ".code_state.json").write_text("{")
    assert (entry()["commit"], entry()["dirty"]) == (None, "unknown")
    assert ".code_state.json cannot be read" in entry()["why"]
    (copy / ".code_state.json").unlink()
    around = Checkout(tmp_path)  # another repository around the project
    around.commit(other="")
    around.git("rm", "-q", "--cached", "-r", "copy")
    around.git("commit", "-q", "-m", "forget")
    assert entry()["commit"] is None and "does not track copy/jobs/__init__.py" in entry()["why"]


def test_a_carried_state_has_the_diff(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Checkout(tmp_path / "source")
    commit = source.commit(old="x = 1\n")
    source.write("old.py", "x = 4\n")
    source.write("new.py", "y = 3\n")
    monkeypatch.chdir(source.folder)
    assert ".code_state.json" in call("jobs", "carry").stdout
    before = read_state(source.folder, tmp_path)
    shutil.rmtree(source.folder / ".git")
    after = read_state(source.folder, tmp_path)
    assert (after.commit, after.dirty, after.untracked) == (commit, True, ("new.py",))
    assert after.diff == before.diff and not after.changed
    assert call("jobs", "carry").returncode == 2
