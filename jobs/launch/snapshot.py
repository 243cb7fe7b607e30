"""Copies of the code from which the jobs of a submission run: `python -m jobs.submit --snapshot`.

A snapshot contains the tracked files, as they are in the working tree, of the repository around the
current folder and of this project's repository. Snapshots with the same content are stored once.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from jobs import ROOT
from jobs.code import git
from jobs.code.export import export
from jobs.code.measured_files import find, is_project
from jobs.code.state import CodeState, ignored_in, is_tracked, read_state, repository_root
from jobs.errors import CommandError
from jobs.launch.copies import has_all, import_paths, store
from jobs.results.manifest import SNAPSHOTS, Manifest, Snapshot
from jobs.run import Run
from jobs.whole_files import write_json
from jobs.worker.environment import job_environment


class SnapshotError(CommandError):
    """Raised if no snapshot can be taken. The message is one line."""


@dataclass(frozen=True)
class _Source:
    root: Path  # root of a repository
    name: str  # name of its folder in the snapshot
    state: CodeState


def check(runs: Iterable[Run], results: Path) -> list[str]:
    """Check that a snapshot can be taken and contains the code that the runs measure.

    Returns:
        A note for each measured file that is in no copied repository.

    Raises:
        SnapshotError: if there is no repository to copy, git fails, or a measured file in a copied
            repository is untracked or given by an absolute path.
    """
    sources = _sources(results)
    notes = {}
    for name, path in _code(runs).items():
        found = next((s for s in sources if path.is_relative_to(s.root)), None)
        if found is not None and os.path.isabs(name):
            raise SnapshotError(
                f"--snapshot requires a path relative to the current folder, got {name!r}, which "
                "jobs would not find in the copy"
            )
        if found is None and not is_project(path):
            notes[path] = f"{path} is not in the snapshot: its repository is not copied"
        elif found is not None and not is_tracked(found.root, str(path.relative_to(found.root))):
            shown = os.path.relpath(path)
            raise SnapshotError(
                f"--snapshot requires that git tracks the measured code, got {name!r} in an "
                f"untracked file; run: git add {shown}"
            )
    return list(notes.values())


def _code(runs: Iterable[Run]) -> dict[str, Path]:
    """Return the files of benchmarks and references, also those of this project, by name."""
    files: dict[str, Path | None] = {}
    for run in runs:
        if run.benchmark not in files:
            name = run.benchmark
            files[name] = find(name if "." in name else f"systems.benchmarks.{name}")
        files |= {name: find(name) for name in run.code}
    return {name: path.resolve() for name, path in files.items() if path is not None}


def take(manifest: Manifest) -> Manifest:
    """Copy the code into the results folder, and return the manifest with the snapshot.

    Raises:
        SnapshotError: if there is no repository to copy, git fails, files change meanwhile, or an
            earlier copy with the same content was modified.
        OSError: if the copy cannot be written.
    """
    folder = manifest.folder / SNAPSHOTS
    folder.mkdir(parents=True, exist_ok=True)
    sources = _sources(manifest.folder)
    digest = hashlib.sha256()
    with tempfile.TemporaryDirectory(prefix=f".{manifest.id}-", dir=folder) as temporary:
        copy = Path(temporary, "code")
        for source in sources:
            left_out = ignored_in(source.root, manifest.folder)
            try:
                tree = export(source.root, copy / source.name, left_out=left_out)
            except git.GitError as error:
                raise SnapshotError(f"--snapshot requires git: {error}") from None
            digest.update(f"{source.name} {tree}\n".encode(errors="surrogateescape"))
        now = [source.state.fingerprint for source in _sources(manifest.folder)]
        if now != [source.state.fingerprint for source in sources]:
            roots = ", ".join(str(source.root) for source in sources)
            raise SnapshotError(f"files in {roots} changed while they were copied; try again")
        final = folder / digest.hexdigest()[:16]
        store(copy, final)
        if copy.exists() and not has_all(final, copy):  # an earlier submission stored it
            raise SnapshotError(
                f"files in {final} were modified after they were copied; remove this folder when "
                "no job uses it"
            )
    states = {source.name: source.state.entry(manifest.folder) for source in sources}
    write_json(final / f"{manifest.id}.json", states)
    cwd, inside, others = import_paths({source.root: final / source.name for source in sources})
    if cwd is not None:
        cwd.mkdir(parents=True, exist_ok=True)  # a folder without tracked files
    name = str(final.relative_to(manifest.folder))
    return replace(manifest, snapshot=Snapshot(name, str(cwd or Path.cwd()), [*inside, *others]))


def place(manifest: Manifest) -> tuple[str | None, dict[str, str]]:
    """Return the current folder and the environment variables for the jobs of a submission.

    The folder is None if the jobs run in the current folder of this process.
    """
    environment = job_environment()
    if manifest.snapshot is None:
        return None, environment
    path = os.pathsep.join(manifest.snapshot.python_path)
    return manifest.snapshot.cwd, environment | {"PYTHONPATH": path}


def _sources(results: Path) -> list[_Source]:
    """Return the repositories to copy: that of the current folder and that of this project."""
    found: dict[Path, None] = {}
    for folder in (Path.cwd(), ROOT):
        root = repository_root(folder)
        if root is not None and (root / ".git").exists():
            found[root] = None
    sources: list[_Source] = []
    try:
        for root in found:
            own = f"{(ROOT / 'jobs').relative_to(root)}/__init__.py" if _holds(root, ROOT) else ""
            if own and not git.tracked(root, [own]) and not _holds(root, Path.cwd()):
                continue  # this project is installed in a folder of another repository
            state = read_state(root, results)
            if state.source != "git":
                raise SnapshotError(f"--snapshot requires git: {state.why}")
            taken = {source.name for source in sources}
            name = f"{root.name}-2" if root.name in taken else root.name
            sources.append(_Source(root, name, state))
    except git.GitError as error:
        raise SnapshotError(f"--snapshot requires git: {error}") from None
    if not sources:
        raise SnapshotError(
            "--snapshot requires a git repository around the current folder or this project, got "
            f"none around {str(Path.cwd())!r} and {str(ROOT)!r}"
        )
    return sources


def _holds(root: Path, folder: Path) -> bool:
    return folder.resolve().is_relative_to(root)
