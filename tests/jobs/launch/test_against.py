"""`--against`: runs with another checkout of the code, in the same blocks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from jobs.errors import CommandError
from jobs.launch.against import OtherCode, find
from jobs.results.manifest import read_manifests
from jobs.results.record import Record
from tests.jobs.checkout import Checkout, own_repository, project_checkout
from tests.jobs.harness import call, facts, records


def codes(found: list[Record]) -> list[tuple[str, str]]:
    """Return the checkout of each record, and the value that its code returned."""
    return [(record.checkout, facts(record)["code"]) for record in found]


@pytest.fixture
def own(tmp_path: Path) -> Checkout:
    """A repository with a benchmark that returned "old" in the first commit and returns "new"."""
    own = own_repository(tmp_path / "own")
    own.commit(helper="VALUE = 'new'\n")
    return own


@pytest.mark.slow
def test_both_versions_of_the_code_are_measured_in_turn(own: Checkout) -> None:
    """Tables show the present code, and status shows both. The same command resumes."""
    old = own.git("rev-parse", "HEAD~1")
    told = own.submit("--against", "HEAD~1", "blocks.rounds=2")
    assert " compare logs/own" in told and "[2/6]" in told and "round 1/2 after" in told, told
    found = records(own.folder / "logs/own")
    before, now = (old[:10], "old"), ("", "new")
    assert codes(found) == [before, now, *[before, now, before] * 2]
    assert {(r.block.baseline, r.checkout) for r in found if r.block} == {
        (True, old[:10]),
        (False, ""),
    }
    states = found[0].environment["checkout"], found[1].environment["code"][0]
    assert [state["commit"] for state in states] == [old, own.git("rev-parse", "HEAD")]
    assert [state["dirty"] for state in states] == [False, False]

    out = own.folder / "logs/own"
    shown = call("aggregate", out, "--format", "csv")
    rows = [line for line in shown.stdout.splitlines() if line.startswith("1.000")]
    assert f"the runs of {old[:10]} are not in tables" in shown.stderr and len(rows) == 1, shown
    status = json.loads(call("jobs", "status", out, "--json").stdout)
    assert status["counts"] == {"ok": 6}
    assert "nothing to submit" in own.submit("--against", "HEAD~1", "blocks.rounds=2")
    own.submit("--against", "HEAD~1", "blocks.rounds=3")
    assert [r.block.trial for r in records(out)[8:] if r.block] == [True] + [False] * 3
    assert {r.block.round for r in records(out)[8:] if r.block} == {2}


@pytest.mark.slow
def test_after_an_edit_that_was_taken_back_the_earlier_rounds_count(own: Checkout) -> None:
    command = ("--against", "HEAD~1", "blocks.rounds=1")
    helper = own.folder / "helper.py"
    for value in ("new", "edited", "new"):
        helper.write_text(f"VALUE = {value!r}\n")
        own.submit(*command)
    found = records(own.folder / "logs/own")
    assert [code for name, code in codes(found) if not name] == ["new", "edited"]
    frame = own.call("jobs", "export", "logs/own").stdout
    assert '"new"' in frame and "edited" not in frame


@pytest.mark.slow
def test_ranks_run_the_code_of_a_folder_with_changes(own: Checkout, tmp_path: Path) -> None:
    """They are started for each run of a round, of which only the first ones include the check."""
    own.write("own.yaml", "{name: own, benchmark: own.bench, launch: {nproc_per_node: 2}}")
    other = tmp_path / "other"
    shutil.copytree(own.folder, other)
    (other / "helper.py").write_text("VALUE = 'theirs'\n")
    own.submit("--against", str(other), "blocks={rounds: 1, sustained: {seconds: 1}}")
    (manifest,) = read_manifests(own.folder / "logs/own")
    assert [block.sustained == block.runs for block in manifest.blocks] == [True]
    found = records(own.folder / "logs/own")
    assert [code for _, code in codes(found)] == ["theirs", "new", "theirs"]
    assert [json.loads(facts(r)["round"])["check"] for r in found] == [True, True, False]
    assert found[0].environment["checkout"]["dirty"] is True
    assert found[0].checkout.startswith("other-")


@pytest.mark.slow
def test_another_checkout_of_this_project(tmp_path: Path) -> None:
    """The launcher of the checkout is not used, only the measured code."""
    project = project_checkout(tmp_path / "project")
    (project.folder / "jobs" / "worker" / "run_process.py").write_text("raise SystemExit('old')\n")
    project.commit()
    project.git("checkout", "-q", "HEAD~1", "--", "jobs")
    project.commit(helper="VALUE = 'new'\n")
    project.submit("--against", "HEAD~1", "blocks.rounds=1", project=project.folder)
    found = records(project.folder / "logs/own")
    assert [code for _, code in codes(found)] == ["old", "new", "old"]
    states = [record.environment["git"]["commit"] for record in found]
    assert states[0] != states[1] == project.git("rev-parse", "HEAD")
    (copy,) = (project.folder / "logs/own/snapshots").iterdir()
    assert copy.name.startswith(f"{found[0].checkout}-")
    assert (copy / "systems").is_dir() and not (copy / "jobs").exists()


def files(other: OtherCode) -> set[str]:
    """Return the names of the files in a copy."""
    found = (path for path in other.folder.rglob("*") if path.is_file())
    return {str(path.relative_to(other.folder)) for path in found}


def test_what_is_copied_under_which_name(
    own: Checkout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit is the same copy from a revision or a folder. Results are not in it."""
    own.write(".gitignore", "/ignored\n")
    own.write("logs/out/records.jsonl", "{}\n")
    own.write("own/logs/__init__.py", "")
    commit = own.commit()
    own.write("ignored", "")
    theirs = tmp_path / "theirs"
    shutil.copytree(own.folder, theirs)
    monkeypatch.chdir(own.folder)
    revision, folder = find("HEAD"), find(str(theirs))
    assert revision.name == folder.name == commit[:10] and revision.stored == folder.stored
    for name in ("new.py", "new.json"):
        (theirs / name).touch()
    edited = find(str(theirs))
    assert edited.stored == edited.name == f"theirs-{edited.name[-8:]}"
    kept = {".gitignore", "helper.py", "own.yaml", "own/bench.py", "own/logs/__init__.py"}
    assert files(revision) == files(folder) == kept and files(edited) == {*kept, "new.py"}
    shutil.rmtree(theirs / ".git")
    (theirs / "__pycache__").mkdir()
    (theirs / "__pycache__/helper.pyc").touch()
    assert files(find(str(theirs))) == {*kept, "new.py", "new.json", "ignored"}


KILLS_ITS_SERVER_ONCE = """\
import os, pathlib, signal, time
VALUE = "new"
killed = pathlib.Path(__file__).with_name("killed")
if not killed.exists():
    killed.touch()
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(60)
"""


@pytest.mark.slow
def test_a_run_that_ends_its_server_fails_no_run_of_the_other_code(own: Checkout) -> None:
    own.commit(helper=KILLS_ITS_SERVER_ONCE)
    own.call("jobs.submit", "own.yaml", "--local", "--against", "HEAD~2", "blocks.rounds=1")
    found = [(bool(r.checkout), r.status) for r in records(own.folder / "logs/own")]
    assert found == [(True, "ok"), (False, "killed"), (True, "ok")]


def test_the_baseline_of_the_sweep_may_be_filtered_out(own: Checkout) -> None:
    """Each run is compared with itself in the other checkout."""
    blocks = "blocks: {interleave: [index], baseline: {index: 0}}"
    own.write("own.yaml", f"{{name: own, benchmark: own.bench, grid: {{index: [0, 1]}}, {blocks}}}")
    options = ("--local", "--dry-run", "--against", "HEAD~1", "--where", "index == 1")
    told = own.call("jobs.submit", "own.yaml", *options).stdout
    assert "1 block of 5 rounds" in told, told


# ---- what is refused -----------------------------------------------------------------------------


def refusal(own: Checkout, *arguments: str) -> str:
    done = own.call("jobs.submit", "own.yaml", *arguments)
    assert done.returncode == 2, done.stdout
    return done.stdout


def test_wrong_values(own: Checkout) -> None:
    told = refusal(own, "--local", "--against=no-such-revision")
    assert "a git revision or a folder" in told and "'no-such-revision'" in told
    assert "another checkout" in refusal(own, "--local", "--against=.")
    assert "repeats must be 1" in refusal(own, "--dry-run", "--against=HEAD", "repeats=4")
    for given in ("--upload-pack=x", ""):
        assert "--against" in refusal(own, "--local", f"--against={given}")
    assert not (own.folder / "logs").exists()


def test_a_file_that_would_be_the_same_in_both(own: Checkout, tmp_path: Path) -> None:
    """It is not in the repository whose versions are compared."""
    for name in ("attention.py", "../beside/attention.py"):
        own.write(name, "def mine(q, k, v, is_causal): return q\n")
    own.commit()
    sizes = "seq_len: 16, head_dim: 16, dtype: fp32"
    (tmp_path / "link").symlink_to(own.folder)
    linked = str(tmp_path / "link/attention.py")  # an absolute path is the same in both
    beside = str(tmp_path / "beside/attention.py")
    for given in ("attention.py", linked, beside, "../beside/attention.py"):
        fixed = f"{{implementation: '{given}:mine', {sizes}}}"
        own.write("own.yaml", f"{{name: own, benchmark: attention, fixed: {fixed}}}")
        done = own.call("jobs.submit", "own.yaml", "--dry-run", "--against", "HEAD")
        refused = "both would measure the same" in done.stdout and given in done.stdout
        assert refused == (given != "attention.py") == (done.returncode == 2), done.stdout


def test_a_copy_that_was_edited(
    own: Checkout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(own.folder)
    find("HEAD").keep(tmp_path)
    find("HEAD").keep(tmp_path)
    (copy,) = (tmp_path / "snapshots").iterdir()
    (copy / "own.yaml").write_text("written by the code\n")
    find("HEAD").keep(tmp_path)
    (copy / "helper.py").write_text("VALUE = 'edited'\n")
    with pytest.raises(CommandError, match="modified after they were copied; remove this folder"):
        find("HEAD").keep(tmp_path)


@pytest.mark.slow
def test_a_revision_without_the_benchmark_its_parameters_or_its_version(own: Checkout) -> None:
    bench = own.folder / "own/bench.py"
    text = bench.read_text()
    bench.write_text("VERSION = 2\n" + text)
    assert "has version 1 of 'own.bench'" in refusal(own, "--local", "--against=HEAD")
    bench.write_text(text.replace("index: int", "size: int = 1\n    index: int"))
    own.write("own.yaml", "{name: own, benchmark: own.bench, fixed: {size: 3}}")
    assert "does not accept the parameters" in refusal(own, "--local", "--against=HEAD")
    own.git("rm", "-q", "--cached", "own/bench.py")
    own.git("commit", "-q", "-m", "remove")
    assert "has no benchmark 'own.bench'" in refusal(own, "--local", "--against=HEAD")
