"""Writes a DataFrame to a CSV or Parquet file."""

from __future__ import annotations

import csv
import os
import stat
from importlib.util import find_spec
from pathlib import Path
from typing import IO, TYPE_CHECKING

from jobs.whole_files import whole_file

if TYPE_CHECKING:
    import pandas as pd

SUFFIXES = (".csv", ".parquet")


def unusable_file(path: Path) -> str | None:
    """Return an error message if a DataFrame cannot be written to a path, else None."""
    if path.is_dir():
        return f"must be a file, got the folder {str(path)!r}"
    if path.suffix.lower() not in SUFFIXES:
        return f"the name must end in {' or '.join(SUFFIXES)}, got {str(path)!r}"
    if not path.parent.is_dir():
        return f"the folder {str(path.parent)!r} does not exist"
    if path.exists() and not stat.S_ISREG(os.stat(path).st_mode):
        return f"must be a regular file, got {str(path)!r}"
    if path.suffix.lower() == ".parquet" and find_spec("pyarrow") is None:
        return "a Parquet file needs pyarrow; run pip install pyarrow, or write a .csv file"
    return None


def write_frame(frame: pd.DataFrame, path: Path) -> None:
    """Write a DataFrame to a file whose suffix is .csv or .parquet. An old file is replaced.

    Raises:
        OSError: if the file cannot be written, e.g. because the disk is full. The old file stays.
    """
    with whole_file(path) as file:
        if path.suffix.lower() == ".csv":
            write_csv(frame, file)
        else:
            frame.to_parquet(file, engine="pyarrow", index=False)


def write_csv(frame: pd.DataFrame, file: IO[bytes] | IO[str]) -> None:
    """Write a DataFrame as CSV with all digits of numbers. Missing values are empty.

    Text is quoted, because it may contain line breaks.
    """
    frame.to_csv(file, index=False, lineterminator="\n", quoting=csv.QUOTE_NONNUMERIC)
