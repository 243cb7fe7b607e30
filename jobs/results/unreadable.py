"""Files and folders of a results folder that cannot be read.

A damaged line or file is reported as a `BadLine` in the argument `bad` and skipped. A folder that
cannot be read is an error, because all results in it would seem to be missing.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from jobs.errors import CommandError

T = TypeVar("T")


class UnreadableResults(CommandError):
    """Raised if a folder in a results folder, such as `records`, cannot be read."""


class NoResults(UnreadableResults, FileNotFoundError):
    """Raised if a folder contains no submissions."""


@dataclass(frozen=True)
class BadLine:
    """A line of a record file, or a whole file, that is skipped because it cannot be read."""

    path: Path
    line: int  # from 1; 0 if the whole file or an entry of a JSON file cannot be read
    reason: str

    def __str__(self) -> str:
        where = f"{self.path}:{self.line}" if self.line else str(self.path)
        # Names of files may contain bytes that are not UTF-8, which cannot be printed.
        return f"{os.fsencode(where).decode(errors='replace')}: skipped: {self.reason}"


def names_in(folder: Path) -> list[str]:
    """Return the sorted names in a folder. A folder that does not exist has none.

    Do not use `Path.glob` for results. It finds nothing if a folder cannot be read.
    Raises UnreadableResults.
    """
    try:
        return sorted(os.listdir(folder))
    except FileNotFoundError:
        if not folder.is_symlink():
            return []
        why = "the target of the symbolic link does not exist"
    except OSError as error:
        why = str(error.strerror)
    raise UnreadableResults(f"{folder} cannot be read: {why}")


def read_json(path: Path, kind: TypeAdapter[T], bad: list[BadLine] | None = None) -> T | None:
    """Return the content of a JSON file, or None if it does not exist or cannot be read."""
    try:
        return kind.validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        reason = str(error.strerror)
    except ValidationError as error:
        reason = first_problem(error)
    if bad is not None:
        bad.append(BadLine(path, 0, reason))
    return None


def first_problem(error: ValidationError) -> str:
    """Return the first problem that pydantic found in JSON data, with the position in the data."""
    first = error.errors(include_input=False, include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    if first["type"] == "missing":
        return f"the key {where!r} is missing"
    what = first["msg"].removeprefix("Value error, ")  # of a check of our own
    return f"{where}: {what}" if where else what
