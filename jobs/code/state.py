"""State of a source tree: its commit and its uncommitted changes.

It comes from git, or in a copy without git from the file .code_state.json, which `python -m jobs
carry` writes before the copy is made. The hashes in it tell whether the files have changed since.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from jobs import ROOT
from jobs.code import git
from jobs.whole_files import file_hash, whole_file, write_json

CARRIED = ".code_state.json"
FORMAT = 1
MAX_NAMES = 100  # maximum number of file names in a state
DIFFS = "diffs"  # folder of diffs inside a results folder
# Installed packages are not part of a repository around the virtual environment.
_INSTALLED = ("site-packages", "dist-packages")


class BrokenState(ValueError):
    """Raised if the file .code_state.json cannot be read."""


@dataclass(frozen=True)
class CodeState:
    """Commit of a source tree, and what differs from it."""

    commit: str | None = None
    dirty: bool | Literal["unknown"] = "unknown"  # see `git.WorkingTree.is_dirty`
    untracked: tuple[str, ...] | None = None  # names of untracked files
    diff: bytes = b""  # changes of tracked files
    source: Literal["git", "carried", "unknown"] = "unknown"
    why: str | None = None  # reason why something is unknown
    changed: tuple[str, ...] = ()  # files that differ from the carried state

    def entry(self, results: Path) -> dict[str, Any]:
        """Return the state as a dict for a record, and save its diff in the results folder."""
        names = None if self.untracked is None else list(self.untracked[:MAX_NAMES])
        entry: dict[str, Any] = {"commit": self.commit, "dirty": self.dirty, "untracked": names}
        why = self.why
        if self.diff:
            try:
                entry["diff"] = _save_diff(results, self.diff)
            except OSError as error:  # a full disk must not end the job
                why = f"the diff cannot be saved: {error.strerror}"
        if self.changed:
            entry["changed"] = list(self.changed[:MAX_NAMES])
        entry["source"] = self.source
        return entry if why is None else entry | {"why": why}


def is_installed(path: Path) -> bool:
    """Return whether a file belongs to an installed package."""
    return any(part in _INSTALLED for part in path.parts)


def repository_root(path: Path) -> Path | None:
    """Return the nearest folder around a file that is a git repository or a carried copy, or None.

    None also if the file belongs to an installed package.
    """
    path = path.resolve()
    for folder in (path, *path.parents):
        if (folder / ".git").exists() or (folder / CARRIED).is_file():
            return folder
        if folder.name in _INSTALLED:
            return None
    return None


def ignored_in(root: Path, results: Path) -> list[str]:
    """Return the results, which do not count as changes, as paths relative to the root."""
    folders = [root / "logs", Path.cwd() / "logs", results.resolve()]
    inside = [folder for folder in folders if folder.is_relative_to(root) and folder != root]
    names = [str(folder.relative_to(root)) for folder in inside]
    return list(dict.fromkeys([*names, CARRIED]))


def project_state(results: Path) -> CodeState:
    """Return the state of this project, without the results folder."""
    root = repository_root(ROOT)
    if root is None:
        return CodeState(why=f"{ROOT} is in no git repository")
    own = str((ROOT / "jobs" / "__init__.py").relative_to(root))
    return read_state(root, results, own)


def read_state(root: Path, results: Path, own: str | None = None) -> CodeState:
    """Return the state of a repository, or of a carried copy of it, without the results folder.

    If git does not track the file `own`, relative to the root, the repository is not that of the
    file, and the state is unknown.
    """
    why = f"{root} is no git repository"
    if (root / ".git").exists():
        try:
            if own is None or git.tracked(root, [own]):
                return _from_git(root, ignored_in(root, results))
            why = f"the git repository {root} does not track {own}"
        except git.GitError as error:
            why = str(error)
    if (root / CARRIED).is_file():
        try:
            return _from_carried(root, _read_carried(root))
        except BrokenState as error:
            why = str(error)
    return CodeState(why=why)


def _from_git(root: Path, ignored: list[str]) -> CodeState:
    tree = git.status(root, ignored)
    diff = git.diff(root, ignored) if tree.changed and tree.commit else b""
    return CodeState(
        commit=tree.commit,
        dirty=tree.is_dirty,
        untracked=tuple(tree.untracked),
        diff=diff,
        source="git",
        why=None if tree.commit else f"the git repository {root} has no commit",
    )


def _from_carried(root: Path, carried: dict[str, Any]) -> CodeState:
    files = carried["files"].items()
    changed = tuple(name for name, digest in files if file_hash(root / name) != digest)
    return CodeState(
        commit=carried["commit"],
        dirty=carried["dirty"] or bool(changed),
        untracked=tuple(carried["untracked"]),
        diff=carried["diff"].encode(errors="surrogateescape"),
        source="carried",
        changed=changed,
    )


def _read_carried(root: Path) -> dict[str, Any]:
    """Read the file .code_state.json in a folder, with the keys that `write_carried` writes."""
    try:
        data = json.loads((root / CARRIED).read_text(encoding="utf-8"))
        if data["format"] != FORMAT:
            raise ValueError(f"format must be {FORMAT}")
        kinds = {
            "commit": str | None, "dirty": bool, "untracked": list, "diff": str, "files": dict
        }  # fmt: skip
        if wrong := [key for key, kind in kinds.items() if not isinstance(data[key], kind)]:
            raise ValueError(f"{wrong[0]} has another type")
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise BrokenState(f"{root / CARRIED} cannot be read: {error}") from None
    return dict(data)


def is_tracked(root: Path, name: str) -> bool:
    """Return whether a repository, or a carried copy, tracks a file. False also if unknown."""
    try:
        if (root / ".git").exists():
            return name in git.tracked(root, [name])
        return name in _read_carried(root)["files"]
    except (git.GitError, BrokenState):
        return False


def write_carried(root: Path) -> Path:
    """Write the state of a git repository to the file .code_state.json in its root."""
    ignored = ignored_in(root, root / "logs")
    state, tracked = _from_git(root, ignored), git.tracked_files(root, ignored)
    data = {
        "format": FORMAT,
        "commit": state.commit,
        "dirty": state.dirty,
        "untracked": (state.untracked or ())[:MAX_NAMES],
        "diff": state.diff.decode(errors="surrogateescape"),  # bytes that are not UTF-8
        "files": {name: file_hash(root / name) for name in tracked},  # None: missing
    }
    write_json(root / CARRIED, data)
    return root / CARRIED


def _save_diff(folder: Path, diff: bytes) -> str:
    """Save a diff as `folder`/diffs/<hash>.diff and return the hash. An existing file is kept."""
    digest = hashlib.sha256(diff).hexdigest()[:16]
    path = folder / DIFFS / f"{digest}.diff"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as file:
            file.write(diff)
    return digest
