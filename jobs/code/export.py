"""Writes the files of a repository to a folder: those of the working tree, or of a revision."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from jobs.code.git import git, tracked_files
from jobs.whole_files import file_hash

TIMEOUT_S = 600.0  # of a git command that writes many files


def export_working_tree(
    root: Path, target: Path, left_out: Sequence[str] = (), untracked: Sequence[str] = ()
) -> None:
    """Copy the files that git tracks, also those of submodules, as they are in the working tree.

    They are copied without git, whose filters and bits (skip-worktree) would write other contents.
    `left_out` are files and folders, and `untracked` are further files, relative to the root.
    """
    target.mkdir(parents=True)
    for name in (*tracked_files(root, list(left_out)), *untracked):
        source, copy = root / name, target / name
        if source.is_symlink() or source.is_file():  # else it was deleted, or is a submodule
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, copy, follow_symlinks=False)
            if os.access(source, os.X_OK) and not copy.is_symlink():
                mode = copy.stat().st_mode
                copy.chmod(mode | (mode & 0o444) >> 2)  # executable for those who may read it


def export_revision(root: Path, target: Path, commit: str) -> None:
    """Write the files of a commit, without those of submodules, as `git checkout` would.

    git writes its index to a temporary folder, and nothing to the repository. Attributes for
    archives do not matter.
    """
    target.mkdir(parents=True)
    folder = os.fsdecode(git(root, "rev-parse", "--absolute-git-dir")).removesuffix("\n")
    with tempfile.TemporaryDirectory(prefix="export-") as scratch:
        environment = {
            "GIT_DIR": folder,
            "GIT_WORK_TREE": str(target),
            "GIT_INDEX_FILE": os.path.join(scratch, "index"),
        }
        for arguments in (("read-tree", commit), ("checkout-index", "--all")):
            git(root, *arguments, environment=environment, timeout_s=TIMEOUT_S)


def hash_of(folder: Path, like: Path | None = None, ends: str | tuple[str, ...] = "") -> str:
    """Return a hash of the names, contents and permissions of the files in a folder.

    Those that the folder `like` lacks do not count, such as the bytecode that jobs have written,
    and those whose names have other `ends`.
    """
    digest = hashlib.sha256()
    for known in sorted((like or folder).rglob("*")):
        if known.name.endswith(ends) and (known.is_symlink() or known.is_file()):
            name = known.relative_to(like or folder)
            path = folder / name
            executable = os.access(path, os.X_OK) and not path.is_symlink()
            digest.update(json.dumps([str(name), file_hash(path), executable]).encode())
    return digest.hexdigest()
