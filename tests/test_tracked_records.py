"""The reference results in logs/h200 stay readable, and their runs keep their ids.

A resumed sweep finds its earlier records by these ids.
"""

from __future__ import annotations

from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from jobs.results.manifest import read_manifests
from jobs.results.record import Record
from jobs.results.record_reader import read_records
from jobs.run import Run
from jobs.run_id import run_id
from jobs.sweep.benchmarks import load_benchmark
from tests.jobs.harness import ROOT

FOLDERS = sorted(path for path in (ROOT / "logs" / "h200").iterdir() if path.is_dir())
# Number of records by (benchmark, version) whose version is older than the benchmark's. Tables show
# these records, but a sweep would measure their runs again. Version 4 of attention has the same
# parameters and defaults as version 3, so the ids of version 3 can still be computed.
OLDER = {("attention", 3): 64}

load = cache(load_benchmark)


def id_of(run: Record | Run) -> str:
    """Return the id of a run, computed again with the benchmark version that measured it."""
    return run_id(run.benchmark, run.version, run.params, load(run.benchmark).json_defaults)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_parameters_hash_to_the_ids_that_were_written_down(folder: Path) -> None:
    records, unread = read_records(folder)
    assert records and not unread
    assert [record.run for record in records] == [id_of(record) for record in records]
    submitted = {}
    for manifest in read_manifests(folder):
        submitted[manifest.id] = manifest.runs
        assert all(name == run.id == id_of(run) for name, run in manifest.runs.items())
    for record in records:
        assert submitted[record.submission][record.run].params == record.params


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_benchmarks_still_take_the_parameters(folder: Path) -> None:
    for record in read_records(folder)[0]:
        params = load(record.benchmark).params.model_validate(record.params)
        assert params.model_dump(mode="json") == record.params


def test_records_of_older_versions_are_known() -> None:
    records = [record for folder in FOLDERS for record in read_records(folder)[0]]
    older = Counter(
        (r.benchmark, r.version) for r in records if r.version != load(r.benchmark).version
    )
    assert older == OLDER
    assert len(records) > 1000
