"""The reference results in logs/h100 and logs/h200 stay readable, and their runs keep their ids.

A resumed sweep finds its earlier records by these ids. The source hash of a record is that of its
commit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from jobs.code.export import export_revision
from jobs.results.manifest import read_manifests
from jobs.results.record import Record
from jobs.results.record_reader import read_records
from jobs.run import Run, run_id
from jobs.sweep.benchmarks import load_benchmark
from tests.jobs.harness import ROOT, run_python

FOLDERS = sorted(path.parent for path in (ROOT / "logs").glob("h[12]00/*/submissions"))
# Folders in logs/h200 with records that were made before records had a source hash. These count as
# older code.
WITHOUT_SOURCE_HASH = {
    "ddp",
    "ddp_buckets",
    "flash_leaderboard",
    "fsdp",
}

# Commit whose files were measured, by the commit that records name. The machine had a copy of the
# files in a repository with an older commit and one file more, so git saw uncommitted changes.
COPIES = {
    "0d219d1e602119880df36a075c5f8e1c39f284ad": "5e057e2e429780a9aaa1049227cef660175e89b9",
    "3493279e85e014ba1ec160921a3f3b69a6b7b008": "551528e784e69659a060e204242357d875194b0e",
    "eb4b49333b8821e1ed67d1ad245dcd6d2f641be5": "59abd6bcbc94fafff12dd1ba00cce26876c7b86e",
    "21c5d5a32da439744672f42d9da1f63c68f9056b": "1573c87f382c318b8006c8e3a3ce5031d8e6d125",
    "bfc054384e7c3a98a63a08703f439031bca560af": "2aa94d20b6a503f9795f0e776f979880ff8f4144",
}

# Commit that has the measured files, by the commit that records name. The latter is not in the
# repository, because it contained a file that does not belong there.
REPLACED = {
    "d4a28b8bd3e632dcd5588926ef013bb57576e516": "11caf2729ea00dc7336300b073d8b283de5f997d",
}

load = cache(load_benchmark)
for_each_folder = pytest.mark.parametrize(
    "folder", FOLDERS, ids=lambda folder: f"{folder.parent.name}-{folder.name}"
)
needs_git = pytest.mark.skipif(
    not (ROOT / ".git").exists(), reason="needs the git repository of this project"
)


@cache
def records_of(folder: Path) -> list[Record]:
    found, unread = read_records(folder)
    assert found and not unread
    return found


def params_of(run: Record | Run) -> dict[str, Any]:
    """Return the parameters of a run that its benchmark still has."""
    gone = {"profiler": "torch"} if run.benchmark == "profile" else {}
    return {name: value for name, value in run.params.items() if (name, value) not in gone.items()}


def id_of(run: Record | Run) -> str:
    """Return the id of a run, computed again with the benchmark version that measured it."""
    return run_id(run.benchmark, run.version, params_of(run), load(run.benchmark).json_defaults)


@for_each_folder
def test_parameters_hash_to_the_ids_that_were_written_down(folder: Path) -> None:
    records = records_of(folder)
    assert [record.run for record in records] == [id_of(record) for record in records]
    submitted = {}
    for manifest in read_manifests(folder):
        submitted[manifest.id] = manifest.runs
        assert all(name == run.id == id_of(run) for name, run in manifest.runs.items())
    for record in records:
        assert submitted[record.submission][record.run].params == record.params


@for_each_folder
def test_benchmarks_still_take_the_parameters(folder: Path) -> None:
    """A parameter that a benchmark got later has its default, with which ids stay the same."""
    for record in records_of(folder):
        if record.params.get("strategy") == "pulled":  # an exchange that `peer` replaced
            continue
        model = load(record.benchmark).params
        params = model.model_validate(record.params).model_dump(mode="json")
        added = {name: params[name] for name in params.keys() - record.params.keys()}
        assert params == params_of(record) | added
        assert added == {name: model.model_fields[name].default for name in added}


def test_records_are_of_the_present_versions() -> None:
    records = [record for folder in FOLDERS for record in records_of(folder)]
    assert [r.run for r in records if r.version != load(r.benchmark).version] == []
    assert len(records) > 1000


def test_every_diff_of_a_record_is_in_one_folder() -> None:
    """The reference results share logs/diffs. Results folders of users have their own diffs."""
    named = {
        state["diff"]
        for folder in FOLDERS
        for record in records_of(folder)
        for state in (record.environment["git"], *record.environment.get("code", []))
        if "diff" in state
    }
    diffs = {path.stem: path.read_bytes() for path in (ROOT / "logs" / "diffs").glob("*.diff")}
    assert named == diffs.keys()
    assert not list((ROOT / "logs").glob("h[12]00/*/diffs/*.diff")), "move them to logs/diffs"
    assert all(hashlib.sha256(diff).hexdigest().startswith(name) for name, diff in diffs.items())


# ---- source hashes -------------------------------------------------------------------------------


HASHES = """
import sys
from pathlib import Path
from jobs.results.run_states import observe
from jobs.sweep.run_sources import RunSources
sources = RunSources()
for folder in sys.argv[1:]:
    for manifest in observe(Path(folder).resolve()).manifests:
        for run in manifest.runs.values():
            print(run.id, sources.source_hash(run))
"""


def hashes_at(commit: str, folders: Iterable[Path], target: Path) -> dict[str, str]:
    """Return the source hash of each run of results folders, computed by the code of a commit.

    The files of the commit are written to the folder `target`.
    """
    export_revision(ROOT, target, commit)
    done = run_python("-c", HASHES, *folders, folder=target)
    assert done.returncode == 0, done.stdout
    return {line.split()[0]: line.split()[1] for line in done.stdout.splitlines()}


def has_changes(state: dict[str, Any]) -> bool:
    """Return whether the measured code differed from the commit that a record names.

    The report and the tests, which the machine's copy of the files may lack, are not measured.
    """
    changed = state.get("changed")
    return state["dirty"] and not (
        changed and all(path.startswith(("docs/report/", "tests/")) for path in changed)
    )


@needs_git
@pytest.mark.slow
def test_source_hashes_are_those_of_the_commits(tmp_path: Path) -> None:
    """Someone who checks out the commit of a record has the code that was measured."""
    without = set()
    at: dict[str, dict[Path, list[Record]]] = {}
    for folder in FOLDERS:
        for record in records_of(folder):
            if record.source_hash is None:
                without.add(folder.name)
            else:
                state = record.environment["git"]
                commit = REPLACED.get(state["commit"], state["commit"])
                commit = COPIES[commit] if has_changes(state) else commit
                at.setdefault(commit, {}).setdefault(folder, []).append(record)
    for commit, folders in at.items():
        found = hashes_at(commit, folders, tmp_path / commit)
        for folder, records in folders.items():
            assert [(r.run, r.source_hash) for r in records] == [
                (r.run, found[r.run]) for r in records
            ], (commit, folder)
    assert without == WITHOUT_SOURCE_HASH


@needs_git
def test_the_code_of_a_commit_computes_source_hashes(tmp_path: Path) -> None:
    """The check above works for the newest commit, whose records do not exist yet."""
    folder = FOLDERS[0]
    found = hashes_at("HEAD", [folder], tmp_path / "head")
    assert found.keys() >= {record.run for record in records_of(folder)}
    assert "unknown" not in found.values()
