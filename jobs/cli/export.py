"""The command `export`: write the results of folders as one flat table."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from jobs.cli.arguments import Folders, as_path
from jobs.cli.output import fail, note
from jobs.frame.file import unusable_file, write_csv, write_frame
from jobs.results.latest import results_folders
from jobs.results.manifest import SUBMISSIONS
from jobs.results.unreadable import BadLine

EXAMPLES = "logs/flash --out flash.parquet"


def export(
    folders: Folders,
    out: Annotated[
        Path | None,
        typer.Option(
            help="File to write or replace, *.csv or *.parquet. [default: -, which prints CSV]",
            parser=as_path,
        ),
    ] = None,
    by: Annotated[
        Literal["run", "process"],
        typer.Option(
            help="A row is a run with all its repeats or rounds, or one process of it, with the "
            "clock, power and temperature of the GPU."
        ),
    ] = "run",
) -> None:
    """Write the results of folders as one flat table, for pandas and other programs.

    A row is a run on one kind of device, in one phase. Numbers have all digits. The rows and
    columns are those of jobs.report.load, see docs/results_folders.md.
    """
    if out == Path("-"):
        out = None
    if out is not None and (wrong := unusable_file(out)):
        fail(f"--out: {wrong}")
    from jobs.frame.flat import read_frame  # imports pandas, which is slow

    bad: list[BadLine] = []
    inside = [path for place in folders for path in _with_submissions(place, bad) or [place]]
    frame, notes = read_frame(inside, by == "process")
    note(*bad, *notes)
    if out is None:
        write_csv(frame, sys.stdout)
        return
    try:
        write_frame(frame, out)
    except OSError as error:
        fail(f"--out: {str(out)!r} cannot be written: {error.strerror or error}")


def _with_submissions(place: Path, bad: list[BadLine]) -> list[Path]:
    """Return the results folders in a folder that hold a submission."""
    found = results_folders([place], bad)
    return [each for each in found if any((each / SUBMISSIONS).glob("*/manifest.json"))]
