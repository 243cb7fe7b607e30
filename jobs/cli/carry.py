"""The command `carry`: write the state of the repository to a file."""

from __future__ import annotations

from pathlib import Path

from jobs.cli.output import fail
from jobs.code.state import repository_root, write_carried

EXAMPLES = "&& rsync -a --exclude .git ./ gpubox:sweeps/"


def carry() -> None:
    """Write the state of this git repository to the file .code_state.json in its root.

    Run it before you copy the repository without .git to another machine. The file contains the
    commit, the uncommitted changes of tracked files, and a hash of each tracked file. Runs on the
    other machine record this commit, and whether files differ from the repository.
    """
    root = repository_root(Path.cwd())
    if root is None or not (root / ".git").exists():
        fail(f"the current folder must be in a git repository, got {str(Path.cwd())!r}")
    try:
        print(f"wrote {write_carried(root)}")
    except OSError as error:
        fail(f"{error.filename or root}: {error.strerror}")
