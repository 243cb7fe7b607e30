"""Atomic writing of JSON files."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any


def write_json(path: Path, value: Any) -> None:
    """Write a value to a JSON file atomically.

    A process that reads the file sees either the complete old content or the complete new content.
    Missing parent folders are created.

    Raises:
        OSError: if the file cannot be written, e.g. because the disk is full. `filename` is `path`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.uname().nodename}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            json.dump(value, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException as error:
        with suppress(OSError):  # a partial file would take space of a full disk
            temporary.unlink()
        if isinstance(error, OSError):
            error.filename = str(path)
        raise
