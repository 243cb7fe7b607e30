"""Atomic writing of JSON files."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from jobs.whole_files import whole_file


def write_json(path: Path, value: Any) -> None:
    """Write a value to a JSON file atomically, see `whole_file`.

    Missing parent folders are created.

    Raises:
        OSError: if the file cannot be written, e.g. because the disk is full. `filename` is `path`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as file:
        text = io.TextIOWrapper(file, encoding="utf-8")
        json.dump(value, text)
        text.detach()  # else it closes the file
