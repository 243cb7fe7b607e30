"""Reads the state of the code that a run measures, at the start of the job and of each attempt."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jobs import ROOT
from jobs.code.measured_files import measured_files
from jobs.code.state import CodeState, is_tracked, project_state, read_state, repository_root
from jobs.results.manifest import Manifest
from jobs.run import Run
from jobs.sweep.run_sources import RunSources, source_hashes
from jobs.whole_files import file_hash

_NOWHERE = {"tracked": False, "repository": None}  # a file in no repository


class CodeReader:
    """Reads the commits and changes of this project and of measured files, or of a snapshot.

    `hashes` has the hash of the sources of each run at the start of the job, None if unknown.
    """

    def __init__(self, manifest: Manifest, runs: Iterable[Run]):
        self._results = manifest.folder
        self._checkouts = manifest.checkouts
        self._saved: dict[Path, dict[str, Any]] = {}  # states of the repositories in the snapshot
        if manifest.snapshot is not None:
            self._saved = _saved_states(manifest.folder / manifest.snapshot.folder, manifest.id)
        self.hashes = source_hashes(runs)

    def environment(self, run: Run) -> dict[str, Any]:
        """Return the keys "git" and "code" of the field `environment` of a record.

        "git" is the state of this project. "code" lists the measured files outside this project,
        if there are any, with the states of their repositories. A run with another checkout of the
        code has the key "checkout" with the state of that checkout instead.
        """
        states: dict[Path, CodeState] = {}
        found: dict[str, Any] = {"git": self._of_project(states)}
        if run.checkout:
            other = self._checkouts[run.checkout]
            of_project = {"git": other.state} if other.of_project else {}
            return found | of_project | {"checkout": other.state}
        code = [self._of_file(name, path, states) for name, path in measured_files(run).items()]
        return found | ({"code": code} if code else {})

    def source_hash(self, run: Run) -> str | None:
        """Return the hash of the sources that a run measures.

        It is None if they have changed since the start of the job, which imports modules only once
        and so may execute old and new code together.
        """
        now = RunSources().source_hash(run)
        return now if self.hashes[run.id] == now else None

    def of_changed_code(self, environment: dict[str, Any]) -> dict[str, Any]:
        """Return what `environment` returned, without the commit of the measured code.

        It is for a run whose sources changed while the job ran: some modules may be older.
        """
        unknown = CodeState(why="the code changed while the job ran").entry(self._results)

        def forget(state: dict[str, Any]) -> dict[str, Any]:
            kept = {name: value for name, value in state.items() if name not in ("diff", "changed")}
            return kept | unknown

        if "code" in environment:
            return environment | {"code": [forget(state) for state in environment["code"]]}
        return environment | {"git": forget(environment["git"])}

    def _of_project(self, states: dict[Path, CodeState]) -> dict[str, Any]:
        """Return the entry of this project for a record. Its state is added to `states`."""
        saved = self._snapshot_of(ROOT)
        if saved is not None:
            return self._saved[saved]
        state = project_state(self._results)
        root = repository_root(ROOT)
        if root is not None and state.source in ("git", "carried"):
            states[root] = state
        return state.entry(self._results)

    def _of_file(
        self, name: str, path: Path | None, states: dict[Path, CodeState]
    ) -> dict[str, Any]:
        """Return the entry of a measured file, with the state of its repository."""
        if path is None:
            missing = CodeState(why="the file does not exist").entry(self._results)
            return {"name": name, "file": None, "sha256": None, **_NOWHERE, **missing}
        path = path.resolve()
        known: dict[str, Any] = {"name": name, "file": str(path), "sha256": file_hash(path)}
        saved = self._snapshot_of(path)
        if saved is not None:
            inside = {"file": str(path.relative_to(saved)), "tracked": True}
            return known | inside | {"repository": saved.name} | self._saved[saved]
        root = repository_root(path)
        if root is None:
            state = CodeState(why=f"{path} is in no git repository")
            return known | _NOWHERE | state.entry(self._results)
        if root not in states:
            states[root] = read_state(root, self._results)
        file = str(path.relative_to(root))
        place = {"file": file, "tracked": is_tracked(root, file), "repository": root.name}
        return known | place | states[root].entry(self._results)

    def _snapshot_of(self, path: Path) -> Path | None:
        """Return the copy of a repository in the snapshot that contains a path, if any."""
        return next((copy for copy in self._saved if path.is_relative_to(copy)), None)


def _saved_states(snapshot: Path, submission: str) -> dict[Path, dict[str, Any]]:
    """Return the states of the repositories in a snapshot for records, by path of the copy."""
    where = {"snapshot": str(snapshot.relative_to(snapshot.parents[1]))}
    try:
        saved = json.loads((snapshot / f"{submission}.json").read_text(encoding="utf-8"))
        return {snapshot.resolve() / name: state | where for name, state in saved.items()}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        unknown = CodeState(why=f"the states of the snapshot cannot be read: {error}")
        entry = unknown.entry(snapshot)  # has no diff, so nothing is saved
        copies = [path for path in snapshot.resolve().glob("*") if path.is_dir()]
        return dict.fromkeys(copies, entry | where)
