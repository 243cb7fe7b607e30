"""Files that are written whole or not at all."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Open a new file that replaces the file at `path` when the `with` block ends.

    A process that reads the file sees either the complete old content or the complete new content.
    If the block raises, the old file stays.

    Raises:
        OSError: if the file cannot be written, e.g. because the disk is full. `filename` is `path`.
    """
    temporary = path.with_name(f".{path.name}.{os.uname().nodename}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
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


def write_json(path: Path, value: Any) -> None:
    """Write a value to a JSON file, whole or not at all.

    Missing parent folders are created.

    Raises:
        OSError: if the file cannot be written, e.g. because the disk is full. `filename` is `path`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as file:
        text = io.TextIOWrapper(file, encoding="utf-8")
        json.dump(value, text)
        text.detach()  # else it closes the file
