"""Copies of the code from which the jobs of a submission run: `python -m jobs.submit --snapshot`.

A snapshot contains the tracked files, as they are in the working tree, of the repository around the
current folder and of this project's repository. Snapshots with the same content are stored once.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from jobs import ROOT
from jobs.code import git
from jobs.code.carried_state import file_hash
from jobs.code.measured_files import find, is_project
from jobs.code.state import CodeState, ignored_in, read_state, repository_root
from jobs.errors import CommandError
from jobs.launch.protection import make_own
from jobs.results.manifest import SNAPSHOTS, Manifest, Snapshot
from jobs.run import Run
from jobs.whole_files import write_json
from jobs.worker.environment import job_environment

TRIES = 3  # number of copies that are made if files change while they are copied


class SnapshotError(CommandError):
    """Raised if no snapshot can be taken. The message is one line."""


@dataclass(frozen=True)
class _Source:
    root: Path  # root of a repository
    name: str  # name of its folder in the snapshot
    files: list[str]  # tracked files, relative to the root
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
        elif found is not None and str(path.relative_to(found.root)) not in found.files:
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
        SnapshotError: if there is no repository to copy, git fails, the files change all the time,
            or an earlier copy with the same content was modified.
        OSError: if the copy cannot be written.
    """
    folder = manifest.folder / SNAPSHOTS
    temporary = folder / f".{manifest.id}"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        sources = _copy(manifest.folder, temporary)
        digest = _digest(sources, temporary)
        final = folder / digest
        try:
            temporary.rename(final)
        except OSError:
            if not final.is_dir():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    make_own(final)
    if _digest(sources, final) != digest:
        raise SnapshotError(
            f"files in {final} were modified after they were copied; remove this folder when no "
            "job uses it"
        )
    states = {source.name: source.state.entry(manifest.folder) for source in sources}
    write_json(final / f"{manifest.id}.json", states)
    snapshot = _places(sources, final, str(final.relative_to(manifest.folder)))
    return replace(manifest, snapshot=snapshot)


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
            files = git.tracked_files(root, ignored_in(root, results))
            if own and own not in files and not _holds(root, Path.cwd()):
                continue  # this project is installed in a folder of another repository
            state = read_state(root, results)
            if state.source != "git":
                raise SnapshotError(f"--snapshot requires git: {state.why}")
            taken = {source.name for source in sources}
            name = f"{root.name}-2" if root.name in taken else root.name
            sources.append(_Source(root, name, files, state))
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


def _copy(results: Path, target: Path) -> list[_Source]:
    """Copy the tracked files to a folder. Repeat it if files change in the meantime."""
    sources = _sources(results)
    for _ in range(TRIES):
        shutil.rmtree(target, ignore_errors=True)
        for source in sources:
            for name in source.files:
                _copy_file(source.root / name, target / source.name / name)
        before, sources = sources, _sources(results)
        if [s.state.fingerprint for s in before] == [s.state.fingerprint for s in sources]:
            return sources
    roots = ", ".join(str(source.root) for source in sources)
    raise SnapshotError(f"files changed {TRIES} times while they were copied from {roots}")


def _copy_file(source: Path, target: Path) -> None:
    """Copy a file or a symbolic link. Do nothing if it does not exist, or if it is a folder."""
    if source.is_symlink() or source.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            shutil.copyfile(source, target, follow_symlinks=False)
            if os.access(source, os.X_OK) and not target.is_symlink():
                mode = target.stat().st_mode
                target.chmod(mode | (mode & 0o444) >> 2)  # executable for those who may read it
        except FileNotFoundError:  # deleted in the meantime, so the copy is repeated
            pass


def _digest(sources: list[_Source], folder: Path) -> str:
    """Return a hash of the names, contents and permissions of the copied files."""
    digest = hashlib.sha256()
    for source in sources:
        for name in sorted(source.files):
            path = folder / source.name / name
            executable = os.access(path, os.X_OK) and not path.is_symlink()
            line = f"{source.name}/{name}\0{file_hash(path)}\0{executable}\n"
            digest.update(line.encode(errors="surrogateescape"))
    return digest.hexdigest()[:16]


def _places(sources: list[_Source], copy: Path, name: str) -> Snapshot:
    """Create the folders of the copy that jobs need, and return the snapshot for the manifest."""

    def mapped(path: Path) -> Path | None:
        for source in sources:
            if _holds(source.root, path):
                return copy / source.name / path.resolve().relative_to(source.root)
        return None

    cwd = mapped(Path.cwd())
    if cwd is not None:
        cwd.mkdir(parents=True, exist_ok=True)  # a folder without tracked files
    given = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    copies: dict[str, None] = {}
    others: dict[str, None] = {}
    for entry in [*given, *sys.path, *_editable_folders()]:
        target = mapped(Path(entry or os.curdir))
        if target is not None and target.is_dir():
            copies[str(target)] = None
        elif entry in given:
            others[os.path.abspath(entry)] = None
    return Snapshot(name, str(cwd or Path.cwd()), [*copies, *others])


def _editable_folders() -> list[str]:
    """Return the folders of packages that setuptools installed as editable through a finder."""
    finders = [m for name, m in list(sys.modules.items()) if name.startswith("__editable__")]
    paths = [path for finder in finders for path in getattr(finder, "MAPPING", {}).values()]
    return [str(Path(path).parent) for path in paths]
