"""The file .code_state.json: state of a repository, for a copy of its files without git.

`python -m jobs carry` writes the file before the copy is made. On the other machine, the hashes in
the file tell whether the copied files are still those of the repository.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from jobs.whole_files import write_json

FILE = ".code_state.json"
FORMAT = 1


class BrokenState(ValueError):
    """Raised if the file .code_state.json cannot be read. The message is one line."""


@dataclass(frozen=True)
class CarriedState:
    """State of a repository at the time when the file was written."""

    commit: str | None
    dirty: bool
    untracked: list[str]  # names of untracked files
    diff: str  # changes of tracked files; bytes that are not UTF-8 are surrogates
    files: dict[str, str | None]  # SHA-256 of each tracked file by its name; None: missing

    def write(self, root: Path) -> Path:
        """Write the state to the file .code_state.json in a folder, and return its path."""
        write_json(root / FILE, {"format": FORMAT} | asdict(self))
        return root / FILE


def read(root: Path) -> CarriedState:
    """Read the file .code_state.json in a folder.

    Raises:
        BrokenState: if the file cannot be read or has another format.
    """
    try:
        data = json.loads((root / FILE).read_text(encoding="utf-8"))
        if data.pop("format") != FORMAT:
            raise ValueError(f"format must be {FORMAT}")
        state = CarriedState(**data)
        if not isinstance(state.dirty, bool) or not isinstance(state.files, dict):
            raise ValueError("dirty must be a boolean and files a dict")
        return state
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise BrokenState(f"{root / FILE} cannot be read: {error}") from None


def hashes(root: Path, names: Iterable[str]) -> dict[str, str | None]:
    """Return the SHA-256 of files by name. None stands for a file that is missing."""
    return {name: file_hash(root / name) for name in names}


def file_hash(path: Path) -> str | None:
    """Return the SHA-256 of a file, or of the target of a symbolic link. None: no such file."""
    try:
        if path.is_symlink():
            return hashlib.sha256(os.fsencode(os.readlink(path))).hexdigest()
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:  # also a folder, e.g. of a submodule that is not checked out
        return None
