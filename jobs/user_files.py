"""Paths that the user names on the command line or in a sweep file."""

from __future__ import annotations

import os
import re
from pathlib import Path

from jobs import ROOT

MAX_NAME = 255  # length of a file name on Linux, in bytes
MAX_PATH = 4095  # length of a path on Linux, in bytes


def invalid_path(text: str) -> str | None:
    """Return an error message if no file can have this path, else None."""
    if not text:
        return "a path must not be empty, got ''"
    if "\0" in text:
        return f"a path must not contain a NUL character, got {text!r}"
    try:
        data = text.encode("utf-8")
    except UnicodeEncodeError:  # Python decodes invalid bytes of arguments to lone surrogates
        return f"a path must be valid UTF-8, got {text!r}"
    longest = max(len(name) for name in data.split(b"/"))
    if longest > MAX_NAME:
        return f"a file name must have at most {MAX_NAME} bytes, got {longest} bytes"
    if len(data) > MAX_PATH:
        return f"a path must have at most {MAX_PATH} bytes, got {len(data)} bytes"
    return None


def unusable_results(path: Path) -> str | None:
    """Return an error message if a results folder must not have this path, else None."""
    if re.search(r"[\x00-\x1f\x7f-\x9f]", str(path)):
        return f"must be a path without line breaks and other control characters, got {str(path)!r}"
    if str(path).startswith(("-", "~")):
        return f"must not begin with - or ~, which would be part of its name, got {str(path)!r}"
    for folder in path.absolute().parents:
        if any(folder.glob("submissions/*/manifest.json")):
            return f"must not be inside another results folder, {folder}, got {str(path)!r}"
    for name, one in (("the root folder", "/"), ("your home folder", os.path.expanduser("~")),
                      ("the folder of this project", ROOT)):  # fmt: skip
        if os.path.realpath(path) == os.path.realpath(one):
            return f"must be a folder of its own, such as logs/mine, got {name} {str(path)!r}"
    file = not_a_folder(path)
    return f"must be a folder, got the file {str(file)!r}" if file else None


def not_a_folder(path: Path) -> Path | None:
    """Return the part of a path that exists and is no folder, or None if a folder can be there."""
    for one in (path, *path.parents):
        if os.path.lexists(one):
            return None if os.path.isdir(one) else one
    return None
