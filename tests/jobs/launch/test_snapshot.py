"""With --snapshot, jobs run a copy of the code. test_slurm.py edits the code while jobs wait."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.jobs.checkout import BENCHMARK, Checkout, own_repository, project_checkout
from tests.jobs.harness import facts, records, umask

# Returns the paths of what it imports.
IMPORTS = BENCHMARK.replace("import helper\n", "import helper, jobs, systems\n").replace(
    "helper.VALUE,", "helper.VALUE, 'files': [m.__file__ for m in (helper, jobs, systems)],"
)


def assert_modes(out: Path, umask: int) -> None:
    """Check that results take the umask, but only the user can write to code and lists of jobs."""
    assert {"records", "submissions", "snapshots"} <= {path.name for path in out.iterdir()}
    for path in out.rglob("*"):
        own = path.relative_to(out).parts
        if own[2:3] == ("sweeps",):  # as in the repository
            continue
        is_list = own[0] == "submissions" and (path.is_dir() or path.suffix in (".json", ""))
        is_own = own[1:] and (own[0] == "snapshots" or is_list)
        given = umask | 0o022 if is_own else umask
        full = 0o777 if path.is_dir() or path.name == "run.sh" else 0o666
        assert oct(path.stat().st_mode & 0o777) == oct(full & ~given), path


@pytest.mark.slow
def test_local_jobs_run_from_a_snapshot(tmp_path: Path, project: Checkout) -> None:
    """Nobody else reads the results of a user whose umask is 077."""
    own = own_repository(tmp_path / "own")
    own.write("run.sh", "#!/bin/sh\n").chmod(0o755)
    own.write("own/bench.py", IMPORTS)
    commit = own.commit()
    own.write("helper.py", "VALUE = 'uncommitted'\n")
    out = own.folder / "logs" / "own"
    with umask(0o077):
        own.submit("--out", out, "--snapshot", project=project.folder)
    assert_modes(out, 0o077)
    (snapshot,) = (out / "snapshots").iterdir()
    (record,) = records(out)
    assert facts(record)["code"] == "uncommitted"
    names = ("own/helper.py", "sweeps/jobs/__init__.py", "sweeps/systems/__init__.py")
    assert facts(record)["files"] == [str(snapshot / name) for name in names]
    (code,) = record.environment["code"]
    assert code["snapshot"] == f"snapshots/{snapshot.name}"
    assert (code["commit"], code["dirty"], code["file"]) == (commit, True, "own/bench.py")
    assert "+VALUE = 'uncommitted'" in (out / "diffs" / f"{code['diff']}.diff").read_text()
    git = record.environment["git"]
    assert git["snapshot"] == code["snapshot"] and git["dirty"] is False
    assert git["commit"] == project.git("rev-parse", "HEAD")


@pytest.mark.slow
def test_this_project_is_cloned_inside_the_repository_of_the_user(tmp_path: Path) -> None:
    own = own_repository(tmp_path / "own")
    own.write("own/bench.py", IMPORTS)
    own.commit()
    project = project_checkout(own.folder / "tools/sweeps")
    own.submit("--out", tmp_path / "out", "--snapshot", project=project.folder)
    (snapshot,) = (tmp_path / "out" / "snapshots").iterdir()
    (record,) = records(tmp_path / "out")
    names = ("own/helper.py", "sweeps/jobs/__init__.py", "sweeps/systems/__init__.py")
    assert facts(record)["files"] == [str(snapshot / name) for name in names]


@pytest.mark.slow
def test_equal_content_is_copied_once(tmp_path: Path, project: Checkout) -> None:
    """Results are for the group if the umask is 002, but the group cannot change the code."""
    own = own_repository(tmp_path / "own")
    out = tmp_path / "out"
    again = ["--out", out, "--snapshot", "--force"]
    with umask(0o002):
        own.submit(*again, project=project.folder)
    assert_modes(out, 0o002)
    own.git("commit", "-q", "--allow-empty", "-m", "same content")
    own.submit(*again, project=project.folder)
    assert len(list((out / "snapshots").iterdir())) == 1
    first, second = (record.environment["code"][0]["commit"] for record in records(out))
    assert [second, first] == own.git("rev-list", "HEAD").splitlines()
    own.write("helper.py", "VALUE = 'new'\n")
    own.submit(*again, project=project.folder)
    assert len(list((out / "snapshots").iterdir())) == 2


@pytest.mark.slow
def test_retry_takes_a_snapshot_again(tmp_path: Path) -> None:
    own = own_repository(tmp_path / "own")
    own.commit(helper="raise OSError('broken')\n")
    out = tmp_path / "out"
    submit = ["jobs.submit", "own.yaml", "--out", out, "--local", "--snapshot"]
    assert own.call(*submit).returncode == 1
    own.write("helper.py", "VALUE = 'mended'\n")
    assert own.call("jobs", "retry", out).returncode == 0
    last = records(out)[-1]
    assert facts(last)["code"] == "mended" and last.environment["code"][0]["snapshot"]


def test_code_that_git_does_not_track_is_told(tmp_path: Path) -> None:
    own = own_repository(tmp_path / "own")
    own.git("rm", "-q", "--cached", "own/bench.py")
    command = ("jobs.submit", "own.yaml", "--local", "--dry-run")
    assert "run: git add -N -f own/bench.py" in own.call(*command).stdout
    own.git("add", "-N", "own/bench.py")
    assert "git add" not in own.call(*command).stdout


@pytest.mark.slow
def test_what_cannot_be_in_a_snapshot(tmp_path: Path, project: Checkout) -> None:
    own = own_repository(tmp_path / "own")
    out = tmp_path / "refused"

    def told(where: Checkout, code: int, *options: str) -> str:
        done = where.call("jobs.submit", "own.yaml", "--out", out, "--snapshot", *options)
        assert done.returncode == code, done.stdout
        assert not out.exists()
        return done.stdout

    own.git("rm", "-q", "--cached", "own/bench.py")
    assert "run: git add own/bench.py" in told(own, 2, "--local")
    nowhere = own_repository(tmp_path / "nowhere")
    shutil.rmtree(nowhere.folder / ".git")
    assert "own/bench.py is not in the snapshot" in told(nowhere, 0, "--dry-run")
    bare = tmp_path / "bare"
    for name in ("jobs", "systems"):
        shutil.copytree(project.folder / name, bare / name)
    arguments = ["jobs.submit", "own.yaml", "--out", out, "--snapshot", "--local"]
    done = nowhere.python(*arguments, project=bare)
    assert done.returncode == 2 and "--snapshot requires a git repository" in done.stdout
    assert not out.exists()
