"""Another checkout of the code, for `python -m jobs.submit SWEEP --against REV|DIR`.

Each run is measured with the present code and with a copy of the other checkout, in the same block.
The copy lacks the package `jobs`: the present launcher executes both sides, and only the measured
code differs. So the launcher must find in every checkout what it uses of `systems`.
tests/test_house.py lists it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from jobs import ROOT
from jobs.block import Block
from jobs.code import git
from jobs.code.export import export_revision, export_working_tree, hash_of
from jobs.code.measured_files import measured_files
from jobs.code.state import CodeState, ignored_in, is_installed, repository_root
from jobs.errors import CommandError
from jobs.launch.copies import import_paths, store
from jobs.results.manifest import SNAPSHOTS, Checkout
from jobs.run import Run
from jobs.sweep.expand import Expansion
from jobs.sweep.schema import Blocks
from jobs.worker.environment import with_project

OF_THE_LAUNCHER = ("jobs", "tests", "aggregate.py")  # not copied from a checkout of this project
# What is not copied from a folder without git
_NO_CODE = ("__pycache__", ".git", ".venv", "*.egg-info", ".*_cache", ".hypothesis")
CHECK_S = 120.0  # timeout of the check whether the checkout has the benchmarks, in seconds


@dataclass
class OtherCode:
    """Another checkout, copied to a temporary folder that is removed with this object."""

    name: str  # short name, for labels of runs
    stored: str  # name of its copy in a results folder, with a hash of the content
    state: dict[str, Any]  # as in the field environment.git of records
    root: Path  # root of the repository of the present code
    temporary: tempfile.TemporaryDirectory[str] = field(repr=False)

    @property
    def folder(self) -> Path:
        return Path(self.temporary.name) / "code"

    def planned(self, results: Path) -> Checkout:
        """Return the folders for jobs that run the copy in a results folder, see `keep`."""
        copy = results / SNAPSHOTS / self.stored
        cwd, inside, _ = import_paths({self.root: self.folder})
        return Checkout(
            name=self.name,
            folder=f"{SNAPSHOTS}/{self.stored}",
            cwd=str(copy / cwd.relative_to(self.folder) if cwd else Path.cwd()),
            python_path=[str(copy / Path(path).relative_to(self.folder)) for path in inside],
            state=self.state,
            of_project=ROOT.is_relative_to(self.root),
        )

    def keep(self, results: Path) -> None:
        """Move the code into the results folder, unless it is there already."""
        # The code may have written its other files, such as caches. It can still be continued.
        store(self.folder, results / SNAPSHOTS / self.stored, git.CODE)
        Path(self.planned(results).cwd).mkdir(parents=True, exist_ok=True)


def find(text: str) -> OtherCode:
    """Copy a git revision or another checkout to a temporary folder. Raises CommandError."""
    root = repository_root(Path.cwd()) or repository_root(ROOT) or ROOT
    temporary = tempfile.TemporaryDirectory(prefix="against-")
    target = Path(temporary.name) / "code"
    results = ignored_in(root, root / "logs")
    try:
        if os.path.isdir(text):
            state = _copy_folder(Path(text).resolve(), root, target, results)
        else:
            state = _copy_revision(text, root, target)
    except OSError as error:
        # shutil.Error has a list of source, target and reason.
        problem = error.args[0][0][2] if isinstance(error, shutil.Error) else error
        raise CommandError(f"--against {text!r} cannot be copied: {problem}") from None
    inside = ROOT.relative_to(root) if ROOT.is_relative_to(root) else None
    launcher = [] if inside is None else [str(inside / name) for name in OF_THE_LAUNCHER]
    for path in (target / name for name in (*results, *launcher)):
        is_folder = path.is_dir() and not path.is_symlink()
        shutil.rmtree(path) if is_folder else path.unlink(missing_ok=True)
    digest = hash_of(target)[:8]
    clean = state.commit if state.commit is not None and not state.dirty else None
    stored = f"{Path(text).resolve().name[:20] if clean is None else clean[:10]}-{digest}"
    if Path.cwd().is_relative_to(root):  # a folder without files in that checkout
        (target / Path.cwd().relative_to(root)).mkdir(parents=True, exist_ok=True)
    # The name is part of the ids of runs. A commit keeps its name, however it was copied.
    name = stored if clean is None else clean[:10]
    return OtherCode(name, stored, state.entry(target), root, temporary)


def _copy_revision(revision: str, root: Path, target: Path) -> CodeState:
    """Write the files of a revision to a folder. Return its state."""
    try:
        wanted = f"{revision}^{{commit}}"
        name = git.git(root, "rev-parse", "--verify", "--end-of-options", wanted).decode().strip()
    except git.GitError as error:
        what = f"--against must be a git revision or a folder, got {revision!r}"
        raise CommandError(f"{what}: {error}") from None
    export_revision(root, target, name)
    return CodeState(commit=name, dirty=False, untracked=(), source="git")


def _copy_folder(folder: Path, root: Path, target: Path, results: list[str]) -> CodeState:
    """Copy another checkout, without `results`. Return its state.

    If git tracks it, its tracked files and its untracked code are copied.
    """
    if folder == root.resolve():
        raise CommandError(
            f"--against must be another checkout, got the present one, {folder}; "
            "to compare with the last commit, use --against HEAD"
        )
    inside = ROOT.resolve().relative_to(root.resolve()) if ROOT.is_relative_to(root) else None
    if inside is not None and not (folder / inside / "systems").is_dir():
        hint = "" if repository_root(Path.cwd()) else f"; {Path.cwd()} is in no git repository"
        raise CommandError(
            f"--against must be a checkout of {root}, got {folder} without systems/{hint}"
        )
    why = f"copied from the folder {folder.name}"
    if (folder / ".git").exists():
        try:
            tree = git.status(folder, results)
            code = [name for name in tree.untracked if name.endswith(git.CODE)]
            export_working_tree(folder, target, results, code)
            return CodeState(commit=tree.commit, dirty=tree.is_dirty, source="git")
        except git.GitError as error:
            why = str(error)

    def ignore(at: str, names: list[str]) -> set[str]:
        inside = {name for name in names if os.path.relpath(f"{at}/{name}", folder) in results}
        return inside | shutil.ignore_patterns(*_NO_CODE)(at, names)

    shutil.copytree(folder, target, symlinks=True, ignore=ignore, dirs_exist_ok=True)
    return CodeState(why=why)


def with_other_code(expansion: Expansion, other: OtherCode, keys: Blocks | None) -> Expansion:
    """Return an expansion in which each run forms a block with its baseline in the other checkout.

    Of `keys`, the key `blocks` of the sweep, all but `interleave` and `baseline` are used.
    """
    keys = keys or Blocks()
    runs: list[Run] = []
    blocks: list[Block] = []
    for run in expansion.runs:
        baseline = replace(run, id=_hash(run.id, other.name, 16), checkout=other.name)
        name, members = _hash(f"block {run.id}", other.name, 12), (baseline.id, run.id)
        sustained = members if run.id in expansion.sustained else ()
        blocks.append(keys.block(name, members, sustained))
        runs += [baseline, run]
    return replace(expansion, runs=runs, blocks=blocks)


def _hash(text: str, name: str, digits: int) -> str:
    return hashlib.sha256(f"{text} {name}".encode()).hexdigest()[:digits]


def require_benchmarks(other: OtherCode, runs: Iterable[Run]) -> None:
    """Check that the other checkout has the benchmarks of runs, and accepts their parameters.

    Files of the user that are not in the repository would be the same in both.
    """
    wanted: dict[str, dict[str, Any]] = {}
    for run in runs:
        for name, path in measured_files(run).items():
            if path is None or is_installed(path):
                continue
            if os.path.isabs(name) or not path.resolve().is_relative_to(other.root.resolve()):
                raise CommandError(
                    f"--against compares two versions of {other.root}, and both would measure the "
                    f"same {name}; submit in the git repository of that file (git init makes one) "
                    "with its relative path, or leave its runs out with --where"
                )
        entry = wanted.setdefault(run.benchmark, {"version": run.version, "params": []})
        entry["params"].append(run.params)
    cwd, python_path, _ = import_paths({other.root: other.folder})
    has = f"--against: the checkout {other.name}"
    try:
        done = subprocess.run(
            [sys.executable, "-m", "jobs.launch.check_checkout"],
            input=json.dumps(wanted),
            cwd=cwd,
            env=with_project(dict(os.environ), python_path),
            capture_output=True,
            text=True,
            timeout=CHECK_S,
        )
    except subprocess.TimeoutExpired:
        raise CommandError(f"{has} does not load its benchmarks within {CHECK_S:.0f} s") from None
    if done.returncode != 0:
        lines = [*done.stdout.splitlines()[:1], *done.stderr.strip().splitlines()[-1:]]
        ended = f"cannot be checked: the process that loads it ended with {done.returncode}"
        # Files that git does not track are in no revision.
        why = next(iter(lines), ended).replace(str(other.folder), f"the checkout {other.name}")
        raise CommandError(f"{has} {why}")
