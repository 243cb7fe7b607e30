"""Reading a results folder has no side effects, and keys of later versions are ignored."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jobs.results.manifest import (
    BrokenManifest,
    Manifest,
    read_manifest,
    read_manifests,
    write_handles,
)
from jobs.results.run_states import observe
from jobs.status import Status
from jobs.worker.outcome import Outcome
from tests.jobs.results_folder import TOY, ResultsFolder, load, ok


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_is_collected_as_before(
    tmp_path: Path, folder: ResultsFolder, enabled: bool
) -> None:
    folder.submit(load(tmp_path, TOY + "fixed: {size: 1}\n"), lambda params, repeat: ok(1.0))
    before = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        assert observe(folder.path).tasks[0].status is Status.ok
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if before else gc.disable)()


def test_keys_of_a_later_version_in_a_handle_are_passed_over(
    tmp_path: Path, folder: ResultsFolder
) -> None:
    manifest = folder.submit(
        load(tmp_path, TOY + "fixed: {size: 1}\n"), lambda params, repeat: None
    )
    handle = {"pid": 1, "started": 2, "host": "elsewhere", "interrupted": True, "later": 3}
    write_handles(manifest)
    (manifest.path / "handles.json").write_text(json.dumps({"0": handle}))
    process = read_manifest(manifest.path).process
    assert process is not None and (process.pid, process.interrupted) == (1, True)


def test_an_outcome_keeps_facts_that_are_no_utf_8_and_nested_deeply(tmp_path: Path) -> None:
    deep: list[object] = []
    for _ in range(300):
        deep = [deep]
    facts = {"facts": {"a\udc80": 1, "deep": deep}}
    Outcome(status=Status.ok, measurements=facts).write(tmp_path / "outcome0.json")
    assert Outcome.read(tmp_path / "outcome0.json").measurements == facts


def edited(folder: ResultsFolder, change: Callable[[dict[str, Any]], None]) -> list[Manifest]:
    """Change the sweep in the manifest of a folder, and read the manifests."""
    (path,) = folder.path.glob("submissions/*/manifest.json")
    data = json.loads(path.read_text())
    change(data["sweep"])
    path.write_text(json.dumps(data))
    return read_manifests(folder.path)


def test_a_manifest_whose_tables_have_texts_is_read(tmp_path: Path, folder: ResultsFolder) -> None:
    """Early versions of the project stored texts in the manifest."""
    folder.submit(load(tmp_path, TOY + "fixed: {size: 1}\ntables: [{name: t}]\n"), lambda *_: None)
    (manifest,) = edited(folder, lambda sweep: sweep["tables"][0].update(text="{{ value() }}"))
    assert [table.name for table in manifest.sweep.tables] == ["t"]


@pytest.mark.parametrize("tables", [None, ["t"], {"name": "t"}])
def test_a_manifest_with_invalid_tables_says_which_key(
    tmp_path: Path, folder: ResultsFolder, tables: Any
) -> None:
    folder.submit(load(tmp_path, TOY + "fixed: {size: 1}\n"), lambda *_: None)
    with pytest.raises(BrokenManifest, match=r"sweep\.tables"):
        edited(folder, lambda sweep: sweep.update(tables=tables))
