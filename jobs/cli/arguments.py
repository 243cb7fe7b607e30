"""Arguments and options that several commands share, and their parsers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from jobs.cli.completion import results_folders, run_ids
from jobs.user_files import invalid_path


def as_path(text: str) -> Path:
    """Convert an argument to a path. An error says why no file can have this path."""
    if wrong := invalid_path(text):
        raise typer.BadParameter(wrong)
    return Path(text)


def flag(name: str, help: str) -> Any:
    """Return an option without a value, such as --force."""
    return typer.Option(name, help=help)


RESULTS: dict[str, Any] = {"parser": as_path, "autocompletion": results_folders}

Folder = Annotated[
    Path | None,
    typer.Argument(
        metavar="FOLDER",
        help="Results folder. [default: the folder of the last accepted submission]",
        **RESULTS,
    ),
]
Folders = Annotated[
    list[Path],
    typer.Argument(
        metavar="FOLDER",
        help="Results folders, such as logs/flash, and folders that contain results folders.",
        **RESULTS,
    ),
]
AnyFolders = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="FOLDER",
        help="Results folders, and folders that contain results folders. [default: ./logs]",
        **RESULTS,
    ),
]
In = Annotated[
    Path | None,
    typer.Option(
        "--in",
        help="Results folder of the run. [default: search that of the last submission, then "
        "./logs]",
        **RESULTS,
    ),
]
RunId = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="Id of a run, or its first characters, for example 3fa2.",
        autocompletion=run_ids,
    ),
]
WhereParams = Annotated[
    str | None,
    typer.Option(
        "--where",
        metavar="CONDITION",
        help="Only the runs that satisfy this condition on parameters and benchmark. "
        "[default: all runs]",
    ),
]
Where = Annotated[
    str | None,
    typer.Option(
        "--where",
        metavar="CONDITION",
        help="Only the runs that satisfy this condition on parameters, benchmark, status, repeat "
        "and older_code, for example 'status == error and seq_len > 4096'. [default: all runs]",
    ),
]
