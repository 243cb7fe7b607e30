"""The command `report`: write the answers to CS336, assignment 2, as one document."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from jobs.cli.arguments import Folders, as_path
from jobs.cli.output import fail, note
from jobs.user_files import not_a_folder

EXAMPLES = "logs/flash --out report"


def report(
    folders: Folders,
    out: Annotated[
        Path,
        typer.Option(
            help="Folder to write: index.html, report.md and plots. A report in it is replaced.",
            parser=as_path,
        ),
    ] = Path("report"),
) -> None:
    """Write one document with the answers to the problems of CS336, assignment 2.

    The answers, tables and plots come from the records in the folders. Problems without records are
    left out. For an answer that is not complete, the document tells the command that measures it.
    Sweeps that belong to no problem have a section of their own.
    """
    from jobs.writeup.build import build_report  # imports much that other commands do not need

    if file := not_a_folder(out):
        fail(f"--out must be a folder, got the file {str(file)!r}")
    try:
        document = build_report(folders, out)
    except OSError as error:
        fail(f"{error.strerror}: {error.filename}" if error.filename else str(error))
    note(*document.notes)
    counts = ", ".join(f"{count} {state}" for state, count in document.counts().items() if count)
    print(f"wrote {out / 'index.html'} and {out / 'report.md'}: {counts}")
