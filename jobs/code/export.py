"""Writes the files of a repository to a folder: those of a revision, or of the working tree.

Both are trees of git. git writes its index and new objects to a temporary folder, and nothing to
the repository. The files are as after `git checkout`, so attributes for archives do not matter.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from jobs.code.git import git

TIMEOUT_S = 600.0  # of a git command that writes many files


def export(
    root: Path, target: Path, revision: str | None = None, left_out: Sequence[str] = ()
) -> str:
    """Write the files of a repository to a new folder. Return a hash of names, contents and modes.

    Args:
        revision: commit whose files are written, without those of submodules. None: the files that
            git tracks, as they are in the working tree, with those of submodules.
        left_out: files and folders that are not written, relative to the root.
    """
    target.mkdir(parents=True)
    asked = ("--absolute-git-dir", "--git-path", "index", "--git-path", "objects")
    found = os.fsdecode(git(root, "rev-parse", *asked)).splitlines()
    folder, present, objects = (os.path.join(root, line) for line in found)
    with tempfile.TemporaryDirectory(prefix="export-") as scratch:
        index, new_objects = Path(scratch, "index"), Path(scratch, "objects")
        new_objects.mkdir()
        environment = {
            "GIT_DIR": folder,
            "GIT_WORK_TREE": str(root),
            "GIT_INDEX_FILE": str(index),
            "GIT_OBJECT_DIRECTORY": str(new_objects),
            "GIT_ALTERNATE_OBJECT_DIRECTORIES": json.dumps(objects, ensure_ascii=False),
        }

        def call(*arguments: str, **more: str) -> str:
            given = environment | more
            return os.fsdecode(git(root, *arguments, environment=given, timeout_s=TIMEOUT_S))

        if revision is not None:
            call("read-tree", revision)
        elif os.path.exists(present):
            # With its time, from which git knows which files may have changed since.
            shutil.copy2(present, index)
        if left_out:
            names = [f":(literal){name}" for name in left_out]
            call("rm", "-rfq", "--cached", "--ignore-unmatch", "--", *names)
        if revision is None:
            call("add", "--update")
        lines = [call("write-tree").strip()]
        call("checkout-index", "--all", GIT_WORK_TREE=str(target))
        for line in call("ls-files", "--stage", "-z").split("\0"):
            name = line.partition("\t")[2]
            is_submodule = line.startswith("160000 ") and (root / name / ".git").exists()
            if is_submodule and revision is None:
                (target / name).rmdir()
                lines.append(f"{name} {export(root / name, target / name)}")
    return hashlib.sha256("\n".join(lines).encode(errors="surrogateescape")).hexdigest()
