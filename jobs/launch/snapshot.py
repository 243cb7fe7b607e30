"""Copies of the code from which the jobs of a submission run: `python -m jobs.submit --snapshot`.

A snapshot contains the tracked files, as they are in the working tree, of the repository around the
current folder and of this project's repository. Snapshots with the same content are stored once.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from jobs import ROOT
from jobs.code import git
from jobs.code.export import export_working_tree, hash_of
from jobs.code.measured_files import find, is_project
from jobs.code.state import CodeState, ignored_in, is_tracked, read_state, repository_root
from jobs.errors import CommandError
from jobs.launch.copies import import_paths, store
from jobs.results.manifest import SNAPSHOTS, Manifest, Snapshot
from jobs.run import Run
from jobs.whole_files import write_json
from jobs.worker.environment import job_environment


@dataclass(frozen=True)
class _Source:
    root: Path  # root of a repository
    name: str  # name of its folder in the snapshot
    state: CodeState


def check(runs: Iterable[Run], results: Path) -> list[str]:
    """Check that a snapshot can be taken and contains the code that the runs measure.

    Returns a note for each measured file that is in no copied repository.
    """
    sources = _sources(results)
    notes = {}
    for name, path in code_of(runs).items():
        found = next((s for s in sources if path.is_relative_to(s.root)), None)
        if found is not None and os.path.isabs(name):
            raise CommandError(
                f"--snapshot requires a path relative to the current folder, got {name!r}, which "
                "jobs would not find in the copy"
            )
        if found is None and not is_project(path):
            notes[path] = f"{path} is not in the snapshot: its repository is not copied"
        elif found is not None and not is_tracked(found.root, str(path.relative_to(found.root))):
            shown = os.path.relpath(path)
            raise CommandError(
                f"--snapshot requires that git tracks the measured code, got {name!r} in an "
                f"untracked file; run: git add {shown}"
            )
    return list(notes.values())


def code_of(runs: Iterable[Run]) -> dict[str, Path]:
    """Return the files of benchmarks and references, also those of this project, by name."""
    names = dict.fromkeys(name for run in runs for name in (run.benchmark, *run.code))
    modules = {n: f"systems.benchmarks.{n}" if n.isidentifier() else n for n in names}
    files = {name: find(module) for name, module in modules.items()}
    return {name: path.resolve() for name, path in files.items() if path is not None}


def take(manifest: Manifest) -> Manifest:
    """Copy the code into the results folder. Return the manifest with it. Raises as `store`."""
    folder = manifest.folder / SNAPSHOTS
    folder.mkdir(parents=True, exist_ok=True)
    sources = _sources(manifest.folder)
    with tempfile.TemporaryDirectory(prefix=f".{manifest.id}-", dir=folder) as temporary:
        copy = Path(temporary, "code")
        for source in sources:
            left_out = ignored_in(source.root, manifest.folder)
            export_working_tree(source.root, copy / source.name, left_out)
        now = [(source.state.commit, source.state.diff) for source in _sources(manifest.folder)]
        if now != [(source.state.commit, source.state.diff) for source in sources]:
            roots = ", ".join(str(source.root) for source in sources)
            raise CommandError(f"files in {roots} changed while they were copied; try again")
        final = folder / hash_of(copy)[:16]
        store(copy, final)
    states = {source.name: source.state.entry(manifest.folder) for source in sources}
    write_json(final / f"{manifest.id}.json", states)
    cwd, inside, others = import_paths({source.root: final / source.name for source in sources})
    if cwd is not None:
        cwd.mkdir(parents=True, exist_ok=True)  # a folder without tracked files
    name = str(final.relative_to(manifest.folder))
    return replace(manifest, snapshot=Snapshot(name, str(cwd or Path.cwd()), [*inside, *others]))


def surroundings(manifest: Manifest) -> tuple[str | None, dict[str, str]]:
    """Return the current folder (None: this process's) and the environment variables for jobs."""
    environment = job_environment()
    if manifest.snapshot is None:
        return None, environment
    path = os.pathsep.join(manifest.snapshot.python_path)
    return manifest.snapshot.cwd, environment | {"PYTHONPATH": path}


def _sources(results: Path) -> list[_Source]:
    """Return the repositories to copy: that of the current folder and that of this project.

    If one is inside the other, it comes first: files in both are those of the inner one.
    """
    roots = dict.fromkeys([repository_root(Path.cwd()), repository_root(ROOT)])
    sources: list[_Source] = []
    for root in roots:
        if root is None or not (root / ".git").exists():
            continue
        own = f"{(ROOT / 'jobs').relative_to(root)}/__init__.py" if _holds(root, ROOT) else ""
        if own and not git.tracked(root, [own]) and not _holds(root, Path.cwd()):
            continue  # this project is installed in a folder of another repository
        state = read_state(root, results)
        if state.source != "git":
            raise CommandError(f"--snapshot requires git: {state.why}")
        taken = {source.name for source in sources}
        name = f"{root.name}-2" if root.name in taken else root.name
        sources.append(_Source(root, name, state))
    if not sources:
        raise CommandError(
            "--snapshot requires a git repository around the current folder or this project, got "
            f"none around {str(Path.cwd())!r} and {str(ROOT)!r}"
        )
    return sorted(sources, key=lambda source: -len(source.root.parts))


def _holds(root: Path, folder: Path) -> bool:
    return folder.resolve().is_relative_to(root)
