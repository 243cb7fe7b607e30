"""The state of code in records: from git or from a carried file."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from jobs.code import git
from jobs.code.measured_files import measured_files
from jobs.code.state import read_state, repository_root, write_carried
from jobs.run import Run, Shape
from tests.jobs.checkout import BENCHMARK, Checkout, own_repository, project_checkout
from tests.jobs.harness import facts, only_record, records


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    """A checkout of this project with one commit. Tests must not leave changes in it."""
    return project_checkout(tmp_path_factory.mktemp("project") / "sweeps")


def submit(where: Checkout, out: Path, project: Path, *options: str, **environment: str) -> str:
    arguments = ["jobs.submit", "own.yaml", "--local", "--out", out, *options]
    done = where.python(*arguments, project=project, **environment)
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_the_state_of_a_repository(tmp_path: Path) -> None:
    own = Checkout(tmp_path / "own")
    unborn = read_state(own.folder, tmp_path)
    assert unborn.commit is None and "has no commit" in (unborn.why or "")
    commit = own.commit(old="x = 1\n")
    clean = read_state(own.folder, tmp_path)
    assert (clean.commit, clean.dirty, clean.untracked, clean.diff) == (commit, False, (), b"")
    own.write("logs/out/records.jsonl", "{}")
    own.write("results/records.jsonl", "{}")
    assert read_state(own.folder, own.folder / "results") == clean
    own.write("old.py", "x = 2\n")
    own.write("folder/new file.py", "y = 3\n")
    state = read_state(own.folder, own.folder / "results")
    assert (state.dirty, state.untracked) == (True, ("folder/new file.py",))
    assert b"+x = 2" in state.diff and b"+y = 3" not in state.diff
    assert b"+y = 3" in read_state(own.folder, own.folder / "results", save_untracked=True).diff
    own.git("checkout", "-q", "old.py")
    (own.folder / "results" / "saved").mkdir()
    assert repository_root(own.folder / "results" / "saved") == own.folder
    own.git("init", "-q", "results/saved")
    assert repository_root(own.folder / "results" / "saved") == own.folder / "results" / "saved"


def test_reading_the_state_takes_no_lock(tmp_path: Path) -> None:
    own = Checkout(tmp_path / "own")
    own.commit(old="x = 1\n")
    own.write(".git/index.lock", "")
    (own.folder / "old.py").touch()  # git would like to refresh its index
    assert read_state(own.folder, tmp_path).dirty is False


def test_git_refuses_is_missing_or_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = Checkout(tmp_path / "own")
    own.commit(old="x = 1\n")
    with monkeypatch.context() as other_owner:
        other_owner.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
        other_owner.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
        other_owner.setenv("GIT_CONFIG_SYSTEM", "/dev/null")
        refused = read_state(own.folder, tmp_path)
    assert (refused.commit, refused.dirty, refused.source) == (None, "unknown", "unknown")
    assert "dubious ownership" in (refused.why or "") and "\n" not in (refused.why or "")
    programs = tmp_path / "bin"
    programs.mkdir()
    with monkeypatch.context() as without:
        without.setenv("PATH", str(programs))
        missing = read_state(own.folder, tmp_path)
    assert missing.dirty == "unknown" and "No such file" in (missing.why or "")
    (programs / "git").write_text("#!/bin/sh\nexec tail -f /dev/null\n")
    (programs / "git").chmod(0o755)
    monkeypatch.setattr(git, "TIMEOUT_S", 0.3)
    with monkeypatch.context() as hanging:
        hanging.setenv("PATH", str(programs), prepend=":")
        hung = read_state(own.folder, tmp_path)
    assert hung.dirty == "unknown" and "did not answer within 0.3 s" in (hung.why or "")
    assert read_state(own.folder, tmp_path).why == hung.why  # not asked again


@pytest.mark.slow
def test_a_benchmark_of_another_repository(tmp_path: Path, project: Checkout) -> None:
    """A record has the state of this project and that of the repository of the benchmark."""
    own = own_repository(tmp_path / "own", "0, 1")
    secret = own.write(".env", "PASSWORD=hunter2\n")
    secret.chmod(0o600)
    out = own.folder / "logs" / "own"
    submit(own, out, project.folder, "--filter", "index == 0")
    first = only_record(out, index=0)
    head = project.git("rev-parse", "HEAD")
    assert first.environment["git"] == {
        "commit": head, "dirty": False, "untracked": [], "source": "git"
    }  # fmt: skip
    (code,) = first.environment["code"]
    assert (code["name"], code["file"], code["repository"]) == ("own.bench", "own/bench.py", "own")
    assert code["commit"] == own.git("rev-parse", "HEAD")
    assert code["tracked"] and code["dirty"] and code["untracked"] == [".env"]
    assert not (out / "diffs").exists()

    own.write("helper.py", "VALUE = 'edited'\n")
    commit = own.git("rev-parse", "HEAD")
    told = submit(own, out, project.folder)
    assert "note: 1 result of older code measured again; --keep-stale keeps it" in told
    (code,) = only_record(out, index=1).environment["code"]
    assert (code["commit"], code["dirty"]) == (commit, True)
    diff = (out / "diffs" / f"{code['diff']}.diff").read_text()
    assert "+VALUE = 'edited'" in diff and "hunter2" not in diff
    own.write("own/bench.py", BENCHMARK + "# changed\n")
    assert "skipping 2 runs with a result" in submit(own, out, project.folder)
    submit(own, out, project.folder, "--force", "--save-untracked", "--filter", "index == 0")
    (code,) = records(out)[-1].environment["code"]
    assert "hunter2" in (out / "diffs" / f"{code['diff']}.diff").read_text()


@pytest.mark.slow
def test_a_change_while_a_job_runs(tmp_path: Path) -> None:
    """The next run of the job has imported the old code, and its record says so.

    The code that was measured is unknown, so the records have no hash of it.
    """
    own = project_checkout(tmp_path / "sweeps")
    edit = "    from pathlib import Path\n    Path(__file__).open('a').write('EDITED = 1')\n"
    edited = BENCHMARK.replace("    import helper\n", f"    import helper\n{edit}")
    own.write("own/bench.py", edited)
    own.write(
        "own.yaml", "{name: own, benchmark: own.bench, grid: {index: [0, 1]}, runs_per_job: 2}"
    )
    own.commit()
    submit(own, tmp_path / "out", own.folder)
    pair = [only_record(tmp_path / "out", index=i) for i in (0, 1)]
    assert [record.source_hash for record in pair] == [None, None]
    environments = [record.environment for record in pair]
    (first,), (second,) = (environment["code"] for environment in environments)
    for before, after in ((first, second), [e["git"] for e in environments]):
        assert (before["dirty"], after["dirty"]) == (False, True)
        assert after["changed_since_job_start"] and "changed_since_job_start" not in before
    assert first["sha256"] != second["sha256"]


@pytest.mark.slow
def test_references_are_measured_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = Checkout(tmp_path / "own")
    flash = own.write("my_kernels/flash.py", "def MyFlash(q, k, v, is_causal): ...")
    monkeypatch.chdir(own.folder)
    reference = "my_kernels/flash.py:MyFlash"
    names = (reference, "my_kernels.flash:MyFlash", "gone.py:X", "systems.dtypes:DTYPES")
    run = Run("id", "attention", 1, {}, Shape(), 1.0, names)
    gone = {"gone.py:X": None}
    assert measured_files(run) == {reference: flash, "my_kernels.flash:MyFlash": flash} | gone
    sweep = {
        "name": "own",
        "benchmark": "attention",
        "fixed": {"implementation": reference, "head_dim": 64},
    }
    own.write("own.yaml", json.dumps(sweep | {"grid": {"seq_len": [128], "dtype": ["fp32"]}}))
    done = own.python("jobs.submit", "own.yaml", "--snapshot", "--dry-run")
    assert done.returncode == 2, done.stdout
    assert (
        f"got '{reference}' in an untracked file; run: git add my_kernels/flash.py" in done.stdout
    )
    own.git("add", "my_kernels")
    assert own.python("jobs.submit", "own.yaml", "--snapshot", "--dry-run").returncode == 0


@pytest.fixture
def carried(tmp_path: Path, project: Checkout) -> Path:
    """A copy of the project without .git, with the file that `jobs carry` wrote."""
    done = project.python("jobs", "carry", project=project.folder)
    assert done.returncode == 0 and ".code_state.json" in done.stdout, done.stdout
    copy = tmp_path / "copy"
    shutil.copytree(project.folder, copy, ignore=shutil.ignore_patterns(".git", "logs"))
    (project.folder / ".code_state.json").unlink()
    return copy


def state_in(folder: Path) -> dict[str, Any]:
    """Return the state that a process in a copy of the project finds."""
    code = "import json, pathlib as p; from jobs.code.state import project_state as s; "
    code += "o = p.Path('out'); print(json.dumps(s(o).entry(o)))"
    (folder / "tell.py").write_text(code)
    here = Checkout.__new__(Checkout)  # not a repository
    here.folder = folder
    done = here.python("tell", project=folder)
    assert done.returncode == 0, done.stdout
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def test_a_carried_state_is_verified(carried: Path, project: Checkout) -> None:
    commit = project.git("rev-parse", "HEAD")
    clean = state_in(carried)
    assert clean == {"commit": commit, "dirty": False, "untracked": [], "source": "carried"}
    with (carried / "systems" / "benchmark.py").open("a") as file:
        file.write("# tampered\n")
    (carried / "helper.py").unlink()
    tampered = state_in(carried)
    assert (tampered["commit"], tampered["dirty"]) == (commit, True)
    assert tampered["changed"] == ["helper.py", "systems/benchmark.py"]


def test_a_carried_state_has_the_diff(tmp_path: Path) -> None:
    own = Checkout(tmp_path / "own")
    commit = own.commit(old="x = 1\n")
    own.write("old.py", "x = 2 # \udcff".encode(errors="surrogateescape").decode("latin-1"))
    (own.folder / "new.py").touch()
    assert own.python("jobs", "carry").returncode == 0
    before = read_state(own.folder, tmp_path)
    shutil.rmtree(own.folder / ".git")
    after = read_state(own.folder, tmp_path)
    assert (after.commit, after.dirty, after.untracked) == (commit, True, ("new.py",))
    assert after.diff == before.diff and not after.changed
    refused = own.python("jobs", "carry")
    assert refused.returncode == 2 and "must be in a git repository" in refused.stdout


def test_a_copy_with_a_damaged_carried_state_has_no_commit(carried: Path) -> None:
    (carried / ".code_state.json").write_text("{")
    nothing = state_in(carried)
    assert (nothing["commit"], nothing["dirty"], nothing["source"]) == (None, "unknown", "unknown")
    assert ".code_state.json cannot be read" in nothing["why"]


def test_another_repository_around_the_project(tmp_path: Path, carried: Path) -> None:
    (carried / ".code_state.json").unlink()
    around = Checkout(tmp_path)
    around.write("other.py", "")
    around.git("add", "other.py")
    around.git("commit", "-q", "-m", "first")
    state = state_in(carried)
    assert state["commit"] is None and "does not track copy/jobs/__init__.py" in state["why"]


def test_facts_of_the_checkout(tmp_path: Path, project: Checkout) -> None:
    """A benchmark in a checkout of this project but outside its packages is code of its own."""
    out = tmp_path / "out"
    submit(project, out, project.folder)
    record = only_record(out)
    assert facts(record)["code"] == "old"
    (code,) = record.environment["code"]
    assert code["repository"] == "sweeps" and code["commit"] == record.environment["git"]["commit"]


def test_a_carried_state_explains_a_copy_in_an_older_repository(tmp_path: Path) -> None:
    """All files equal those of the carried commit, although git shows changes."""
    source, copy = Checkout(tmp_path / "source"), Checkout(tmp_path / "copy")
    source.write("old.py", "x = 1\n")
    source.write("gone.py", "w = 0\n")
    first = source.commit()
    copy.git("pull", "-q", str(source.folder), "HEAD")
    source.write("old.py", "x = 2\n")
    source.write("new.py", "y = 3\n")
    (source.folder / "gone.py").unlink()
    second = source.commit()
    (source.folder / ".git" / "info" / "exclude").write_text(".code_state.json\n")
    write_carried(source.folder)
    for name in ("old.py", "new.py", ".code_state.json"):
        shutil.copy(source.folder / name, copy.folder)
    (copy.folder / "gone.py").unlink()

    def state(where: Checkout) -> tuple[str | None, object]:
        found = read_state(where.folder, tmp_path / "results")
        return found.commit, found.dirty

    assert state(copy) == (second, False)
    copy.write("other.py", "was not carried")
    assert state(copy) == (first, True)
    (copy.folder / "other.py").unlink()
    copy.write("old.py", "x = 3\n")
    assert state(copy) == (first, True)

    source.write("kernel.py", "z = 4\n")
    assert state(source) == (second, True)  # an untracked file that was not carried
    third = source.commit()
    assert state(source) == (third, False)
    source.write("kernel.py", "z = 5\n")
    assert state(source) == (third, True)
