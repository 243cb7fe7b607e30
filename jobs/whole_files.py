"""Files that are written whole or not at all, and the owner, age and hash of files."""

from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Open a new file that replaces the file at `path` when the `with` block ends without an error.

    A reader sees the complete old or new content. `filename` of an OSError is `path`.
    """
    temporary = path.with_name(f".{path.name}.{os.uname().nodename}.{os.getpid()}")
    try:
        # Not through a link that another user has put there. Only the owner needs to write.
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        with open(os.open(temporary, flags, 0o644), "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException as error:
        with suppress(OSError):  # a partial file would take space of a full disk
            temporary.unlink()
        if isinstance(error, OSError):
            error.filename = str(path)
        raise


def is_own(path: Path) -> bool:
    """Return whether this user owns a file or folder.

    A mount may show other users than those of this host, so a new file beside it tells.
    """
    try:
        owner = path.stat().st_uid
        if owner == os.getuid():
            return True
        with tempfile.NamedTemporaryFile(dir=path if path.is_dir() else path.parent) as probe:
            return os.fstat(probe.fileno()).st_uid == owner
    except OSError:
        return False


def age_s(path: Path) -> float:
    """Return the time since a file was written, in seconds. Infinite if it does not exist.

    The clocks of hosts and file servers differ, so a file written beside it tells the time now. If
    none can be written, the clock of this host does.
    """
    try:
        last = path.lstat().st_mtime
    except OSError:
        return math.inf
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".clock.") as file:
            now = os.fstat(file.fileno()).st_mtime
    except OSError:
        now = time.time()
    return max(0.0, now - last)


def file_hash(path: Path) -> str | None:
    """Return the SHA-256 of a file, or of the target of a symbolic link. None: no such file."""
    try:
        if path.is_symlink():
            return hashlib.sha256(os.fsencode(os.readlink(path))).hexdigest()
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:  # also a folder, e.g. of a submodule that is not checked out
        return None


def write_json(path: Path, value: Any) -> str:
    """Write a value to a JSON file with `whole_file`, and return its SHA-256 hash."""
    content = json.dumps(value).encode()
    with whole_file(path) as file:
        file.write(content)
    return hashlib.sha256(content).hexdigest()
